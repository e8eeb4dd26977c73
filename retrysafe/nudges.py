"""The channels that this process, or event loop, hears: one subscription each, however many wait.

A nudge is a hint to look, never the news itself: it may be lost, doubled or late.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from typing import Any, Protocol

from retrysafe.stores.base import AsyncBackend, Backend

__all__ = ["AsyncNudges", "Nudges", "async_nudges_of", "nudges_of"]

_LOOK_AGAIN = b""
# How long a subscription may take before it counts as refused (seconds); it goes on trying.
_CONFIRM = 5.0


class Wakes(Protocol):
    """Who is nudged. On the loop, or on any thread."""

    def wake(self, signal: Any, /) -> None: ...


_sync: weakref.WeakKeyDictionary[Any, Nudges] = weakref.WeakKeyDictionary()
_async: weakref.WeakKeyDictionary[Any, AsyncNudges] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that isn't here may hold the other


os.register_at_fork(after_in_child=_after_fork)


def nudges_of(door: Backend) -> Nudges:
    """What the threads of this process hear over one door."""
    with _lock:
        return _sync.setdefault(door, Nudges(door))


def async_nudges_of(door: AsyncBackend) -> AsyncNudges:
    """What one event loop hears over its door."""
    found = _async.get(door)
    if found is None:
        found = _async[door] = AsyncNudges(door)
    return found


class _Channel:
    def __init__(self) -> None:
        self.wakers: set[Any] = set()
        self.subscribing: asyncio.Task[bool] | None = None


class AsyncNudges:
    """Subscriptions of one event loop."""

    def __init__(self, door: AsyncBackend) -> None:
        # Not the door itself: it is this object's key in a weak table.
        self._door = weakref.ref(door)
        self._channels: dict[bytes, _Channel] = {}
        self._loop = asyncio.get_running_loop()

    async def join(self, channel: bytes, waker: Wakes, limit: float) -> bool:
        """Be woken by the channel's messages from now on; True when the server has confirmed it
        within `limit` seconds. A later confirmation wakes: something may have come before it."""
        found = self._channels.get(channel)
        if found is None:
            found = self._channels[channel] = _Channel()
        found.wakers.add(waker)
        if found.subscribing is None:
            found.subscribing = self._loop.create_task(
                self._subscribe(channel, found), name="retrysafe-subscribe"
            )
        done, _ = await asyncio.wait([found.subscribing], timeout=limit)
        return bool(done) and found.subscribing is not None and found.subscribing.result()

    def leave(self, channel: bytes, waker: Wakes) -> None:
        """Be woken no more; the last one ends the subscription."""
        found = self._channels.get(channel)
        if found is None:
            return
        found.wakers.discard(waker)
        if found.wakers:
            return
        del self._channels[channel]
        if found.subscribing is not None:
            found.subscribing.cancel()
        if door := self._door():
            door.unsubscribe(channel)

    async def _subscribe(self, channel: bytes, found: _Channel) -> bool:
        same = threading.get_ident()

        def wake() -> None:
            for waker in tuple(found.wakers):
                waker.wake(_LOOK_AGAIN)

        def on_news(message: bytes | None) -> None:
            if threading.get_ident() == same:
                wake()
            elif not self._loop.is_closed():
                self._loop.call_soon_threadsafe(wake)

        door = self._door()
        confirmed = door is not None and await door.subscribe(channel, on_news, _CONFIRM)
        if confirmed:
            wake()
        else:
            found.subscribing = None  # the next one to come tries again
        return confirmed


class Nudges:
    """Subscriptions of one process, for its threads."""

    def __init__(self, door: Backend) -> None:
        self._door = weakref.ref(door)
        self._channels: dict[bytes, _Channel] = {}
        self._lock = threading.Lock()

    def join(self, channel: bytes, waker: Wakes, limit: float) -> bool:
        """See `AsyncNudges.join`."""
        with self._lock:
            found = self._channels.setdefault(channel, _Channel())
            found.wakers.add(waker)  # from now on no `leave` ends the subscription

        def on_news(message: bytes | None) -> None:
            for each in tuple(found.wakers):
                each.wake(_LOOK_AGAIN)

        door = self._door()
        return door is not None and door.subscribe(channel, on_news, limit)

    def leave(self, channel: bytes, waker: Wakes) -> None:
        """See `AsyncNudges.leave`."""
        with self._lock:
            found = self._channels.get(channel)
            if found is None:
                return
            found.wakers.discard(waker)
            if found.wakers:
                return
            del self._channels[channel]
            if door := self._door():
                door.unsubscribe(channel)
