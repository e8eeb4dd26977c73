"""The retry budget of a process."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from retrysafe.backoff import Fixed
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.budget import RetryBudget
from retrysafe.errors import BreakerOpen
from retrysafe.retrying import RetryPolicy
from retrysafe.testing_clock import FakeClock, instant


class Backend:
    """Fails or succeeds as told, and counts."""

    def __init__(self) -> None:
        self.requests = 0
        self.healthy = False

    def __call__(self) -> int:
        self.requests += 1
        if self.healthy:
            return 7
        raise ConnectionError("down")


def calls(policy: RetryPolicy, backend: Backend, count: int) -> list[BaseException]:
    """The errors of so many calls."""
    errors: list[BaseException] = []
    for _ in range(count):
        try:
            policy.call(backend)
        except ConnectionError as error:
            errors.append(error)
    return errors


def test_B113_the_quota_holds_and_comes_back_with_successes() -> None:
    backend = Backend()
    with instant(clock=FakeClock()):
        budget = RetryBudget(ratio=0.5, per_second=0, capacity=10, initial=10)
        policy = RetryPolicy(attempts=5, deadline=None, backoff=Fixed(0.1), budget=budget)
        errors = calls(policy, backend, 100)
        assert backend.requests == 110
        assert all("budget exhausted" in error.__notes__[0] for error in errors[3:])
        backend.requests, backend.healthy = 0, True
        calls(policy, backend, 30)
        assert (backend.requests, budget.tokens) == (30, 10)
        backend.requests, backend.healthy = 0, False
        calls(policy, backend, 20)
        assert backend.requests == 30


def test_B116_a_shared_budget_bounds_three_layers_of_retries() -> None:
    backend = Backend()
    with instant(clock=FakeClock()):
        budget = RetryBudget(ratio=0.1, per_second=0, initial=3)
        policy = RetryPolicy(
            attempts=3, deadline=None, backoff=Fixed(0.1), budget=budget, nested=True
        )

        def layered() -> int:
            return policy.call(lambda: policy.call(lambda: policy.call(backend)))

        failed = 0
        for _ in range(100):
            try:
                layered()
            except ConnectionError:
                failed += 1
        assert (failed, backend.requests <= 113) == (100, True)
        backend.healthy = True
        for _ in range(40):
            layered()
        assert budget.tokens == pytest.approx(4)


def test_C62_the_budget_is_asked_before_the_sleep_and_the_original_error_is_raised() -> None:
    backend = Backend()
    budget = RetryBudget(ratio=0, per_second=0)
    with instant() as time:
        (error,) = calls(RetryPolicy(budget=budget, backoff=Fixed(5)), backend, 1)
    assert time.delays == []
    assert error.args == ("down",)
    assert "budget exhausted" in error.__notes__[0]


def test_tokens_come_with_time_up_to_the_capacity() -> None:
    clock = FakeClock()
    with instant(clock=clock):
        budget = RetryBudget(ratio=0, per_second=2, capacity=3, initial=0)
        assert not budget.spend()
        clock.advance(0.5)
        assert budget.spend()
        assert not budget.spend()
        clock.advance(100)
        assert budget.tokens == 3


def test_ten_tenths_are_one() -> None:
    budget = RetryBudget(ratio=0.1, per_second=0)
    for _ in range(10):
        budget.deposit()
    assert budget.spend()
    assert not budget.spend()


def test_threads_never_spend_more_than_there_is() -> None:
    budget = RetryBudget(ratio=0, per_second=0, capacity=500, initial=500)
    spent: list[int] = []

    def spend() -> None:
        spent.append(sum(budget.spend() for _ in range(200)))

    threads = [threading.Thread(target=spend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(spent) == 500


@pytest.mark.parametrize(
    "value", [True, -1, math.nan, math.inf, "1", None, pytest.param(10**400, id="huge")]
)
@pytest.mark.parametrize("name", ["ratio", "per_second"])
def test_what_is_no_amount_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        RetryBudget(**{name: value})


@pytest.mark.parametrize("fields", [{"capacity": 0.5}, {"capacity": 5, "initial": 6}])
def test_a_budget_that_can_never_pay_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="RetryBudget"):
        RetryBudget(**fields)


def test_C96_under_load_retries_are_shed_and_first_attempts_go_on() -> None:
    loaded = True
    backend = Backend()
    with instant(clock=FakeClock()):
        budget = RetryBudget(capacity=100, initial=100, shed=lambda: loaded)
        policy = RetryPolicy(attempts=3, deadline=None, backoff=Fixed(0.1), budget=budget)
        errors = calls(policy, backend, 10)
        assert backend.requests == 10
        assert all("budget exhausted" in error.__notes__[0] for error in errors)
        assert budget.tokens == 100  # nothing was spent
        loaded, backend.requests = False, 0
        calls(policy, backend, 10)
        assert backend.requests == 30


def test_C96_a_breaker_that_is_not_closed_sheds_the_retries_above_it() -> None:
    backend = Backend()
    rules = BreakerPolicy(failure_rate=1.0, min_calls=3, window=3, open_for=60.0, probes=1)
    clock = FakeClock()
    with instant(clock=clock):
        breaker = CircuitBreaker("c96", rules, clock=clock)
        policy = RetryPolicy(attempts=10, deadline=None, backoff=Fixed(0.1))

        def guarded() -> int:
            with breaker:
                return backend()

        with pytest.raises(BreakerOpen):  # opened by its third attempt: no fourth
            policy.call(guarded)
        assert backend.requests == 3
        clock.advance(61)
        with pytest.raises(
            BreakerOpen
        ):  # half-open: the first attempt is the probe, and the only one
            policy.call(guarded)
        assert backend.requests == 4
        backend.healthy = True
        clock.advance(61)
        assert policy.call(guarded) == 7


def test_a_load_flag_that_fails_leaves_the_calls_own_error() -> None:
    backend = Backend()

    def shed() -> bool:
        raise RuntimeError("the flag can't be read")

    with instant(clock=FakeClock()):
        budget = RetryBudget(shed=shed)
        errors = calls(RetryPolicy(attempts=3, backoff=Fixed(0.1), budget=budget), backend, 2)
    assert [type(error) for error in errors] == [ConnectionError] * 2
    assert backend.requests == 2


def test_a_load_flag_is_a_callable() -> None:
    with pytest.raises(ValueError, match="shed"):
        RetryBudget(shed=True)  # type: ignore[arg-type]
