"""Fixtures of the decorators' tests."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from retrysafe.events import Event, listening
from retrysafe.stores import Store, open_store
from retrysafe.stores.memory import MemoryStore


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Store:
    """Every store that a function may be recorded in."""
    if request.param == "memory":
        return MemoryStore()
    url: str = request.getfixturevalue("redis_url")
    return open_store(url, namespace=f"t-{uuid4().hex[:8]}")


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def told() -> Iterator[list[Event]]:
    """The events of one test."""
    events: list[Event] = []
    with listening(events.append):
        yield events
