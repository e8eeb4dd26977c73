"""The pytest plugin: a fresh store for each test."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def retrysafe_store() -> Any:
    """An empty store in memory, this test's own."""
    from retrysafe.testing import memory_store

    return memory_store()
