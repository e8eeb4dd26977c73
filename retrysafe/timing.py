"""The seam to time and chance: everything that waits or draws lots for a retry asks here.

`retrysafe.testing.instant()` puts another `Timing` in its place, for the whole process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Timing", "installed", "monotonic", "timing"]


class Timing:
    """The real thing. `attempts`: at most so many attempts a call; None: as the policy says."""

    attempts: int | None = None

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def wall(self) -> float:
        """The time of day, Unix seconds: for dates that others send, for nothing else."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        time.sleep(seconds)

    async def asleep(self, seconds: float) -> None:
        """Let the event loop go on meanwhile. Cancellation ends it at once."""
        await asyncio.sleep(seconds)

    def random(self) -> float:
        """A number in [0, 1)."""
        return random.random()


_REAL = Timing()
_stack: list[Timing] = [_REAL]


def timing() -> Timing:
    """What is in force now."""
    return _stack[-1]


def monotonic() -> float:
    """`timing().monotonic()`, short: every retried call asks."""
    now = _stack[-1]
    return time.monotonic() if now is _REAL else now.monotonic()


@contextmanager
def installed(other: Timing) -> Iterator[None]:
    """`other` is in force within the block, in every thread."""
    _stack.append(other)
    try:
        yield
    finally:
        _stack.remove(other)
