"""A breaker's state in this process: one lock, held for no user code, listener or round trip."""

from __future__ import annotations

import threading
from collections.abc import Callable

from retrysafe.breaker_permit import Permit, ProbePermit
from retrysafe.breaker_policy import BreakerPolicy
from retrysafe.breaker_states import (
    Closed,
    Disabled,
    ForcedOpen,
    Open,
    Rejected,
    State,
    Verdict,
)
from retrysafe.errors import BreakerOpen
from retrysafe.events import Event, emit

_SUCCESS = Verdict.SUCCESS

_KINDS = {
    "open": "breaker-opened",
    "half-open": "breaker-half-open",
    "closed": "breaker-closed",
    "forced-open": "breaker-forced-open",
    "disabled": "breaker-disabled",
}
STATE_OF_EVENT = {kind: state for state, kind in _KINDS.items()}


def emit_move(name: str, before: str, after: str, seconds: float | None = None) -> None:
    """Tell that a breaker moved; `seconds`: how long it stays open."""
    emit(Event(_KINDS[after], key=name, outcome=before, duration=seconds))


class LocalCore:
    """The state machine for one process. `slow_call` is read once: it decides the clock's use."""

    here = True

    def __init__(
        self,
        name: str,
        policy: BreakerPolicy,
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self.name = name
        self.policy = policy
        self.clock = clock
        self.draw = draw
        self._slow_call = policy.slow_call
        self._lock = threading.Lock()
        self._state: State = Closed(policy, clock, draw)

    def acquire(self) -> Permit:
        state = self._state
        if state.free:
            if self._slow_call is None:
                return Permit(self, state)
            return Permit(self, state, 0, self.clock())
        moved: list[tuple[State, State]] = []
        try:
            with self._lock:
                now = self.clock()
                slot = self._state.admit(now)
                while isinstance(slot, State):
                    moved.append(self._move(slot))
                    slot = slot.admit(now)
                era = self._state
        except Rejected as refusal:
            emit(Event("breaker-rejected", key=self.name, outcome=state.name))
            raise BreakerOpen(self.name, refusal.retry_after) from None
        self._tell(moved)
        return (ProbePermit if slot else Permit)(self, era, slot, now)

    async def aacquire(self) -> Permit:
        return self.acquire()

    def succeed(self, permit: Permit) -> bool:
        state = self._state
        if state.calm and permit._era is state and not permit._done:
            permit._done = True  # one more success changes nothing: no lock
            return True
        return self.settle(permit, _SUCCESS)

    def settle(self, permit: Permit, verdict: Verdict) -> bool:
        era = permit._era
        moved: list[tuple[State, State]] = []
        with self._lock:
            if permit._done:
                return False
            permit._done = True
            current = era is self._state
            counted = False
            if current:
                now = self.clock()
                slow = self._slow_call is not None and now - permit._started >= self._slow_call
                counted, target = self._state.settle(permit._slot, verdict, slow, now)
                if target is not None:
                    moved.append(self._move(target))
        self._tell(moved)
        if not current or (permit._slot and not counted):
            emit(Event("breaker-stale", key=self.name, outcome=verdict.value))
        return counted

    async def asettle(self, permit: Permit, verdict: Verdict) -> bool:
        return self.settle(permit, verdict)

    def look(self) -> str:
        return self._state.appears(self.clock())

    async def alook(self) -> str:
        return self.look()

    def command(self, target: str) -> None:
        """An operator's word: `closed`, `forced-open` or `disabled`; it starts a new era."""
        state: State
        if target == "closed":
            state = Closed(self.policy, self.clock, self.draw)
        else:
            state = ForcedOpen(self.policy) if target == "forced-open" else Disabled()
        with self._lock:
            moved = self._move(state)
        self._tell([moved])

    async def acommand(self, target: str) -> None:
        self.command(target)

    def start_over(self) -> None:
        """Closed and empty, without a word: the state was a stand-in and is needed no more."""
        with self._lock:
            self._state = Closed(self.policy, self.clock, self.draw)

    def _move(self, target: State) -> tuple[State, State]:
        before = self._state
        if target.name not in before.moves:
            raise RuntimeError(f"a breaker never goes from {before.name} to {target.name}")
        self._state = target
        return before, target

    def _tell(self, moved: list[tuple[State, State]]) -> None:
        for before, after in moved:
            seconds = after.seconds if isinstance(after, Open) else None
            emit_move(self.name, before.name, after.name, seconds)
