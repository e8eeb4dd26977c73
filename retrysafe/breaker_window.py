"""What a closed breaker remembers of its calls: by count or by time, in constant time and space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

FAILED = 1
SLOW = 2


class Window(Protocol):
    """Counts of the calls it still remembers. `pristine`: one more success changes nothing."""

    @property
    def calls(self) -> int: ...

    @property
    def failures(self) -> int: ...

    @property
    def slow(self) -> int: ...

    @property
    def pristine(self) -> bool: ...

    def add(self, mark: int) -> None: ...


class CountWindow:
    """The last `size` calls: a ring of marks and running counts."""

    __slots__ = ("_at", "_ring", "_size", "calls", "failures", "pristine", "slow")

    def __init__(self, size: int) -> None:
        self._ring = bytearray(size)
        self._size = size
        self._at = 0
        self.calls = self.failures = self.slow = 0
        self.pristine = False

    def add(self, mark: int) -> None:
        """Remember one call: 0, or FAILED and SLOW put together."""
        at = self._at
        old = self._ring[at]
        self._ring[at] = mark
        self._at = at + 1 if at + 1 < self._size else 0
        if self.calls < self._size:
            self.calls += 1
        self.failures += (mark & FAILED) - (old & FAILED)
        self.slow += (mark >> 1) - (old >> 1)
        self.pristine = self.calls == self._size and not self.failures and not self.slow


class TimeWindow:
    """The calls of the last `seconds`, kept in slices of a twentieth: a call is forgotten
    after between 95 % and 100 % of the time."""

    SLICES = 20

    __slots__ = ("_clock", "_counts", "_slice", "_width", "pristine")

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._width = seconds / self.SLICES
        self._clock = clock
        self._slice = int(clock() // self._width)
        self._counts: list[list[int]] = [[0, 0, 0] for _ in range(self.SLICES)]
        self.pristine = False  # a success always counts: calls leave by time

    def _now(self) -> list[int]:
        current = int(self._clock() // self._width)
        for each in range(max(self._slice + 1, current - self.SLICES + 1), current + 1):
            self._counts[each % self.SLICES] = [0, 0, 0]
        self._slice = max(self._slice, current)
        return self._counts[self._slice % self.SLICES]

    def add(self, mark: int) -> None:
        counts = self._now()
        counts[0] += 1
        if mark:
            counts[1] += mark & FAILED
            counts[2] += mark >> 1

    def _sum(self, at: int) -> int:
        self._now()
        return sum(counts[at] for counts in self._counts)

    @property
    def calls(self) -> int:
        return self._sum(0)

    @property
    def failures(self) -> int:
        return self._sum(1)

    @property
    def slow(self) -> int:
        return self._sum(2)
