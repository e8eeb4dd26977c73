"""The breaker of one process: states, permits, probes, cancellation."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle
import threading
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from concurrent.futures.thread import ThreadPoolExecutor
from typing import Any

import pytest

from retrysafe.breaker import BreakerPolicy, CircuitBreaker, Permit, named
from retrysafe.classify import Classification, Outcome
from retrysafe.errors import BreakerOpen, StoreUnavailable
from retrysafe.events import Event, listening
from tests.support import run


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def consecutive(fail_max: int = 1, **rules: Any) -> BreakerPolicy:
    """`fail_max` failures in a row open it for 0.1 s."""
    rules = {"open_for": 0.1, "probes": 1, **rules}
    return BreakerPolicy(failure_rate=1.0, min_calls=fail_max, window=fail_max, **rules)


def make(clock: Clock, fail_max: int = 1, classify: Any = None, **rules: Any) -> CircuitBreaker:
    return CircuitBreaker("pay", consecutive(fail_max, **rules), classify=classify, clock=clock)


def trip(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.acquire().failure()
    assert breaker.state == "open"


def half_open(clock: Clock, **rules: Any) -> CircuitBreaker:
    breaker = make(clock, **rules)
    trip(breaker)
    clock.forward(0.15)
    return breaker


def as_outcome(outcome: Outcome) -> Callable[[Any], Outcome]:
    return lambda error: outcome


def fail_with(breaker: CircuitBreaker, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, breaker:
        raise error
    assert caught.value is error


# -- probes, permits, cancellation -------------------------------------------------------------


def test_C1_a_cancelled_probe_gives_its_slot_back_and_proves_nothing(clock: Clock) -> None:
    breaker = half_open(clock)

    async def main() -> None:
        entered = asyncio.Event()

        async def probe() -> None:
            async with breaker:
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(probe())
        await entered.wait()
        with pytest.raises(BreakerOpen):
            await breaker.aacquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert breaker.state == "half-open"
        async with breaker:
            pass
        assert breaker.state == "closed"

    run(main())


def test_C2_cancelled_calls_never_count_while_closed(clock: Clock) -> None:
    breaker = make(clock, fail_max=3)
    for _ in range(10):
        fail_with(breaker, asyncio.CancelledError())
    assert breaker.state == "closed"


def test_C3_a_throttled_probe_is_a_neutral_release(clock: Clock) -> None:
    breaker = half_open(clock, classify=as_outcome(Outcome.THROTTLED))
    fail_with(breaker, ValueError())
    assert breaker.state == "half-open"
    assert breaker.acquire().success()


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.NOT_READY, Outcome.SUCCESS])
def test_C3_a_definite_answer_closes_the_half_open_breaker(clock: Clock, outcome: Outcome) -> None:
    breaker = half_open(clock, classify=lambda error: Classification(outcome, None, "answer"))
    fail_with(breaker, ValueError())
    assert breaker.state == "closed"


@pytest.mark.parametrize("outcome", [Outcome.PROTOCOL, Outcome.TRANSIENT, Outcome.UNKNOWN])
def test_an_ill_answer_of_the_probe_opens_again(clock: Clock, outcome: Outcome) -> None:
    breaker = half_open(clock, classify=as_outcome(outcome))
    fail_with(breaker, ValueError())
    assert breaker.state == "open"


def test_definite_failures_never_open_a_closed_breaker(clock: Clock) -> None:
    breaker = make(clock, fail_max=2, classify=as_outcome(Outcome.REJECTED))
    for _ in range(20):
        fail_with(breaker, ValueError("insufficient balance"))
    assert breaker.state == "closed"


def test_this_librarys_own_refusals_are_not_the_endpoints_failure(clock: Clock) -> None:
    breaker = make(clock)
    fail_with(breaker, StoreUnavailable(reason="no route"))
    fail_with(breaker, BreakerOpen("another", 1.0))
    assert breaker.state == "closed"


def test_C4_release_as_success_of_a_closed_era_call_changes_nothing(clock: Clock) -> None:
    breaker = make(clock)
    old, older = breaker.acquire(), breaker.acquire()
    assert older.release_as_success() is False
    trip(breaker)
    clock.forward(0.15)
    probe = breaker.acquire()
    assert old.release_as_success() is False
    assert breaker.state == "half-open"
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    assert probe.release()


def test_C5_release_as_success_is_refused_after_cancellation(clock: Clock) -> None:
    breaker = half_open(clock)

    async def main() -> None:
        async def call() -> bool:
            permit = breaker.acquire()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return permit.release_as_success()
            raise AssertionError

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        assert await task is False

    run(main())
    assert breaker.state == "half-open"
    assert breaker.acquire().success()


def test_C5_also_when_the_cancellation_is_no_longer_handled(clock: Clock) -> None:
    breaker = half_open(clock)

    async def main() -> None:
        async def call() -> bool:
            permit = breaker.acquire()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cleaned = True
            return cleaned and await permit.arelease_as_success()

        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        assert await task is False

    run(main())
    assert breaker.state == "half-open"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_C6_an_interrupted_probe_leaks_no_slot(clock: Clock, error: BaseException) -> None:
    breaker = half_open(clock)
    fail_with(breaker, error)
    assert breaker.state == "half-open"
    for _ in range(20):
        breaker.acquire().release()


def test_C7_a_hanging_probe_loses_its_slot_with_its_lease(clock: Clock) -> None:
    breaker = half_open(clock, permit_lease=5.0)
    hung = breaker.acquire()
    clock.forward(4.9)
    with pytest.raises(BreakerOpen) as refused:
        breaker.acquire()
    assert 0 < refused.value.retry_after <= 0.11
    clock.forward(0.2)
    successor = breaker.acquire()
    assert hung.failure() is False
    assert breaker.state == "half-open"
    assert successor.success() is True
    assert breaker.state == "closed"


def test_C10_a_lost_probe_is_issued_again(clock: Clock) -> None:
    breaker = half_open(clock, probes=2, permit_lease=5.0)
    lost, other = breaker.acquire(), breaker.acquire()
    assert other.success()
    clock.forward(5.1)
    one, two = breaker.acquire(), breaker.acquire()
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    assert one.success()
    assert breaker.state == "closed"
    assert lost.success() is False
    assert two.success() is False


def test_C11_the_first_verdict_wins(clock: Clock) -> None:
    breaker = half_open(clock)
    permit = breaker.acquire()
    assert permit.release() is True
    assert permit.release() is False
    assert permit.success() is False
    assert breaker.state == "half-open"
    held = breaker.acquire()
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    assert held.release()


def test_C11_a_verdict_inside_the_block_is_not_given_twice(clock: Clock) -> None:
    breaker = make(clock, fail_max=2)
    with breaker as permit:
        assert permit.failure() is True
    with breaker as permit:
        assert permit.failure() is True
    assert breaker.state == "open"


def test_C12_one_of_fifty_tasks_probes_and_the_rest_is_refused_at_once(clock: Clock) -> None:
    breaker = half_open(clock)
    running = 0

    async def main() -> None:
        finish = asyncio.Event()

        async def call() -> None:
            nonlocal running
            async with breaker:
                running += 1
                await finish.wait()

        tasks = [asyncio.create_task(call()) for _ in range(50)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        while len(done) < 49:
            await asyncio.sleep(0)
            done = {task for task in tasks if task.done()}
        assert all(isinstance(task.exception(), BreakerOpen) for task in done)
        assert running == 1
        finish.set()
        await asyncio.wait(tasks)

    run(main())
    assert running == 1
    assert breaker.state == "closed"


def test_C13_one_of_twenty_threads_probes(clock: Clock) -> None:
    breaker = half_open(clock)
    start, finish = threading.Barrier(20), threading.Event()
    ran: list[int] = []
    refused = threading.Semaphore(0)

    def call(number: int) -> None:
        start.wait()
        try:
            with breaker:
                ran.append(number)
                finish.wait(10)
        except BreakerOpen:
            refused.release()

    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(call, number) for number in range(20)]
        for _ in range(19):
            assert refused.acquire(timeout=10)
        finish.set()
        wait_for_all(futures)
    assert len(ran) == 1
    assert breaker.state == "closed"


def test_C14_a_late_cancel_of_a_closed_era_call_frees_no_probes_slot(clock: Clock) -> None:
    breaker = make(clock)
    late = breaker.acquire()
    trip(breaker)
    clock.forward(0.15)
    breaker_probe = breaker.acquire()
    assert late.release() is False
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    breaker_probe.release()


@pytest.mark.parametrize("verdict", ["success", "failure", "release", "release_as_success"])
def test_C15_C18_a_late_verdict_changes_nothing_while_open(clock: Clock, verdict: str) -> None:
    breaker = make(clock)
    late = breaker.acquire()
    trip(breaker)
    clock.forward(0.09)
    assert getattr(late, verdict)() is False
    assert breaker.state == "open"
    clock.forward(0.02)  # measured from the trip
    assert breaker.acquire().success()


@pytest.mark.parametrize("verdict", ["success", "failure", "release", "release_as_success"])
def test_C16_C17_C19_a_late_verdict_changes_nothing_while_half_open(
    clock: Clock, verdict: str
) -> None:
    breaker = make(clock)
    late = breaker.acquire()
    trip(breaker)
    clock.forward(0.15)
    probe = breaker.acquire()
    assert getattr(late, verdict)() is False
    assert breaker.state == "half-open"
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    assert probe.failure() is True
    assert breaker.state == "open"


def test_a_late_failure_is_told_as_an_event(clock: Clock) -> None:
    breaker = make(clock)
    late = breaker.acquire()
    trip(breaker)
    seen: list[Event] = []
    with listening(seen.append):
        late.failure()
    assert [event.kind for event in seen] == ["breaker-stale"]


def test_a_late_closed_era_verdict_does_not_count_in_the_next_closed_era(clock: Clock) -> None:
    breaker = make(clock)
    late = breaker.acquire()
    trip(breaker)
    clock.forward(0.15)
    breaker.acquire().success()
    assert breaker.state == "closed"
    assert late.failure() is False
    assert breaker.state == "closed"


def test_C20_a_probe_of_round_one_is_stale_in_round_two(clock: Clock) -> None:
    breaker = half_open(clock, probes=2)
    first = breaker.acquire()
    breaker.acquire().failure()
    clock.forward(0.15)
    held = breaker.acquire()
    assert first.success() is False
    assert first.failure() is False
    assert breaker.state == "half-open"
    held.release()


def test_C21_an_expired_probe_decides_nothing_beside_its_successor(clock: Clock) -> None:
    breaker = half_open(clock, permit_lease=1.0)
    expired = breaker.acquire()
    clock.forward(1.1)
    successor = breaker.acquire()
    assert expired.success() is False
    assert breaker.state == "half-open"
    assert successor.failure() is True
    assert breaker.state == "open"


def test_an_expired_probe_without_successor_is_stale_too(clock: Clock) -> None:
    breaker = half_open(clock, permit_lease=1.0)
    expired = breaker.acquire()
    clock.forward(1.1)
    assert expired.success() is False
    assert breaker.acquire().success()


def test_C22_B085_every_failing_call_sees_its_own_error(clock: Clock) -> None:
    breaker = make(clock, fail_max=3)
    runs = 0

    def call(number: int) -> None:
        nonlocal runs
        with breaker:
            runs += 1
            raise ConnectionError(number)

    for number in (1, 2, 3):
        with pytest.raises(ConnectionError, match=str(number)):
            call(number)
    with pytest.raises(BreakerOpen):
        call(4)
    assert runs == 3


def test_C24_a_probe_dropped_without_a_verdict_warns_and_comes_back_with_its_lease(
    clock: Clock,
) -> None:
    breaker = half_open(clock, permit_lease=1.0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        permit: Permit | None = breaker.acquire()
        assert permit is not None
        permit = None
        gc.collect()
    assert any(issubclass(each.category, ResourceWarning) for each in seen)
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    clock.forward(1.1)
    assert breaker.acquire().success()


def test_C25_a_classifier_that_raises_is_a_release_and_is_chained(clock: Clock) -> None:
    fault = RuntimeError("classifier")

    def broken(error: object) -> Outcome:
        raise fault

    breaker = half_open(clock, classify=broken)
    error = ValueError("call")
    fail_with(breaker, error)
    assert error.__context__ is fault
    assert any("classifier" in note for note in error.__notes__)
    assert breaker.state == "half-open"
    assert breaker.acquire().success()


def test_C26_a_listener_that_raises_changes_nothing(clock: Clock) -> None:
    breaker = make(clock)

    def broken(event: Event) -> None:
        raise RuntimeError(event.kind)

    with listening(broken):
        trip(breaker)
    assert breaker.state == "open"


def test_C26_a_listener_may_use_the_breaker(clock: Clock) -> None:
    breaker = make(clock)

    def nosy(event: Event) -> None:
        if event.kind == "breaker-opened":
            breaker.force_open()

    with listening(nosy):
        breaker.acquire().failure()
    assert breaker.state == "forced-open"


def test_C27_reading_the_state_says_what_a_call_would_meet_and_changes_nothing(
    clock: Clock,
) -> None:
    breaker = make(clock)
    seen: list[Event] = []
    trip(breaker)
    with listening(seen.append):
        clock.forward(0.15)
        assert breaker.state == "half-open"
        clock.forward(-0.1)
        assert breaker.state == "open"
    assert seen == []


def test_C28_forced_open_stays_until_reset(clock: Clock) -> None:
    breaker = make(clock)
    breaker.force_open()
    clock.forward(1000)
    assert breaker.state == "forced-open"
    with pytest.raises(BreakerOpen) as refused:
        breaker.acquire()
    assert math.isfinite(refused.value.retry_after)
    breaker.reset()
    assert breaker.state == "closed"
    assert breaker.acquire().success()


def test_disabled_stays_and_learns_nothing(clock: Clock) -> None:
    breaker = make(clock)
    breaker.disable()
    for _ in range(5):
        assert breaker.acquire().failure() is False
    assert breaker.state == "disabled"
    breaker.reset()
    assert breaker.state == "closed"


def test_C31_calls_run_side_by_side(clock: Clock) -> None:
    breaker = make(clock, fail_max=100)
    together = threading.Barrier(8, timeout=10)

    def call() -> None:
        with breaker:
            together.wait()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(call) for _ in range(8)]:
            future.result(10)


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "America/New_York"])
def test_C32_a_refusal_says_when_to_ask_again(
    clock: Clock, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    breaker = make(clock, open_for=60.0)
    trip(breaker)
    clock.forward(1.0)
    with pytest.raises(BreakerOpen) as refused:
        breaker.acquire()
    copy = pickle.loads(pickle.dumps(refused.value))
    assert copy.retry_after == pytest.approx(59.0)
    assert isinstance(copy.retry_after, float)
    assert copy.name == "pay"


BAD_COUNTS = [0, -1, True, 1.5, math.nan, math.inf, "3", None]
BAD_SECONDS = [0, -1, True, math.nan, math.inf, "3", None]
OPTIONAL = {"window", "window_seconds", "slow_call", "open_cap"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for fields, values in (
            (("min_calls", "probes", "window"), BAD_COUNTS),
            (("open_for", "permit_lease", "window_seconds", "slow_call", "open_cap"), BAD_SECONDS),
            (("failure_rate", "slow_rate"), [*BAD_SECONDS, 1.01]),
            (("open_growth",), [*BAD_SECONDS, 0.5]),
        )
        for field in fields
        for value in values
        if not (value is None and field in OPTIONAL)
    ],
)
def test_C33a_a_rule_that_cant_work_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        BreakerPolicy(**{field: value})


def test_what_a_policy_leaves_out_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRYSAFE_BREAKER_OPEN_FOR", "5s")
    monkeypatch.setenv("RETRYSAFE_BREAKER_PROBES", "3")
    policy = CircuitBreaker("settings").policy
    assert (policy.open_for, policy.probes) == (5.0, 3)
    assert (policy.failure_rate, policy.min_calls) == (0.5, 20)
    assert BreakerPolicy(open_for=7.0).open_for == 7.0


def test_two_windows_or_a_cap_below_the_open_time_are_refused() -> None:
    with pytest.raises(ValueError, match="window_seconds"):
        BreakerPolicy(window=10, window_seconds=10.0)
    with pytest.raises(ValueError, match="open_cap"):
        BreakerPolicy(open_for=30.0, open_cap=10.0)


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_breaker_needs_a_name(name: Any) -> None:
    with pytest.raises(ValueError, match="name"):
        CircuitBreaker(name)


# -- field reports -----------------------------------------------------------------------------


def test_B067_neutral_errors_keep_no_permit(clock: Clock) -> None:
    def rule(error: object) -> Outcome:
        return Outcome.THROTTLED if isinstance(error, ValueError) else Outcome.UNKNOWN

    breaker = half_open(clock, probes=2, classify=rule)
    for _ in range(5):
        fail_with(breaker, ValueError())
    assert breaker.state == "half-open"
    for _ in range(2):
        with breaker:
            pass
    assert breaker.state == "closed"


def test_B069_an_old_success_does_not_close_and_the_pause_counts_from_the_trip(
    clock: Clock,
) -> None:
    breaker = make(clock)
    slow = breaker.acquire()
    trip(breaker)
    clock.forward(0.05)
    assert slow.success() is False
    assert breaker.state == "open"
    clock.forward(0.051)
    assert breaker.state == "half-open"


def test_B070_an_answered_probe_is_never_half_open_and_full(clock: Clock) -> None:
    class Unauthorized(Exception):
        pass

    def rule(error: object) -> Outcome:
        return Outcome.REJECTED if isinstance(error, Unauthorized) else Outcome.TRANSIENT

    breaker = half_open(clock, classify=rule)
    fail_with(breaker, Unauthorized())
    assert breaker.state == "closed"  # documented: the service answered
    fail_with(breaker, Unauthorized())
    with breaker:
        pass
    assert breaker.state == "closed"


def test_B073_a_request_of_an_earlier_round_frees_no_slot(clock: Clock) -> None:
    breaker = half_open(clock, probes=2)
    slow = breaker.acquire()
    breaker.acquire().failure()
    clock.forward(0.15)
    one, two = breaker.acquire(), breaker.acquire()
    assert slow.success() is False
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    assert one.success()
    assert breaker.state == "half-open"
    assert two.success()
    assert breaker.state == "closed"


def test_B074_a_stale_report_says_so_and_harms_nobody(clock: Clock) -> None:
    breaker = half_open(clock)
    permit = breaker.acquire()
    breaker.reset()
    seen: list[Event] = []
    with listening(seen.append):
        assert permit.success() is False
    assert [event.kind for event in seen] == ["breaker-stale"]
    breaker.acquire().failure()
    clock.forward(0.15)
    with breaker:
        breaker.force_open()
    assert breaker.state == "forced-open"


def test_B077_a_failure_during_probation_starts_a_fresh_pause(clock: Clock) -> None:
    policy = BreakerPolicy(
        failure_rate=0.5, min_calls=10, window_seconds=10.0, open_for=1.0, probes=3
    )
    breaker = CircuitBreaker("pay", policy, clock=clock)
    trip(breaker, times=10)
    clock.forward(1.1)
    breaker.acquire().failure()
    for _ in range(3):
        with pytest.raises(BreakerOpen):
            breaker.acquire()
    clock.forward(1.1)
    for _ in range(3):
        assert breaker.state == "half-open"
        assert breaker.acquire().success()
    assert breaker.state == "closed"
    for _ in range(9):  # counts begin at zero
        breaker.acquire().failure()
    assert breaker.state == "closed"


def test_B078_abandoned_calls_leak_no_slot_and_are_no_verdict(clock: Clock) -> None:
    breaker = half_open(clock, probes=5)

    async def stream() -> AsyncIterator[int]:
        async with breaker:
            for number in range(10):
                yield number

    def numbers() -> Generator[int, None, None]:
        with breaker:
            yield from range(10)

    async def main() -> None:
        for _ in range(10):

            async def held() -> None:
                async with breaker:
                    await asyncio.Event().wait()

            task = asyncio.create_task(held())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

            async for _ in stream():
                break
            await asyncio.sleep(0)
            gc.collect()
            await asyncio.sleep(0)

            generator = numbers()
            next(generator)
            generator.close()

            future: Future[None] = Future()
            future.cancel()
            with pytest.raises(BaseException), breaker:  # noqa: B017
                future.result()

    run(main())
    assert breaker.state == "half-open"
    held = [breaker.acquire() for _ in range(5)]
    with pytest.raises(BreakerOpen):
        breaker.acquire()
    assert all(permit.release() for permit in held)


def test_B086_successes_between_failures_reset_a_consecutive_count(clock: Clock) -> None:
    breaker = make(clock, fail_max=2)
    for _ in range(20):
        breaker.acquire().failure()
        breaker.acquire().success()
    assert breaker.state == "closed"
    trip(breaker, times=2)


@pytest.mark.parametrize("window", [{"window": 10}, {"window_seconds": 10.0}])
def test_B086_exactly_the_rate_opens(clock: Clock, window: Any) -> None:
    policy = BreakerPolicy(failure_rate=0.5, min_calls=10, **window)
    breaker = CircuitBreaker("pay", policy, clock=clock)
    for _ in range(5):
        breaker.acquire().success()
    for _ in range(4):
        breaker.acquire().failure()
    assert breaker.state == "closed"
    breaker.acquire().failure()
    assert breaker.state == "open"


# -- windows, slow calls, growth ----------------------------------------------------------------


def test_failures_leave_a_time_window(clock: Clock) -> None:
    policy = BreakerPolicy(failure_rate=0.5, min_calls=4, window_seconds=10.0)
    breaker = CircuitBreaker("pay", policy, clock=clock)
    for _ in range(10):
        for _ in range(3):
            breaker.acquire().failure()
        clock.forward(10.1)
    assert breaker.state == "closed"


def test_failures_leave_a_count_window(clock: Clock) -> None:
    policy = BreakerPolicy(failure_rate=0.5, min_calls=4, window=8)
    breaker = CircuitBreaker("pay", policy, clock=clock)
    for _ in range(10):
        for _ in range(3):
            breaker.acquire().success()
        breaker.acquire().failure()
    assert breaker.state == "closed"
    breaker.acquire().failure()
    breaker.acquire().failure()
    assert breaker.state == "open"


def test_a_full_window_of_successes_takes_in_the_next_failure(clock: Clock) -> None:
    policy = BreakerPolicy(failure_rate=0.5, min_calls=2, window=4)
    breaker = CircuitBreaker("pay", policy, clock=clock)
    for _ in range(50):
        assert breaker.acquire().success()
    breaker.acquire().failure()
    assert breaker.state == "closed"
    breaker.acquire().failure()
    assert breaker.state == "open"


def test_slow_calls_open_it_and_a_slow_probe_opens_it_again(clock: Clock) -> None:
    breaker = make(clock, fail_max=3, slow_call=1.0)

    def call(seconds: float) -> None:
        with breaker:
            clock.forward(seconds)

    for seconds in (1.0, 1.0, 0.9, 1.0, 1.0):
        call(seconds)
    assert breaker.state == "closed"
    call(1.0)
    assert breaker.state == "open"
    clock.forward(0.15)
    call(1.5)
    assert breaker.state == "open"
    clock.forward(0.15)
    call(0.5)
    assert breaker.state == "closed"


def test_the_open_time_grows_with_jitter_up_to_its_cap_and_starts_over_after_closing(
    clock: Clock,
) -> None:
    policy = consecutive(open_for=1.0, open_growth=2.0, open_cap=10.0)
    breaker = CircuitBreaker("pay", policy, clock=clock, rng=lambda: 0.5)
    waits = []
    for _ in range(8):
        breaker.acquire().failure()
        with pytest.raises(BreakerOpen) as refused:
            breaker.acquire()
        waits.append(round(refused.value.retry_after, 3))
        clock.forward(refused.value.retry_after)
    assert waits == [1.0, 1.5, 3.0, 6.0, 7.5, 7.5, 7.5, 7.5]
    breaker.acquire().success()
    breaker.acquire().failure()
    with pytest.raises(BreakerOpen) as refused:
        breaker.acquire()
    assert refused.value.retry_after == pytest.approx(1.0)


def test_a_grown_open_time_never_overflows() -> None:
    policy = BreakerPolicy(open_for=1.0, open_growth=1e300)
    assert policy.open_time(10**6, 1.0) == 20.0


# -- blocks -------------------------------------------------------------------------------------


def test_one_breaker_serves_nested_and_interleaved_blocks(clock: Clock) -> None:
    breaker, other = make(clock, fail_max=10), make(clock, fail_max=10)

    async def call(depth: int) -> None:
        async with breaker as mine:
            with other:
                await asyncio.sleep(0)
                if depth:
                    await asyncio.gather(call(depth - 1), call(depth - 1))
            assert mine._done is False
        assert mine._done is True

    run(call(4))
    with breaker as outer:
        with breaker as inner:
            assert inner is not outer
        assert (inner._done, outer._done) == (True, False)
    assert outer._done is True


def test_blocks_left_out_of_order_end_their_own_breakers_permit(clock: Clock) -> None:
    one, two = make(clock), make(clock)
    first, second = one.__enter__(), two.__enter__()
    one.__exit__(None, None, None)
    assert (first._done, second._done) == (True, False)
    two.__exit__(None, None, None)
    assert second._done


def test_a_generator_closed_in_another_task_ends_its_own_permit_alone(clock: Clock) -> None:
    breaker = half_open(clock, probes=2)

    async def stream(held: list[Permit]) -> AsyncGenerator[int, None]:
        async with breaker as permit:
            held.append(permit)
            yield 1

    async def main() -> None:
        inner: list[Permit] = []
        async with breaker as outer:
            numbers = stream(inner)
            await anext(numbers)
            await asyncio.create_task(numbers.aclose())
            assert (inner[0]._done, outer._done) == (True, False)
        assert outer._done is True
        async with breaker as another:
            pass
        assert another._done is True

    run(main())
    assert breaker.state == "closed"


def test_a_verdict_in_an_inner_block_leaves_the_outer_permit_alone(clock: Clock) -> None:
    breaker = half_open(clock, probes=2)
    with breaker as outer:
        with breaker as inner:
            assert inner.success()
        assert (inner._done, outer._done) == (True, False)
    assert outer._done is True
    assert breaker.state == "closed"


# -- the registry --------------------------------------------------------------------------------


def test_the_same_name_is_the_same_breaker() -> None:
    first = named("registry-same", open_for=5.0)
    assert named("registry-same") is first
    assert named("registry-same", open_for=5.0) is first


def test_a_name_with_two_policies_is_refused() -> None:
    named("registry-two", open_for=5.0)
    with pytest.raises(ValueError, match="another policy"):
        named("registry-two", open_for=6.0)
    with pytest.raises(TypeError, match="no field"):
        named("registry-two", fail_max=3)


@pytest.mark.parametrize(
    ("error", "state"),
    [(TypeError("a bug of ours"), "half-open"), (LookupError("also ours"), "half-open")],
)
def test_a_bug_on_this_side_proves_nothing_about_the_other(error: Exception, state: str) -> None:
    clock = Clock()
    breaker = CircuitBreaker(
        "bugs",
        BreakerPolicy(failure_rate=1.0, min_calls=1, window=1, open_for=1.0),
        clock=clock,
    )
    with pytest.raises(ConnectionError), breaker:
        raise ConnectionError
    clock.forward(2.0)
    with pytest.raises(type(error)), breaker:
        raise error
    assert breaker.state == state
