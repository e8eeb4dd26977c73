"""A retry budget of this process: under load, retries are the first thing to go."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from retrysafe.timing import timing

__all__ = ["RetryBudget"]

_RESERVE = 10.0  # seconds of `per_second` that a new budget starts with, and retries it can save
_TINY = 1e-9  # ten times 0.1 is one
_LARGEST = sys.float_info.max  # an int beyond it is no float


class RetryBudget:
    """A token bucket that retries draw from; share one between the calls to one endpoint.

    Each retry costs one token; without one there is no retry, and the call's own error is raised
    at once. First attempts cost nothing. Each call that succeeds at its first attempt brings
    `ratio` tokens, each second `per_second`; so in an outage, when nothing succeeds, retries fall
    to `per_second`. Any number of threads may share it; time is monotonic.

    ratio: tokens per success at the first attempt, 0 or more.
    per_second: tokens per second, 0 or more.
    capacity: the most it holds; by default 10, or ten seconds' worth if that is more.
    initial: what it starts with; by default ten seconds' worth, at most the capacity.
    shed: a callable that says whether retries are to be shed now, such as a load flag: while it
    returns true there is none, and first attempts go on. One that raises ends the retries of the
    call that asked.

    Raises ValueError, naming the argument, for what can't be used.
    """

    def __init__(
        self,
        ratio: float = 0.1,
        per_second: float = 1.0,
        *,
        capacity: float | None = None,
        initial: float | None = None,
        shed: Callable[[], bool] | None = None,
    ) -> None:
        worth = _RESERVE * _amount("per_second", per_second)
        self.ratio = _amount("ratio", ratio)
        self.per_second = float(per_second)
        self.capacity = max(10.0, worth) if capacity is None else _amount("capacity", capacity)
        start = min(worth, self.capacity) if initial is None else _amount("initial", initial)
        if self.capacity < 1:
            raise ValueError(f"RetryBudget.capacity takes 1 or more, not {capacity!r}")
        if start > self.capacity:
            raise ValueError(
                f"RetryBudget.initial takes at most the capacity ({self.capacity:g}), "
                f"not {initial!r}"
            )
        if shed is not None and not callable(shed):
            raise ValueError(f"RetryBudget.shed takes a callable that returns a bool, not {shed!r}")
        self._shed = shed
        self._tokens = start
        self._at = timing().monotonic()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> float:
        """How many retries it would allow now."""
        with self._lock:
            self._refill()
            return self._tokens

    def spend(self) -> bool:
        """Take the token of one retry. False: there is none, or retries are shed; don't retry."""
        if self._shed is not None and self._shed():
            return False
        with self._lock:
            self._refill()
            if self._tokens + _TINY < 1:
                return False
            self._tokens = max(0.0, self._tokens - 1)
            return True

    def deposit(self) -> None:
        """Note a call that succeeded at its first attempt."""
        with self._lock:
            self._tokens = min(self.capacity, self._tokens + self.ratio)

    def _refill(self) -> None:
        now = timing().monotonic()
        gone, self._at = max(0.0, now - self._at), now
        self._tokens = min(self.capacity, self._tokens + gone * self.per_second)

    def __repr__(self) -> str:
        return f"RetryBudget(ratio={self.ratio:g}, per_second={self.per_second:g})"


def _amount(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise ValueError(f"RetryBudget.{name} takes a finite number, 0 or more, not {value!r}")
    return float(value)
