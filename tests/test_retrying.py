"""Retries of one call: what is made again, how long it waits, where it ends, what is told."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import json
import math
import pickle
import threading
import time as real_time
import weakref
from collections.abc import Callable, Iterator
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest

from retrysafe import errors
from retrysafe.attempt_history import HISTORY
from retrysafe.backoff import Exponential, Fixed, FullJitter, Immediate
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.budget import RetryBudget
from retrysafe.classify import Classification, Outcome
from retrysafe.context import RequestContext, carry, entered
from retrysafe.deadlines import deadline, remaining
from retrysafe.errors import BreakerOpen, InFlight
from retrysafe.events import Event, listening
from retrysafe.retrying import Attempt, RetryPolicy, attempts_of, current_attempt
from retrysafe.testing_clock import FakeClock, Instant, instant
from tests.support import run, until


@pytest.fixture
def time() -> Iterator[Instant]:
    """No sleeping, and time that stands still but for the sleeps; jitter is half of its range."""
    with instant(clock=FakeClock(), rng=lambda: 0.5) as timing:
        yield timing


@pytest.fixture
def told() -> Iterator[list[Event]]:
    events: list[Event] = []
    with listening(events.append):
        yield events


class Work:
    """Ends as listed, one item a run: exceptions are raised, anything else is returned. The last
    item goes on for ever."""

    def __init__(self, *ends: Any) -> None:
        self.ends = ends
        self.runs = 0

    def __call__(self) -> Any:
        end = self.ends[min(self.runs, len(self.ends) - 1)]
        self.runs += 1
        if isinstance(end, BaseException):
            raise end
        return end

    async def later(self) -> Any:
        return self()


def policy(**fields: Any) -> RetryPolicy:
    fields = {"attempts": 4, "deadline": None, "backoff": Fixed(1), **fields}
    return RetryPolicy(**fields)


class Answered(Exception):
    """Stands for an answer."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(status)
        self.response = SimpleNamespace(
            status_code=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )


def asked(wait: str) -> Answered:
    return Answered(503, Retry_After=wait)


# --- what is retried -----------------------------------------------------------------------------


def test_C54_attempts_count_calls(time: Instant) -> None:
    work = Work(ConnectionError("down"))
    with pytest.raises(ConnectionError):
        policy(attempts=3).call(work)
    assert (work.runs, time.delays) == (3, [1, 1])


def test_a_failure_that_passes_is_followed_by_the_result(time: Instant) -> None:
    work = Work(ConnectionError(), TimeoutError(), 7)
    assert policy().call(work) == 7
    assert run(policy().acall(Work(ConnectionError(), 7).later)) == 7


@pytest.mark.parametrize("error", [TypeError("x"), ValueError("x"), AssertionError("x")])
def test_B090_an_error_of_the_program_is_raised_at_once(time: Instant, error: Exception) -> None:
    work = Work(error)
    with pytest.raises(type(error)) as caught:
        policy(attempts=6).call(work)
    assert caught.value is error
    assert (work.runs, time.delays) == (1, [])
    assert not hasattr(error, "__notes__")


def test_B090_a_connection_error_is_tried_six_times(time: Instant) -> None:
    work = Work(ConnectionError())
    with pytest.raises(ConnectionError):
        RetryPolicy(attempts=6, backoff=Fixed(1)).call(work)
    assert (work.runs, time.delays) == (6, [1] * 5)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 410, 422, 503])
def test_B088_a_definite_answer_is_one_attempt(time: Instant, status: int) -> None:
    work = Work(Answered(status))
    with pytest.raises(Answered):
        policy().call(work)
    assert (work.runs, time.delays) == (1, [])


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 504])
def test_B088_a_passing_answer_is_up_to_four_attempts(time: Instant, status: int) -> None:
    work = Work(Answered(status))
    with pytest.raises(Answered):
        policy().call(work)
    assert work.runs == 4


def test_an_error_that_nothing_is_known_about_is_not_retried(time: Instant) -> None:
    class InsufficientBalance(Exception):
        pass

    work = Work(InsufficientBalance())
    with pytest.raises(InsufficientBalance):
        policy().call(work)
    assert work.runs == 1


def test_B103_what_may_have_run_is_repeated_only_where_that_is_safe(time: Instant) -> None:
    careful = policy(idempotent=False)
    cut, refused = Work(ConnectionResetError()), Work(ConnectionRefusedError())
    with pytest.raises(ConnectionResetError) as caught:
        careful.call(cut)
    with pytest.raises(ConnectionRefusedError):
        careful.call(refused)
    assert (cut.runs, refused.runs) == (1, 4)
    assert "outcome is unknown" in caught.value.__notes__[0]
    with pytest.raises(ConnectionResetError):
        policy().call(cut)
    assert cut.runs == 5


