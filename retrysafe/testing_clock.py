"""The seam for time: what sleeps or looks at a clock between attempts asks here, so that tests
need no waiting. Process-wide, like the clock it stands for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FakeClock:
    """A clock that is moved by hand: call it for its seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on. Raises ValueError for a step back: monotonic clocks don't take any."""
        if seconds < 0:
            raise ValueError("a monotonic clock doesn't go back")
        self._now += seconds


class Instant:
    """What was planned while nothing slept: `delays`, in seconds, in order."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.delays: list[float] = []

    def pass_over(self, seconds: float) -> None:
        """Note a delay and move the clock on by it."""
        self.delays.append(seconds)
        self.clock.advance(max(0.0, seconds))


_instant: Instant | None = None


@contextmanager
def instant(clock: FakeClock | None = None) -> Iterator[Instant]:
    """Within the block no retry sleeps: planned delays go to `.delays`, and the clock that
    deadlines are measured by moves on by them."""
    global _instant
    before = _instant
    _instant = Instant(clock or FakeClock(time.monotonic()))
    try:
        yield _instant
    finally:
        _instant = before


def now() -> float:
    """Monotonic seconds."""
    return time.monotonic() if _instant is None else _instant.clock()


def sleep(seconds: float, real: Callable[[float], None] = time.sleep) -> None:
    """Sleep, on a thread."""
    if _instant is None:
        real(seconds)
    else:
        _instant.pass_over(seconds)


async def asleep(seconds: float) -> None:
    """Sleep, on an event loop; still a point where a task can be cancelled."""
    if _instant is None:
        await asyncio.sleep(seconds)
    else:
        _instant.pass_over(seconds)
        await asyncio.sleep(0)
