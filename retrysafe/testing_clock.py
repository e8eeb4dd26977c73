"""Time in tests: a clock by hand, and retries that don't sleep."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from retrysafe.timing import Timing, installed

__all__ = ["FakeClock", "Instant", "instant"]


class FakeClock:
    """Seconds that pass when told to: `clock()` reads them, `advance` and `sleep` move them."""

    def __init__(self, start: float = 1000.0) -> None:
        self.now = float(start)
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        with self._lock:
            self.now += seconds

    sleep = advance


class Instant(Timing):
    """Sleeps take no time, are noted in `delays` (seconds, in order), and count for deadlines."""

    def __init__(
        self,
        attempts: int | None = None,
        clock: FakeClock | None = None,
        rng: Callable[[], float] | None = None,
    ) -> None:
        self.attempts = attempts
        self.delays: list[float] = []
        self._clock = clock
        self._rng = rng or random.random
        self._slept = 0.0
        self._start = 0.0 if clock is None else clock()
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return time.monotonic() + self._slept if self._clock is None else self._clock()

    def wall(self) -> float:
        gone = self._slept if self._clock is None else self._clock() - self._start
        return time.time() + gone

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.delays.append(seconds)
            self._slept += seconds
        if self._clock is not None:
            self._clock.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.sleep(seconds)
        await asyncio.sleep(0)  # others run, and a cancellation arrives, as in a real sleep

    def random(self) -> float:
        return self._rng()


@contextmanager
def instant(
    attempts: int | None = None,
    *,
    clock: FakeClock | None = None,
    rng: Callable[[], float] | None = None,
) -> Iterator[Instant]:
    """Within the block no retry sleeps; what it would have slept is in `.delays`.

    attempts: no call makes more than so many, whatever its policy says.
    clock: the monotonic clock of the retries; sleeping moves it. By default the real one, plus
        what was slept.
    rng: returns numbers in [0, 1), in place of chance.
    It holds for the whole process: threads and event loops too.
    """
    if attempts is not None and (
        isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1
    ):
        raise ValueError(f"attempts takes a whole number of 1 or more, not {attempts!r}")
    timing = Instant(attempts, clock, rng)
    with installed(timing):
        yield timing