def test_B103_a_fallback_that_may_have_run_is_not_repeated(time: Instant) -> None:
    charged = Work(RuntimeError("answer lost"))

    def pays() -> None:
        try:
            raise ConnectionRefusedError("the first provider")
        except ConnectionRefusedError:
            charged()

    with pytest.raises(RuntimeError):
        policy(idempotent=False).call(pays)
    assert charged.runs == 1


def test_B103_a_client_decides_by_method_and_key() -> None:
    may_have_run = Classification(Outcome.UNKNOWN)
    refused = Classification(Outcome.TRANSIENT, sent=False)
    assert policy().decide(may_have_run, repeatable=True)
    assert not policy().decide(may_have_run, repeatable=False)
    assert policy().decide(refused, repeatable=False)
    for outcome in (Outcome.REJECTED, Outcome.PROTOCOL, Outcome.SUCCESS):
        assert not policy().decide(Classification(outcome), repeatable=True)
    assert not policy(important=False).decide(refused, repeatable=True)


def test_unimportant_work_fails_fast(time: Instant) -> None:
    work = Work(ConnectionError())
    with pytest.raises(ConnectionError):
        policy(important=False).call(work)
    assert work.runs == 1


def test_C30_an_async_function_in_a_sync_call_is_refused() -> None:
    work: Callable[[], Any] = Work(7).later
    with pytest.raises(TypeError, match="acall"):
        policy().call(work)


def test_a_classifier_of_the_policy_decides(time: Instant) -> None:
    for word, runs in ((True, 4), (False, 1), (Outcome.THROTTLED, 4), (Outcome.REJECTED, 1)):
        work = Work(KeyError())
        with pytest.raises(KeyError):
            policy(classify=lambda error, word=word: word).call(work)
        assert work.runs == runs


@pytest.mark.parametrize("broken", [lambda error: 1 / 0, lambda error: "retry"])
def test_a_classifier_that_fails_never_loses_the_error_of_the_call(
    time: Instant, broken: Callable[[Any], Any], told: list[Event]
) -> None:
    error = ConnectionError("mine")
    with pytest.raises(ConnectionError) as caught:
        policy(classify=broken).call(Work(error))
    assert caught.value is error
    assert "deciding on a retry failed" in error.__notes__[0]
    assert "retry-decision-failed" in [event.kind for event in told]


# --- cancellation --------------------------------------------------------------------------------

ALWAYS: list[Any] = [None, lambda error: True, lambda error: Outcome.TRANSIENT]


@pytest.mark.parametrize("classify", ALWAYS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_C42_an_interrupt_is_never_retried(
    time: Instant, classify: Any, kind: type[BaseException]
) -> None:
    work = Work(kind())
    with pytest.raises(kind):
        policy(classify=classify).call(work)
    assert work.runs == 1


@pytest.mark.parametrize("classify", ALWAYS)
def test_C42_B119_a_cancelled_body_is_not_run_again(classify: Any) -> None:
    runs = 0

    async def hang() -> None:
        nonlocal runs
        runs += 1
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy(classify=classify).acall(hang), 0.02)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(policy(classify=classify).acall(hang))
            await asyncio.sleep(0)
            task.cancel()
            task.cancel()
        assert task.cancelled()

    run(main())
    assert runs == 2


