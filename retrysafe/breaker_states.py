"""The five states of a breaker, each with what it admits, what it learns and where it may go.

A state object *is* its era: a permit belongs to the object that gave it, and once the breaker has
moved to another one, even of the same name, the permit is stale. Nothing here locks or emits.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import ClassVar

from retrysafe.breaker_policy import BreakerPolicy
from retrysafe.breaker_window import FAILED, SLOW, CountWindow, TimeWindow, Window

Clock = Callable[[], float]


class Verdict(Enum):
    """What a call says about the endpoint's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    RELEASE = "release"  # nothing
    ANSWERED = "answered"  # a failure of the task, not of the server: proof of health (S1)


class Rejected(Exception):
    """A state admits nobody now; ask again in `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__(retry_after)
        self.retry_after = max(0.0, retry_after)


class State:
    """`free`: every call is admitted, without a slot. `calm`: one more success changes nothing.

    `settle` is asked of the present era only.
    """

    name: ClassVar[str]
    moves: ClassVar[frozenset[str]]
    free: ClassVar[bool] = False
    __slots__ = ("calm",)

    def __init__(self) -> None:
        self.calm = False

    def appears(self, now: float) -> str:
        """The state's name as a caller would meet it now."""
        return self.name

    def admit(self, now: float) -> int | State:
        """A slot's number (0: none needed), or the state to move to and ask again.

        Raises Rejected.
        """
        return 0

    def settle(
        self, slot: int, verdict: Verdict, slow: bool, now: float
    ) -> tuple[bool, State | None]:
        """Take a verdict: did it count, and the state to move to."""
        return False, None


class Closed(State):
    """Calls pass; failures and slow calls are counted in the window."""

    name = "closed"
    moves = frozenset({"open", "closed", "forced-open", "disabled"})
    free = True
    __slots__ = ("_clock", "_draw", "_policy", "window")

    def __init__(self, policy: BreakerPolicy, clock: Clock, draw: Clock) -> None:
        super().__init__()
        self._policy = policy
        self._clock = clock
        self._draw = draw
        size = policy.window_size
        self.window: Window = (
            CountWindow(size)
            if size is not None
            else TimeWindow(policy.window_seconds or 0.0, clock)
        )

    def settle(
        self, slot: int, verdict: Verdict, slow: bool, now: float
    ) -> tuple[bool, State | None]:
        if verdict is Verdict.ANSWERED:
            return False, None  # no probe to close; a definite failure doesn't count (S1)
        if verdict is Verdict.RELEASE:
            return True, None
        mark = (FAILED if verdict is Verdict.FAILURE else 0) | (SLOW if slow else 0)
        window = self.window
        window.add(mark)
        self.calm = window.pristine and self._policy.slow_call is None
        if mark and self._policy.trips(window.calls, window.failures, window.slow):
            return True, Open(self._policy, self._clock, self._draw, 1)
        return True, None


class Open(State):
    """Nobody passes until `until`. `nth`: how many openings in a row this is."""

    name = "open"
    moves = frozenset({"half-open", "closed", "forced-open", "disabled"})
    __slots__ = ("_clock", "_draw", "_policy", "nth", "seconds", "until")

    def __init__(self, policy: BreakerPolicy, clock: Clock, draw: Clock, nth: int) -> None:
        super().__init__()
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self.nth = nth
        self.seconds = policy.open_time(nth, draw())
        self.until = clock() + self.seconds

    def appears(self, now: float) -> str:
        return "half-open" if now >= self.until else "open"

    def admit(self, now: float) -> int | State:
        if now < self.until:
            raise Rejected(self.until - now)
        return HalfOpen(self._policy, self._clock, self._draw, self.nth)


class HalfOpen(State):
    """At most `probes` calls at once pass, each on a lease; as many successes close it, one
    failure opens it."""

    name = "half-open"
    moves = frozenset({"closed", "open", "forced-open", "disabled"})
    __slots__ = ("_clock", "_draw", "_last", "_policy", "leases", "nth", "successes")

    def __init__(self, policy: BreakerPolicy, clock: Clock, draw: Clock, nth: int) -> None:
        super().__init__()
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self.nth = nth
        self.leases: dict[int, float] = {}
        self.successes = 0
        self._last = 0

    def admit(self, now: float) -> int | State:
        for slot, end in list(self.leases.items()):
            if end <= now:
                del self.leases[slot]
        if len(self.leases) >= self._policy.probes:
            # A slot may come back at any moment; the lease only bounds it.
            raise Rejected(min(*self.leases.values(), now + self._policy.open_for) - now)
        self._last += 1
        self.leases[self._last] = now + self._policy.permit_lease
        return self._last

    def settle(
        self, slot: int, verdict: Verdict, slow: bool, now: float
    ) -> tuple[bool, State | None]:
        end = self.leases.pop(slot, None)
        if end is None or end <= now:
            return False, None  # its lease is over: the slot belongs to a successor
        if verdict is Verdict.RELEASE:
            return True, None
        if verdict is Verdict.FAILURE or (slow and verdict is Verdict.SUCCESS):
            return True, Open(self._policy, self._clock, self._draw, self.nth + 1)
        self.successes += 1
        if self.successes < self._policy.probes:
            return True, None
        return True, Closed(self._policy, self._clock, self._draw)


class ForcedOpen(State):
    """Nobody passes until somebody resets it."""

    name = "forced-open"
    moves = frozenset({"closed", "disabled", "forced-open"})
    __slots__ = ("_policy",)

    def __init__(self, policy: BreakerPolicy) -> None:
        super().__init__()
        self._policy = policy

    def admit(self, now: float) -> int | State:
        raise Rejected(self._policy.open_for)  # a hint: nobody knows when


class Disabled(State):
    """Everybody passes, nothing is learned, until somebody resets it."""

    name = "disabled"
    moves = frozenset({"closed", "forced-open", "disabled"})
    free = True
    __slots__ = ()
