"""How long to wait before retry n = 1, 2, …: the six strategies of S2, as pure functions of n.

Every delay is in [0, cap]. Randomness comes after the cap, so that callers which have reached it
stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from retrysafe.setting_kinds import parse_backoff as parse_spec

__all__ = [
    "DEFAULT_CAP",
    "Backoff",
    "EqualJitter",
    "Exponential",
    "Fixed",
    "FullJitter",
    "Immediate",
    "Incremental",
    "parse_backoff",
]

DEFAULT_CAP = 3600.0  # seconds; a policy's deadline ends the retries long before

Rng = Callable[[], float]  # draws from [0, 1)


@runtime_checkable
class Backoff(Protocol):
    """A strategy: seconds before retry `n` (from 1)."""

    def delay(self, n: int, rng: Rng) -> float: ...


def _seconds(kind: str, name: str, value: object) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf
        or value > 1e300
    ):
        raise ValueError(f"{kind}.{name} takes a finite number of seconds above 0, not {value!r}")


def _capped(strategy: object, name: str, value: float, cap: float) -> None:
    kind = type(strategy).__name__
    _seconds(kind, name, value)
    _seconds(kind, "cap", cap)
    if cap < value:
        raise ValueError(f"{kind}.cap ({cap!r}) takes at least {name} ({value!r})")


def _grown(base: float, n: int, cap: float) -> float:
    """min(cap, base · 2ⁿ⁻¹) without overflow at any n."""
    if base >= cap or n - 1 >= math.log2(cap) - math.log2(base):
        return float(cap)
    return min(float(cap), math.ldexp(base, max(n, 1) - 1))


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same delay `d` (seconds) each time."""

    d: float
    cap: float | None = None

    def __post_init__(self) -> None:
        _seconds("Fixed", "d", self.d)
        if self.cap is not None:
            _seconds("Fixed", "cap", self.cap)

    def delay(self, n: int, rng: Rng) -> float:
        return float(self.d if self.cap is None else min(self.d, self.cap))


@dataclass(frozen=True, slots=True)
class Incremental:
    """(n − 1) · d: none, d, 2d, … up to `cap` (seconds)."""

    d: float
    cap: float = DEFAULT_CAP

    def __post_init__(self) -> None:
        _capped(self, "d", self.d, self.cap)

    def delay(self, n: int, rng: Rng) -> float:
        steps = float(min(max(n, 1) - 1, 2**1000))  # more than that is no float
        return float(min(self.cap, steps * self.d))


@dataclass(frozen=True, slots=True)
class Exponential:
    """base · 2ⁿ⁻¹ up to `cap` (seconds). Callers that fail together return together: prefer one
    with jitter."""

    base: float
    cap: float = DEFAULT_CAP

    def __post_init__(self) -> None:
        _capped(self, "base", self.base, self.cap)

    def delay(self, n: int, rng: Rng) -> float:
        return _grown(self.base, n, self.cap)


@dataclass(frozen=True, slots=True)
class FullJitter:
    """Uniform in [0, e], e = min(cap, base · 2ⁿ⁻¹)."""

    base: float
    cap: float = DEFAULT_CAP

    def __post_init__(self) -> None:
        _capped(self, "base", self.base, self.cap)

    def delay(self, n: int, rng: Rng) -> float:
        return rng() * _grown(self.base, n, self.cap)


@dataclass(frozen=True, slots=True)
class EqualJitter:
    """Uniform in [e/2, e], e = min(cap, base · 2ⁿ⁻¹).

    `above=True`, the form in S2: uniform in [e, 2e], where e stops growing at cap / 2.
    """

    base: float
    cap: float = DEFAULT_CAP
    above: bool = False

    def __post_init__(self) -> None:
        _capped(self, "base", self.base, self.cap)

    def delay(self, n: int, rng: Rng) -> float:
        half = (
            _grown(self.base, n, self.cap / 2)
            if self.above
            else (_grown(self.base, n, self.cap) / 2)
        )
        return half + rng() * half


@dataclass(frozen=True, slots=True)
class Immediate:
    """0 once, then `then`: an immediate retry that failed is not followed by another (S2)."""

    then: Backoff

    def __post_init__(self) -> None:
        if isinstance(self.then, Immediate):
            raise ValueError(
                "Immediate.then takes another strategy: at most one retry is immediate"
            )
        if isinstance(self.then, type) or not isinstance(self.then, Backoff):
            raise ValueError(
                f"Immediate.then takes the strategy that takes over, not {self.then!r}"
            )

    def delay(self, n: int, rng: Rng) -> float:
        if n <= 1:
            return 0.0
        # Incremental begins with a delay of 0 of its own: that one is already spent.
        return self.then.delay(n if isinstance(self.then, Incremental) else n - 1, rng)


_RANGED: dict[str, Callable[[float, float], Backoff]] = {
    "incremental": Incremental,
    "exponential": Exponential,
    "full-jitter": FullJitter,
    "equal-jitter": EqualJitter,
}


def parse_backoff(text: str) -> Backoff:
    """The strategy that `RETRYSAFE_RETRY_BACKOFF` writes: `full-jitter:100ms..10s`, `fixed:400ms`,
    `immediate+exponential:1s..1m`. Raises ValueError with the reason."""
    spec = parse_spec(text)
    then = Fixed(spec.first) if spec.cap is None else _RANGED[spec.kind](spec.first, spec.cap)
    return Immediate(then) if spec.immediate else then