def test_C43_B119_a_cancellation_ends_a_sleep_at_once_with_the_history_on_it() -> None:
    work = Work(ConnectionError())

    async def main() -> None:
        task = asyncio.create_task(policy(backoff=Fixed(60)).acall(work.later))
        await until(lambda: work.runs == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert [fact.error for fact in attempts_of(caught.value)] == ["ConnectionError"]
        assert task.cancelling() == 1

    run(main(), limit=5)
    assert work.runs == 1


def test_C42_a_cancellation_that_became_an_error_is_not_retried() -> None:
    runs = 0

    async def turns_it() -> None:
        nonlocal runs
        runs += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("closed") from None

    async def main() -> None:
        task = asyncio.create_task(policy().acall(turns_it))
        await until(lambda: runs == 1)
        task.cancel()
        with pytest.raises(ConnectionError):
            await task

    run(main(), limit=5)
    assert runs == 1


def test_C42_a_cancellation_that_became_an_error_ends_a_block_too() -> None:
    runs = 0

    async def loops() -> None:
        nonlocal runs
        async for attempt in policy():
            with attempt:
                runs += 1
                if runs > 1:
                    return
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise ConnectionError("closed") from None

    async def main() -> None:
        task = asyncio.create_task(loops())
        await until(lambda: runs == 1)
        task.cancel()
        with pytest.raises(ConnectionError):
            await task

    run(main(), limit=5)
    assert runs == 1


def test_C42_a_block_that_cleans_up_after_a_cancellation_may_retry(time: Instant) -> None:
    work = Work(ConnectionError(), 7)

    async def cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            async for attempt in policy():
                with attempt:
                    work()

    async def main() -> None:
        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert work.runs == 2


def test_C42_cleaning_up_after_a_cancellation_may_retry(time: Instant) -> None:
    work = Work(ConnectionError(), 7)
    results: list[Any] = []

    async def cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            results.append(await policy().acall(work.later))

    async def main() -> None:
        task = asyncio.create_task(cancelled())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert results == [7]


def test_B119_timeouts_work_inside_an_attempt(time: Instant) -> None:
    runs = 0

    async def slow_once() -> int:
        nonlocal runs
        runs += 1
        async with asyncio.timeout(0.01):
            if runs == 1:
                await asyncio.Event().wait()
        return 7

    assert run(policy().acall(slow_once)) == 7
    assert runs == 2


def test_B127_an_async_wait_leaves_the_loop_free() -> None:
    async def main() -> int:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        beating = asyncio.create_task(heart())
        await policy(backoff=Fixed(0.02)).acall(Work(ConnectionError(), 7).later)
        beating.cancel()
        return beats

    assert run(main()) > 10


# --- how long ------------------------------------------------------------------------------------


class Odd:
    """A strategy of a user's."""

    def __init__(self, answer: float) -> None:
        self.answer = answer

    def delay(self, n: int, rng: Callable[[], float]) -> float:
        return self.answer


@pytest.mark.parametrize("answer", [-1.0, math.nan, -math.inf])
def test_C48_a_delay_that_is_none_is_no_sleep(time: Instant, answer: float) -> None:
    assert policy(backoff=Odd(answer)).call(Work(ConnectionError(), 7)) == 7
    assert time.delays == [0]


def test_C49_a_sleep_is_never_endless(time: Instant) -> None:
    assert policy(backoff=Odd(math.inf)).call(Work(ConnectionError(), 7)) == 7
    assert time.delays == [86400]


def test_a_strategy_that_fails_never_loses_the_error_of_the_call(time: Instant) -> None:
    class Broken:
        def delay(self, n: int, rng: Callable[[], float]) -> float:
            raise ZeroDivisionError

    with pytest.raises(ConnectionError):
        policy(backoff=Broken()).call(Work(ConnectionError()))


def test_C50_a_delay_that_would_reach_the_deadline_ends_it_now(time: Instant) -> None:
    work = Work(ConnectionError("last"))
    with pytest.raises(ConnectionError) as caught:
        policy(attempts=None, deadline=10, backoff=Exponential(1)).call(work)
    assert time.delays == [1, 2, 4]
    assert "deadline" in caught.value.__notes__[0]
    with pytest.raises(ConnectionError):
        policy(deadline=1, backoff=Fixed(1)).call(work)
    assert time.delays == [1, 2, 4]


def test_C50_time_spent_in_attempts_counts(time: Instant) -> None:
    clock = FakeClock()

    def slow() -> None:
        clock.advance(4)
        raise ConnectionError

    with instant(clock=clock) as timing, pytest.raises(ConnectionError):
        policy(attempts=None, deadline=10, backoff=Fixed(1)).call(slow)
    assert timing.delays == [1]


def test_C51_an_attempt_knows_how_long_it_has(time: Instant) -> None:
    seen: list[float | None] = []

    def work() -> None:
        attempt = current_attempt()
        assert attempt is not None
        seen.append(attempt.remaining())
        raise ConnectionError

    with pytest.raises(ConnectionError):
        policy(attempts=3, deadline=10, backoff=Fixed(4)).call(work)
    assert seen == [10, 6, 2]
    seen.clear()
    with pytest.raises(ConnectionError):
        policy(attempts=1).call(work)
    assert seen == [None]


def test_B100_an_attempt_cut_at_its_own_timeout_leaves_time_for_the_next() -> None:
    clock = FakeClock()
    runs: list[float] = []

    def hangs_once() -> int:
        attempt = current_attempt()
        assert attempt is not None
        left = attempt.remaining()
        assert left is not None
        runs.append(left)
        if len(runs) == 1:
            clock.advance(min(15, left))
            raise TimeoutError
        return 7

    with instant(clock=clock):
        assert policy(deadline=60).call(hangs_once) == 7
    assert runs == [60, 44]


def test_C52_the_time_of_day_has_no_say(monkeypatch: pytest.MonkeyPatch, time: Instant) -> None:
    work = Work(ConnectionError())
    monkeypatch.setattr(real_time, "time", lambda: -1e9)
    with pytest.raises(ConnectionError):
        policy(attempts=None, deadline=2.5).call(work)
    assert work.runs == 3


def test_the_tighter_of_nested_deadlines_wins(time: Instant) -> None:
    work = Work(ConnectionError())
    assert remaining() is None
    with deadline(5), deadline(60) as inner:
        assert inner.remaining() == remaining() == 5
        with deadline(2.5):
            with pytest.raises(ConnectionError):
                policy(attempts=None, deadline=100).call(work)
            assert work.runs == 3
        assert remaining() == 3
        with pytest.raises(ConnectionError):
            policy(attempts=None, deadline=100).call(work)
        assert work.runs == 6
    assert remaining() is None


def test_a_deadline_reaches_tasks_and_threads(time: Instant) -> None:
    async def main() -> list[float | None]:
        async def child() -> float | None:
            return remaining()

        with deadline(5):
            return [await asyncio.create_task(child()), await asyncio.to_thread(remaining)]

    assert run(main()) == [5, 5]


def test_a_deadline_that_has_passed_leaves_one_attempt(time: Instant) -> None:
    work = Work(ConnectionError())
    with deadline(0), pytest.raises(ConnectionError):
        policy().call(work)
    assert work.runs == 1


@pytest.mark.parametrize("value", [True, -1, math.nan, math.inf, "5", None])
def test_a_deadline_takes_seconds(value: Any) -> None:
    with pytest.raises(ValueError, match="deadline"):
        deadline(value)


# --- what the other side asks for ----------------------------------------------------------------


@pytest.mark.parametrize(("wait", "least"), [("90", 90), ("60.0", 60), ("120", 120), ("0.5", 0.5)])
def test_B093_B094_what_was_asked_is_waited_with_a_little_spread(
    time: Instant, wait: str, least: float
) -> None:
    assert policy(max_retry_after=120).call(Work(asked(wait), 7)) == 7
    (slept,) = time.delays
    assert least <= slept <= least + min(least / 10, 1)


def test_B094_a_date_at_the_limit_is_honoured(time: Instant, monkeypatch: Any) -> None:
    monkeypatch.setattr(time, "wall", lambda: 1_800_000_000.0)
    work = Work(asked(formatdate(1_800_000_060, usegmt=True)), 7)
    assert policy(max_retry_after=60).call(work) == 7
    assert 60 <= time.delays[0] <= 61


@pytest.mark.parametrize("wait", ["121", "120.001", "3600", "9" * 30, "1" + "0" * 400])
def test_B093_more_than_the_limit_is_told_at_once_never_cut_short(time: Instant, wait: str) -> None:
    work = Work(asked(wait))
    with pytest.raises(Answered) as caught:
        policy(max_retry_after=120, deadline=None).call(work)
    assert (work.runs, time.delays) == (1, [])
    (fact,) = attempts_of(caught.value)
    assert fact.retry_after is not None
    assert fact.retry_after > 120
    assert "max_retry_after" in caught.value.__notes__[0]


@pytest.mark.parametrize("wait", ["-5", "nan", "", "1e3", "7s", "500ms"])
def test_B093_B096_what_is_no_wait_is_an_ordinary_backoff(time: Instant, wait: str) -> None:
    assert policy().call(Work(Answered(429, Retry_After=wait), 7)) == 7
    assert time.delays == [1]


def test_C66_a_wait_of_none_is_an_ordinary_backoff(time: Instant) -> None:
    assert policy(backoff=Immediate(Fixed(3))).call(Work(asked("0"), asked("0"), 7)) == 7
    assert time.delays == [0, 3]


def test_B092_an_hour_that_does_not_fit_is_told_at_once(time: Instant) -> None:
    with pytest.raises(Answered) as caught:
        policy(deadline=5, max_retry_after=7200).call(Work(asked("3600"), 7))
    assert time.delays == []
    assert attempts_of(caught.value)[0].retry_after == 3600


def test_a_call_in_flight_is_asked_again_when_it_said(time: Instant) -> None:
    assert policy(idempotent=False).call(Work(InFlight("k", 2.0), 7)) == 7
    assert 2 <= time.delays[0] <= 2.2


# --- every policy ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, True, 1.5, math.nan, math.inf, "3"])
def test_C47_what_is_no_number_of_attempts_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"RetryPolicy\.attempts"):
        RetryPolicy(attempts=value)


