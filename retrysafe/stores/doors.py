"""One door a process, one an event loop: connections are never shared across a fork or loops."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator
from typing import Any

from retrysafe.stores.base import AsyncBackend, Backend, Store

_doors: dict[int, tuple[Store, Backend]] = {}
_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, Any]] = (
    weakref.WeakKeyDictionary()
)
_lock = threading.Lock()


def door(store: Store) -> Backend:
    """This process's door to a store."""
    found = _doors.get(id(store))
    if found is None:
        with _lock:
            found = _doors.setdefault(id(store), (store, store.open()))
    return found[1]


def async_door(store: Store) -> AsyncBackend:
    """The running loop's door to a store; it closes when the loop ends."""
    loop = asyncio.get_running_loop()
    doors = _loops.get(loop)
    if doors is None:
        # A door holds its loop, so the weak key alone would keep both for ever.
        for ended in [each for each in _loops if each.is_closed()]:
            del _loops[ended]
        doors = _loops[loop] = {}
    found = doors.get(id(store))
    if found is None:
        opened = store.open_async()
        closer = _until_closed(opened, doors, id(store))
        # A loop closes the async generators it has begun when it ends: that is where the socket
        # goes. The first step runs at once, it awaits nothing.
        begun = closer.__anext__()
        with contextlib.suppress(StopIteration):
            begun.send(None)
        found = doors[id(store)] = (store, opened, closer)
    return found[1]


async def _until_closed(
    opened: AsyncBackend, doors: dict[int, Any], name: int
) -> AsyncGenerator[None, None]:
    owner = os.getpid()
    try:
        yield
    finally:
        doors.pop(name, None)
        if os.getpid() == owner:  # a child that unwinds its copy of the loop leaves ours alone
            await opened.close()


# The parent's doors, kept so that a child collects and closes none of them.
_inherited: list[Any] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _inherited.extend((dict(_doors), list(_loops.values())))
    _doors.clear()
    _loops.clear()


os.register_at_fork(after_in_child=_after_fork)
