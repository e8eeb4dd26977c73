"""The breaker against a short model: any order of calls, verdicts, time and operators."""

from __future__ import annotations

import asyncio
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from retrysafe.breaker import BreakerPolicy, CircuitBreaker, Permit
from retrysafe.errors import BreakerOpen

OPEN_FOR, LEASE, PROBES, WINDOW, MIN_CALLS, RATE = 10.0, 4.0, 2, 6, 3, 0.5


class Model:
    """What the breaker is meant to do, without locks, rings or speed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.era = 0
        self.permits: dict[int, tuple[int, str]] = {}
        self.move("closed")

    def move(self, state: str) -> None:
        self.state = state
        self.era += 1
        self.window: deque[bool] = deque(maxlen=WINDOW)
        self.leases: dict[int, float] = {}
        self.passed = 0
        self.until = self.now + OPEN_FOR

    def appears(self) -> str:
        return "half-open" if self.state == "open" and self.now >= self.until else self.state

    def acquire(self, number: int) -> bool:
        if self.appears() != self.state:
            self.move("half-open")
        if self.state in ("open", "forced-open"):
            return False
        if self.state == "half-open":
            self.leases = {each: end for each, end in self.leases.items() if end > self.now}
            if len(self.leases) == PROBES:
                return False
            self.leases[number] = self.now + LEASE
        self.permits[number] = (self.era, self.state)
        return True

    def settle(self, number: int, verdict: str) -> bool:
        era, state = self.permits.pop(number, (0, ""))
        if era != self.era or state == "disabled":
            return False
        if state == "closed":
            if verdict in ("success", "failure"):
                self.window.append(verdict == "failure")
                failures = sum(self.window)
                enough = len(self.window) >= MIN_CALLS
                if verdict == "failure" and enough and failures >= RATE * len(self.window):
                    self.move("open")
            return verdict != "release_as_success"
        if self.leases.pop(number, 0.0) <= self.now:
            return False
        if verdict == "failure":
            self.move("open")
        elif verdict != "release":
            self.passed += 1
            if self.passed == PROBES:
                self.move("closed")
        return True


class BreakerMachine(RuleBasedStateMachine):
    permits: Bundle[tuple[int, Permit]] = Bundle("permits")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.count = 0
        policy = BreakerPolicy(
            failure_rate=RATE,
            min_calls=MIN_CALLS,
            window=WINDOW,
            open_for=OPEN_FOR,
            probes=PROBES,
            permit_lease=LEASE,
        )
        self.breaker = CircuitBreaker("model", policy, clock=lambda: self.model.now)

    @rule(target=permits)
    def acquire(self) -> tuple[int, Permit]:
        self.count += 1
        expected = self.model.acquire(self.count)
        try:
            permit = self.breaker.acquire()
        except BreakerOpen as refused:
            assert not expected
            assert refused.retry_after >= 0
            permit = Permit(self.breaker._core, None)
        else:
            assert expected
        return self.count, permit

    VERDICTS = st.sampled_from(["success", "failure", "failure", "release", "release_as_success"])

    @rule(held=permits, verdict=VERDICTS)
    def settle(self, held: tuple[int, Permit], verdict: str) -> None:
        number, permit = held
        assert getattr(permit, verdict)() == self.model.settle(number, verdict)

    @rule(held=consumes(permits), verdict=VERDICTS)
    def settle_and_forget(self, held: tuple[int, Permit], verdict: str) -> None:
        self.settle(held, verdict)

    @rule(others=st.integers(0, 3), asynchronous=st.booleans())
    def cancel(self, others: int, asynchronous: bool) -> None:
        """A call is cancelled in the middle, while others come and are cancelled too: each permit
        is given back, and none of it says anything of the other side."""
        first = self.count + 1
        self.count += 1 + others
        expected = [self.model.acquire(number) for number in range(first, self.count + 1)]
        if asynchronous:
            entered = asyncio.run(self._cancelled(1 + others))
        else:
            entered = self._interrupted(1 + others)
        assert entered == expected
        for number, granted in zip(range(first, self.count + 1), expected, strict=True):
            if granted:
                self.model.settle(number, "release")

    async def _cancelled(self, count: int) -> list[bool]:
        entered: list[bool] = []

        async def call() -> None:
            try:
                async with self.breaker:
                    entered.append(True)
                    await asyncio.sleep(60)
            except BreakerOpen:
                entered.append(False)

        tasks = [asyncio.create_task(call()) for _ in range(count)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return entered

    def _interrupted(self, count: int) -> list[bool]:
        """Nested, so that all are in at once."""
        entered = False
        rest: list[bool] = []
        try:
            with self.breaker:
                entered = True
                rest = self._inner(count - 1)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            return [entered, *rest]
        except BreakerOpen:
            return [entered, *self._inner(count - 1)]

    def _inner(self, count: int) -> list[bool]:
        return self._interrupted(count) if count else []

    @rule(seconds=st.sampled_from([0.5, 3.0, 4.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.model.now += seconds

    @rule(word=st.sampled_from(["force_open", "disable", "reset", "reset", "reset"]))
    def operate(self, word: str) -> None:
        getattr(self.breaker, word)()
        names = {"force_open": "forced-open", "disable": "disabled", "reset": "closed"}
        self.model.move(names[word])

    @invariant()
    def the_states_agree(self) -> None:
        assert self.breaker.state == self.model.appears()


BreakerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestTheBreakerBehavesAsItsModel = BreakerMachine.TestCase