@pytest.mark.parametrize(
    "value", [0, -1, True, math.nan, math.inf, "3", pytest.param(10**400, id="huge")]
)
def test_C47_what_is_no_deadline_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"RetryPolicy\.deadline"):
        RetryPolicy(deadline=value)


@pytest.mark.parametrize(
    "fields",
    [
        {"backoff": 3},
        {"backoff": FullJitter},
        {"backoff": "sometimes"},
        {"max_retry_after": math.inf},
        {"max_retry_after": 10**400},
        {"classify": 3},
        {"budget": 3},
        {"important": 1},
    ],
)
def test_another_field_of_the_wrong_kind_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"RetryPolicy\.{next(iter(fields))}"):
        RetryPolicy(**fields)


def test_a_policy_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="no end"):
        RetryPolicy(attempts=None, deadline=None)
    assert RetryPolicy(attempts=None).deadline == 30
    assert RetryPolicy(attempts=None, deadline=None, budget=RetryBudget()).budget


def test_the_defaults_come_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RetryPolicy() == RetryPolicy(attempts=4, deadline=30, backoff=FullJitter(0.1, 10))
    monkeypatch.setenv("RETRYSAFE_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("RETRYSAFE_RETRY_DEADLINE", "1m")
    monkeypatch.setenv("RETRYSAFE_RETRY_BACKOFF", "immediate+fixed:2s")
    assert RetryPolicy() == RetryPolicy(attempts=2, deadline=60, backoff=Immediate(Fixed(2)))
    assert RetryPolicy(backoff="fixed:3s").backoff == Fixed(3)  # type: ignore[arg-type]


# --- what is told --------------------------------------------------------------------------------


def test_C55_the_last_error_is_raised_as_itself_with_its_history(time: Instant) -> None:
    cause = KeyError("cause")
    last = TimeoutError("secret")
    last.__cause__ = cause
    with pytest.raises(TimeoutError) as caught:
        policy(attempts=2).call(Work(ConnectionError("secret"), last))
    assert caught.value is last
    assert last.__cause__ is cause
    facts = attempts_of(last)
    assert [(f.number, f.error, f.outcome, f.delay) for f in facts] == [
        (1, "ConnectionError", Outcome.TRANSIENT, 1),
        (2, "TimeoutError", Outcome.UNKNOWN, None),
    ]
    (note,) = last.__notes__
    assert "2 attempts: ConnectionError (transient), TimeoutError (unknown)" in note
    assert "secret" not in note
    assert attempts_of(pickle.loads(pickle.dumps(last))) == facts
    assert attempts_of(ValueError()) == ()


def test_C55_an_error_raised_again_has_one_note(time: Instant) -> None:
    error = ConnectionError()
    error.add_note("mine")
    for _ in range(3):
        with pytest.raises(ConnectionError):
            policy().call(Work(error))
    assert len(error.__notes__) == 2
    assert len(attempts_of(error)) == 4


def test_C55_the_history_is_bounded(time: Instant) -> None:
    error = type("X" * 500 + "\n", (ConnectionError,), {})()
    with pytest.raises(ConnectionError):
        policy(attempts=500).call(Work(error))
    assert [fact.number for fact in attempts_of(error)] == list(range(401, 501))
    assert len(attempts_of(error)) == HISTORY
    assert len(error.__notes__[0]) < 600
    assert "\n" not in error.__notes__[0]


def test_errors_are_freed_without_the_garbage_collector(time: Instant) -> None:
    freed: list[str] = []

    class Down(ConnectionError):
        def __init__(self, name: str) -> None:
            weakref.finalize(self, freed.append, name)

    def fail(name: str) -> None:
        raise Down(name)

    def once() -> None:
        if seen().number == 1:
            fail("passed")

    gc.disable()
    try:
        policy().call(once)
        with contextlib.suppress(Down):
            policy(attempts=1).call(fail, "raised")
        assert freed == ["passed", "raised"]
    finally:
        gc.enable()


def test_an_error_that_takes_no_attributes_is_raised_all_the_same(time: Instant) -> None:
    class Frozen(ConnectionError):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    with pytest.raises(Frozen):
        policy().call(Work(Frozen()))


def test_the_traceback_has_the_line_that_failed_and_no_earlier_error(time: Instant) -> None:
    with pytest.raises(TimeoutError) as caught:
        policy(attempts=2).call(Work(ConnectionError(), TimeoutError()))
    assert caught.traceback[-1].name == "__call__"
    assert caught.value.__context__ is None


def test_each_retry_is_an_event(time: Instant, told: list[Event]) -> None:
    with (
        entered(RequestContext("r-1", key="ab")),
        pytest.raises(ConnectionError),
    ):
        policy(attempts=2).call(Work(ConnectionError("secret")))
    first, second = told
    assert (first.kind, first.outcome, first.duration) == ("retry-attempt", "transient", 1)
    assert (first.request_id, first.key) == ("r-1", "ab")
    assert second.kind == "retry-gave-up"
    assert "secret" not in first.detail + second.detail


def test_C70_retries_can_be_tested_without_sleeping() -> None:
    work = Work(ConnectionError())
    with instant() as timing, pytest.raises(ConnectionError):
        RetryPolicy(attempts=4, deadline=500, backoff=Exponential(60)).call(work)
    assert timing.delays == [60, 120, 240]
    work = Work(ConnectionError())
    with instant(attempts=2) as timing, pytest.raises(ConnectionError):
        run(RetryPolicy(attempts=9).acall(work.later))
    assert (work.runs, len(timing.delays)) == (2, 1)
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="attempts"), instant(wrong):  # type: ignore[arg-type]
            pass


