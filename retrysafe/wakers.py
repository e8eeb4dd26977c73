"""What a waiting call sleeps on, one per colour. A signal that comes before the sleep is kept."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from retrysafe.flights import Signal

__all__ = ["AsyncWaker", "ThreadWaker"]

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
    """Sleeps on a condition."""

    __slots__ = ("_condition", "_signal")

    def __init__(self) -> None:
        self._signal: Signal | object = _IDLE
        self._condition = threading.Condition(threading.Lock())

    def wake(self, signal: Signal) -> None:
        with self._condition:
            if self._signal is _IDLE or self._signal == b"":
                self._signal = signal
            self._condition.notify()

    def wait(self, seconds: float) -> Any:
        with self._condition:
            self._condition.wait_for(lambda: self._signal is not _IDLE, seconds)
            signal, self._signal = self._signal, _IDLE
        return None if signal is _IDLE else signal
