"""What a waiting call sleeps on, one per colour. A signal that comes before the sleep is kept."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

from retrysafe.flights import Flight, Signal

__all__ = ["AsyncPlace", "AsyncWaker", "ThreadPlace", "ThreadWaker"]

_IDLE = object()


class AsyncWaker:
    """Sleeps on a future of the running loop."""

    __slots__ = ("_future", "_signal")

    def __init__(self) -> None:
        self._signal: Signal | object = _IDLE
        self._future: asyncio.Future[None] | None = None

    def wake(self, signal: Signal) -> None:
        if self._signal is _IDLE or self._signal == b"":
            self._signal = signal
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, seconds: float) -> Any:
        if self._signal is _IDLE:
            loop = asyncio.get_running_loop()
            future = self._future = loop.create_future()
            timer = loop.call_later(seconds, _expire, future)
            try:
                await future
            finally:
                timer.cancel()
                self._future = None
        signal, self._signal = self._signal, _IDLE
        return None if signal is _IDLE else signal


def _expire(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ThreadWaker:
    """Sleeps on a lock, which is made when it is slept on."""

    __slots__ = ("_gate", "_signal")

    def __init__(self) -> None:
        self._signal: Signal | object = _IDLE
        self._gate: Any = None

    def wake(self, signal: Signal) -> None:
        with _changing:
            if self._signal is _IDLE or self._signal == b"":
                self._signal = signal
            if self._gate is not None and self._gate.locked():
                self._gate.release()

    def wait(self, seconds: float) -> Any:
        gate = None
        with _changing:
            if self._signal is _IDLE:
                gate = self._gate = threading.Lock()
                gate.acquire()
        if gate is not None:
            gate.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
        with _changing:
            self._gate = None
            signal, self._signal = self._signal, _IDLE
        return None if signal is _IDLE else signal


# One for all: it is held for a look.
_changing = threading.Lock()


def _after_fork() -> None:
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


class AsyncPlace(AsyncWaker):
    """A call's place in its flight (`retrysafe.flights`), on an event loop."""

    __slots__ = ("counted", "flight", "leads")
    counted: bool
    flight: Flight | None
    leads: bool


class ThreadPlace(ThreadWaker):
    """A call's place in its flight, on a thread."""

    __slots__ = ("counted", "flight", "leads")
    counted: bool
    flight: Flight | None
    leads: bool
