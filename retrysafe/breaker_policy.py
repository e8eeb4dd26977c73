"""When a breaker opens, for how long, and how it is probed: one validated, immutable value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from retrysafe.settings import Settings


def _setting(name: str) -> Any:
    """A default read from the settings (`RETRYSAFE_BREAKER_*`) when a policy is built."""
    return field(default_factory=lambda: getattr(Settings.from_env(), name))


def _refuse(name: str, value: object, takes: str) -> ValueError:
    return ValueError(f"BreakerPolicy.{name} takes {takes}, not {value!r}")


def _count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refuse(name, value, "a whole number of 1 or more")


def _number(name: str, value: object, takes: str, fits: Callable[[float], bool]) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not fits(value)
    ):
        raise _refuse(name, value, takes)


def _seconds(name: str, value: object) -> None:
    _number(name, value, "a finite number of seconds above 0", lambda each: each > 0)


def _rate(name: str, value: object) -> None:
    _number(name, value, "a share above 0 and up to 1", lambda each: 0 < each <= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """The rules of one breaker. Durations are seconds, rates are shares of 1.

    A failure (or slow call) opens the breaker when the window holds at least `min_calls` calls and
    the share of failures is *at or above* `failure_rate` (or of slow calls, `slow_rate`). A quick
    success never opens it. "n consecutive failures" is `failure_rate=1.0, min_calls=n, window=n`.

    failure_rate: the share of failures that opens it; exactly that share does.
    min_calls: how many calls the window needs before it is judged; never more than `window`.
    open_for: how long it refuses calls before the first probe.
    probes: how many probes run at once when half-open, and how many must succeed to close it.
    window: the last so many calls are judged (100 unless `window_seconds` is given).
    window_seconds: in place of `window`: the calls of the last so many seconds are judged.
    slow_call: a call that takes this long or longer is slow; None: no call is.
    slow_rate: the share of slow calls that opens it. A slow probe is a failed one.
    open_growth: each opening without a closing in between multiplies the open time by this. Grown
        times are drawn from their upper half, never below `open_for`.
    open_cap: the longest open time; not given: 20 times `open_for`.
    permit_lease: how long a silent probe keeps its slot. After it the slot is given to the next.

    Raises ValueError, naming the field, for what can't be used.
    """

    failure_rate: float = _setting("breaker_failure_rate")
    min_calls: int = _setting("breaker_min_calls")
    open_for: float = _setting("breaker_open_for")
    probes: int = _setting("breaker_probes")
    window: int | None = None
    window_seconds: float | None = None
    slow_call: float | None = None
    slow_rate: float = 1.0
    open_growth: float = 1.0
    open_cap: float | None = None
    permit_lease: float = 30.0

    def __post_init__(self) -> None:
        _rate("failure_rate", self.failure_rate)
        _count("min_calls", self.min_calls)
        _seconds("open_for", self.open_for)
        _count("probes", self.probes)
        if self.window is not None:
            _count("window", self.window)
            if self.window_seconds is not None:
                raise ValueError(
                    "BreakerPolicy.window and window_seconds exclude each other: give one"
                )
        if self.window_seconds is not None:
            _seconds("window_seconds", self.window_seconds)
        if self.slow_call is not None:
            _seconds("slow_call", self.slow_call)
        _rate("slow_rate", self.slow_rate)
        _number("open_growth", self.open_growth, "a finite factor of 1 or more", lambda x: x >= 1)
        if self.open_cap is not None:
            _number(
                "open_cap",
                self.open_cap,
                f"a finite number of seconds, open_for ({self.open_for:g}) or more",
                lambda each: each >= self.open_for,
            )
        _seconds("permit_lease", self.permit_lease)

    @property
    def window_size(self) -> int | None:
        """How many calls the window holds; None where it goes by time."""
        return None if self.window_seconds is not None else self.window or 100

    @property
    def enough_calls(self) -> int:
        """`min_calls`, as far as the window can hold them."""
        size = self.window_size
        return self.min_calls if size is None else min(self.min_calls, size)

    @property
    def longest_open(self) -> float:
        return self.open_cap if self.open_cap is not None else self.open_for * 20

    def trips(self, calls: int, failures: int, slow: int) -> bool:
        """Whether a window with these counts opens the breaker."""
        if calls < self.enough_calls:
            return False
        return failures >= self.failure_rate * calls or (
            self.slow_call is not None and slow >= self.slow_rate * calls
        )

    def open_time(self, nth: int, draw: float) -> float:
        """Seconds of the nth opening in a row (from 1); `draw` is random, in [0, 1)."""
        if self.open_growth == 1:
            return self.open_for
        # Past the cap the power may overflow: stop growing there.
        steps = min(nth - 1, math.log(self.longest_open / self.open_for, self.open_growth) + 1)
        grown = min(self.longest_open, self.open_for * float(self.open_growth**steps))
        return max(self.open_for, grown / 2 + draw * grown / 2)


FIELDS = frozenset(each.name for each in fields(BreakerPolicy))