# --- the attempt ---------------------------------------------------------------------------------


def seen() -> Attempt:
    attempt = current_attempt()
    assert attempt is not None
    return attempt


def test_C53_B112_an_inner_call_leaves_the_outer_attempt_alone(time: Instant) -> None:
    numbers: list[int] = []

    def work(inner: bool = False) -> None:
        if inner:
            assert seen().number == 1
            return
        numbers.append(seen().number)
        if len(numbers) == 1:
            raise ConnectionError
        policy().call(work, inner=True)
        numbers.append(seen().number)

    assert current_attempt() is None
    policy().call(work)
    assert numbers == [1, 2, 2]
    assert current_attempt() is None


def test_B112_each_thread_reads_its_own_attempt(time: Instant) -> None:
    barrier = threading.Barrier(2)
    read: dict[int, list[int]] = {}

    def calls(failures: int) -> None:
        runs = 0

        def work() -> None:
            nonlocal runs
            runs += 1
            barrier.wait(10)
            read.setdefault(failures, []).append(seen().number)
            barrier.wait(10)
            if runs <= failures:
                raise ConnectionError

        policy().call(work)
        for _ in range(2 - failures):
            barrier.wait(10)
            barrier.wait(10)

    threads = [threading.Thread(target=calls, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert read == {1: [1, 2], 2: [1, 2, 3]}


def test_C58_B110_the_key_is_one_for_all_attempts_and_new_for_each_call(time: Instant) -> None:
    keys: list[str] = []

    def work() -> None:
        keys.append(seen().idempotency_key)
        raise ConnectionError

    for _ in range(2):
        with pytest.raises(ConnectionError):
            policy(attempts=3).call(work)
    assert len(set(keys[:3])) == len(set(keys[3:])) == 1
    assert keys[0] != keys[3]


def test_C58_inside_keyed_work_keys_are_the_same_on_each_re_run(time: Instant) -> None:
    def one() -> str:
        return seen().idempotency_key

    def two() -> str:
        return seen().idempotency_key

    def handle(key: str) -> list[str]:
        with entered(RequestContext("r", key=key)):
            return [policy().call(each) for each in (one, one, two)]

    assert handle("ab" * 16) == handle("ab" * 16)
    assert len({*handle("ab" * 16), *handle("cd" * 16)}) == 6


def test_C58_an_inner_call_sends_the_same_key_in_each_attempt_of_the_outer(time: Instant) -> None:
    keys: list[list[str]] = []

    def send() -> str:
        return seen().idempotency_key

    def work() -> None:
        keys.append([policy().call(send), policy().call(send), seen().idempotency_key])
        raise ConnectionError

    for _ in range(2):
        with pytest.raises(ConnectionError):
            policy(attempts=2).call(work)
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert len({*keys[0], *keys[2]}) == 6


def test_C58_threads_of_one_attempt_have_one_key_and_each_call_its_own(time: Instant) -> None:
    def body() -> list[str]:
        keys: list[str] = []

        def look() -> None:
            keys.append(seen().idempotency_key)
            keys.append("inner " + policy().call(lambda: seen().idempotency_key))

        threads = [threading.Thread(target=carry(look)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return keys

    keys = policy().call(body)
    inner = [key for key in keys if key.startswith("inner")]
    assert len(set(inner)) == len(inner) == 16
    assert len(set(keys)) == 17


def test_C58_recorded_work_inside_an_attempt_has_keys_of_its_own(time: Instant) -> None:
    def send() -> str:
        return seen().idempotency_key

    def attempt() -> str:
        with entered(RequestContext("r", key="ab" * 16)):
            return policy().call(send)

    assert policy().call(attempt) == policy().call(attempt)


def test_C73_the_next_attempt_avoids_the_targets_that_failed(time: Instant) -> None:
    went: list[str] = []

    def work() -> None:
        attempt = seen()
        went.append(attempt.choose(["a", "b", "c"]))
        assert attempt.tried == tuple(went[:-1])[:3]
        raise ConnectionError

    with pytest.raises(ConnectionError) as caught:
        policy(attempts=3).call(work)
    assert went == ["a", "b", "c"]
    assert [fact.target for fact in attempts_of(caught.value)] == ["a", "b", "c"]


def test_C73_when_all_have_failed_the_one_that_failed_longest_ago_is_next(time: Instant) -> None:
    went: list[str] = []

    def work() -> None:
        went.append(seen().choose(["a", "b"]))
        raise ConnectionError

    with pytest.raises(ConnectionError):
        policy(attempts=6).call(work)
    assert went == ["a", "b", "a", "b", "a", "b"]

    def none() -> None:
        seen().choose([])

    with pytest.raises(ValueError, match="target"):
        policy().call(none)


@pytest.mark.parametrize(
    ("nodes", "runs"), [(["a", "b", "c"], ["a", "b", "c", "a"]), (["a"], "aa")]
)
def test_C73_an_answer_that_cannot_be_understood_is_asked_of_another_node_once_each(
    time: Instant, nodes: list[str], runs: list[str]
) -> None:
    asked: list[str] = []

    def work() -> None:
        attempt = current_attempt()
        assert attempt is not None
        asked.append(attempt.choose(nodes))
        raise json.JSONDecodeError("no JSON", "<html>", 0)

    with pytest.raises(json.JSONDecodeError):
        policy(attempts=10).call(work)
    assert asked == list(runs)


def test_C73_without_a_target_or_a_key_it_is_not_repeated(time: Instant) -> None:
    def work(target: str | None, error: Exception) -> int:
        attempt = current_attempt()
        assert attempt is not None
        attempt.target = target
        raise error

    garbled = json.JSONDecodeError("no JSON", "<html>", 0)
    read = errors.ProtocolError("ocr", "node-1", "not JSON", b"<html>")  # a result: final
    for rules, target, error in (
        (policy(), None, garbled),
        (policy(idempotent=False), "node-1", garbled),
        (policy(), "node-1", read),
        (policy(), "node-1", ValueError("a bug")),
    ):
        with pytest.raises(type(error)):
            rules.call(work, target, error)
    assert time.delays == []


def test_a_target_that_cannot_be_shown_never_loses_the_error_of_the_call(time: Instant) -> None:
    class Odd_:
        def __str__(self) -> str:
            raise ZeroDivisionError

        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

    def work() -> None:
        seen().target = Odd_()
        raise ConnectionError

    with pytest.raises(ConnectionError) as caught:
        policy().call(work)
    assert attempts_of(caught.value)[0].target == "Odd_"


def test_a_target_that_is_named_is_one_tried(time: Instant) -> None:
    tried: list[tuple[Any, ...]] = []

    def work() -> None:
        attempt = seen()
        tried.append(attempt.tried)
        attempt.target = f"node-{attempt.number}"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        policy(attempts=3).call(work)
    assert tried == [(), ("node-1",), ("node-1", "node-2")]


def test_the_error_of_the_attempt_before_is_known(time: Instant) -> None:
    error = ConnectionError()
    last: list[BaseException | None] = []

    def work() -> None:
        last.append(seen().last)
        if len(last) < 2:
            raise error

    policy().call(work)
    assert last == [None, error]


# --- layers --------------------------------------------------------------------------------------


def layers(work: Callable[[], Any], *policies: RetryPolicy) -> Callable[[], Any]:
    for each in policies:
        work = functools.partial(each.call, work)
    return work


def test_C59_B116_inner_policies_run_once_inside_an_attempt(time: Instant) -> None:
    work = Work(ConnectionError())
    nested = layers(work, *[policy(attempts=3)] * 3)
    for _ in range(100):
        with pytest.raises(ConnectionError) as caught:
            nested()
    assert work.runs == 300
    assert len(attempts_of(caught.value)) == 3


def test_C59_B116_nested_policies_multiply_where_they_say_so(time: Instant) -> None:
    work = Work(ConnectionError())
    for _ in range(100):
        with pytest.raises(ConnectionError):
            layers(work, *[policy(attempts=3, nested=True)] * 3)()
    assert work.runs == 2700


def test_C59_a_task_that_outlives_the_attempt_retries_for_itself(time: Instant) -> None:
    work = Work(ConnectionError(), 7)

    async def main() -> Any:
        go = asyncio.Event()

        async def background() -> Any:
            await go.wait()
            return await policy().acall(work.later)

        async def body() -> asyncio.Task[Any]:
            return asyncio.create_task(background())

        task = await policy().acall(body)
        go.set()
        return await task

    assert run(main()) == 7


def test_C59_an_attempt_reaches_threads(time: Instant) -> None:
    work = Work(ConnectionError())

    def inner() -> None:
        with pytest.raises(ConnectionError):
            policy().call(work)

    def body() -> None:
        thread = threading.Thread(target=carry(inner))
        thread.start()
        thread.join(10)

    policy().call(body)
    assert work.runs == 1


def breaker_around(work: Callable[[], Any], clock: FakeClock) -> Callable[[], Any]:
    rules = BreakerPolicy(failure_rate=1.0, min_calls=1, window=1, open_for=0.3, probes=1)
    breaker = CircuitBreaker("pay", rules, clock=clock)

    def guarded() -> Any:
        with breaker:
            return work()

    return guarded


def test_C61_B115_a_refusal_of_the_breaker_ends_the_retries() -> None:
    clock, backend = FakeClock(), ConnectionError("backend")
    with instant(clock=clock), pytest.raises(BreakerOpen) as caught:
        policy(backoff=Fixed(0.1)).call(breaker_around(Work(backend, 7), clock))
    assert 0.19 < caught.value.retry_after <= 0.3
    assert caught.value.__cause__ is backend
    assert len(attempts_of(caught.value)) == 2


def test_C61_B115_where_asked_the_open_time_is_waited_for_and_costs_no_budget() -> None:
    clock = FakeClock()
    with instant(clock=clock) as timing:
        budget = RetryBudget(ratio=0, per_second=0, initial=1)
        waiting = policy(backoff=Fixed(0.1), retry_on_open=True, budget=budget)
        assert waiting.call(breaker_around(Work(ConnectionError(), 7), clock)) == 7
    assert len(timing.delays) == 2
    assert 0.2 <= timing.delays[1] <= 0.23
    with pytest.raises(BreakerOpen), instant(clock=clock):
        policy(deadline=5, retry_on_open=True).call(Work(BreakerOpen("pay", 60.0)))


def test_C61_a_refusal_raised_again_as_another_error_ends_the_retries_too(time: Instant) -> None:
    class Unavailable(Exception): ...

    error = Unavailable("payments")
    error.__cause__ = BreakerOpen("pay", 5.0)
    work = Work(error)
    with pytest.raises(Unavailable):
        policy().call(work)
    assert (work.runs, time.delays) == (1, [])
    budget = RetryBudget(ratio=0, per_second=0, initial=0)
    work = Work(error, 7)
    assert policy(retry_on_open=True, budget=budget).call(work) == 7


def test_a_breaker_that_is_open_for_ages_is_not_waited_for(time: Instant) -> None:
    patient = policy(retry_on_open=True, deadline=None)
    with pytest.raises(BreakerOpen):
        patient.call(Work(BreakerOpen("pay", 1e12)))
    assert time.delays == []


# --- blocks --------------------------------------------------------------------------------------


def test_a_block_is_run_again_while_it_fails(time: Instant) -> None:
    work = Work(ConnectionError(), TimeoutError(), 7)
    results: list[Any] = []
    for attempt in policy():
        with attempt:
            assert seen().number == attempt.number
            results.append(work())
            assert attempt.number == 3
    assert (results, work.runs, time.delays) == ([7], 3, [1, 1])
    assert current_attempt() is None


def test_an_async_block_is_run_again_while_it_fails(time: Instant) -> None:
    work = Work(ConnectionError(), 7)

    async def main() -> Any:
        async for attempt in policy():
            with attempt:
                return await work.later()

    assert run(main()) == 7
    assert time.delays == [1]


def test_a_block_that_goes_on_failing_raises_its_own_error(time: Instant) -> None:
    error = ConnectionError()
    with pytest.raises(ConnectionError) as caught:
        for attempt in policy(attempts=2):
            with attempt:
                raise error
    assert caught.value is error
    assert len(attempts_of(error)) == 2
    with pytest.raises(KeyboardInterrupt):
        for attempt in policy():
            with attempt:
                raise KeyboardInterrupt
    assert time.delays == [1]


def test_a_block_that_is_left_in_another_context_does_no_harm(time: Instant) -> None:
    async def numbers() -> Any:
        async for attempt in policy():
            with attempt:
                yield attempt.number

    async def main() -> None:
        items = numbers()
        assert await asyncio.create_task(anext(items)) == 1
        await asyncio.create_task(items.aclose())
        assert current_attempt() is None

    run(main())


def test_a_loop_without_its_block_is_an_error(time: Instant) -> None:
    with pytest.raises(RuntimeError, match="with attempt"):
        for _attempt in policy():
            pass
    with pytest.raises(RuntimeError, match="once"):
        for attempt in policy():
            with attempt, attempt:
                pass


def test_a_client_can_run_its_own_loop(time: Instant) -> None:
    call = policy().begin("POST api")
    answers = [SimpleNamespace(status_code=502, headers={}), SimpleNamespace(status_code=404)]
    answers[1].headers = {}
    delays: list[float | None] = []
    for answer in answers:
        call.enter()
        try:
            delays.append(call.failed(answer, repeatable=True))
        finally:
            call.leave()
    assert delays == [1, None]
    assert [fact.error for fact in call.history] == ["status 502", "status 404"]
    assert policy().begin().failed(answers[0], repeatable=False) is None


def test_a_policy_is_a_value() -> None:
    assert policy() == policy()
    assert hash(policy()) == hash(policy())
    assert copy.copy(policy()) == policy()
    assert policy().but(attempts=9).attempts == 9
    assert "attempts=4" in repr(policy())
