"""Fixtures of the decorators' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from retrysafe.events import Event, listening
from retrysafe.stores.memory import MemoryStore


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def told() -> Iterator[list[Event]]:
    """The events of one test."""
    events: list[Event] = []
    with listening(events.append):
        yield events
