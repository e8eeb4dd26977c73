"""A job from submission to result: every end of an attempt, and what it costs whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import pytest
import redis

from retrysafe import BreakerPolicy, CircuitBreaker, ResultReader, ResultWriter, Submission, run_job
from retrysafe.context import current_request
from retrysafe.errors import (
    AlreadyTaken,
    BreakerOpen,
    JobGivenUp,
    JobTaken,
    ProtocolError,
    ResultTimeout,
    StepFailed,
)
from retrysafe.job_budget import JobBudget
from retrysafe.stores import Store
from retrysafe.stores.redis import RedisStore
from tests.support import run, until

Act = Callable[[Submission], Awaitable[object]]
_numbers = count()


class Farm:
    """Servers that act as told, the breakers before them, and what was submitted to whom."""

    def __init__(self, store: Store, acts: dict[str, Act], limit: int = 1) -> None:
        self.store = store
        self.acts = acts
        self.submitted: list[tuple[str, int]] = []
        self.keys: list[str | None] = []
        self.budget = JobBudget(store, limit=limit, hard_wait=20.0)
        self.breakers: dict[str, CircuitBreaker] = {}
        self.job_id = f"job-{next(_numbers)}"

    def breaker(self, server: str) -> CircuitBreaker:
        if server not in self.breakers:
            policy = BreakerPolicy(min_calls=1, window=4, failure_rate=0.5, open_for=60.0)
            self.breakers[server] = CircuitBreaker(server, policy)
        return self.breakers[server]

    async def submit(self, job: Submission) -> None:
        self.submitted.append((job.server, job.attempt))
        context = current_request()
        self.keys.append(context.key if context else None)
        await self.acts[job.server](job)

    async def run(self, **options: Any) -> Any:
        asked: dict[str, Any] = {
            "step": "render",
            "servers": [*self.acts],
            "submit": self.submit,
            "reader": ResultReader(self.store),
            "budget": self.budget,
            "breakers": self.breaker,
            **options,
        }
        return await run_job(self.job_id, **asked)

    def state(self) -> Any:
        return self.budget.state_sync(self.job_id, "render")


def done(store: Store, content: Any = "pixels") -> Act:
    async def act(job: Submission) -> None:
        await ResultWriter(store).done(job.result_id, content)

    return act


def fails(store: Store, message: str = "out of memory", retryable: bool | None = None) -> Act:
    async def act(job: Submission) -> None:
        await ResultWriter(store).error(job.result_id, message, retryable)

    return act


def raises(error: Exception) -> Act:
    async def act(job: Submission) -> None:
        raise error

    return act


async def nothing(job: Submission) -> None:
    """Accepted, and never heard of again."""


def test_a_job_that_works_costs_no_budget(store: Store) -> None:
    farm = Farm(store, {"a": done(store), "b": nothing})
    assert run(farm.run()).content == "pixels"
    assert farm.submitted == [("a", 1)]
    assert not farm.state().known


@pytest.mark.parametrize("mode", ["take", "acknowledge"])
def test_a_failed_step_is_tried_on_another_server(store: Store, mode: str) -> None:
    farm = Farm(store, {"a": fails(store), "b": done(store)})
    assert run(farm.run(mode=mode)).content == "pixels"
    assert farm.submitted == [("a", 1), ("b", 2)]
    assert len(set(farm.keys)) == 2
    assert None not in farm.keys  # outbound calls carry a key of the attempt
    assert farm.state().spent == 1
    assert farm.breaker("a").state == "closed"  # the server answered


def test_a_job_that_fails_everywhere_ends_with_the_producers_own_words(store: Store) -> None:
    farm = Farm(store, {"a": fails(store, "bad frame 7"), "b": fails(store, "bad frame 7 again")})
    with pytest.raises(StepFailed, match="bad frame 7 again") as caught:
        run(farm.run())
    assert caught.value.server == "b"
    note = "".join(caught.value.__notes__)
    assert "attempt 1 on 'a'" in note
    assert "attempt 2 on 'b'" in note
    assert farm.state().given_up
    with pytest.raises(JobGivenUp):
        run(farm.run())
    assert len(farm.submitted) == 2


def test_the_producers_no_ends_it_at_once(store: Store) -> None:
    farm = Farm(store, {"a": fails(store, "no such scene", retryable=False), "b": done(store)})
    with pytest.raises(StepFailed, match="no such scene"):
        run(farm.run())
    assert farm.submitted == [("a", 1)]
    assert farm.state().given_up


def test_a_malformed_result_counts_against_the_server_and_is_tried_elsewhere(
    redis_url: str,
) -> None:
    store = RedisStore(redis_url, "tests")
    client = redis.Redis.from_url(redis_url)

    async def garbage(job: Submission) -> None:
        client.set(f"tests:result:{job.result_id}", b'{"status": 5}', ex=60)

    farm = Farm(store, {"a": garbage, "b": done(store)})
    assert run(farm.run()).content == "pixels"
    assert farm.breaker("a").state == "open"
    assert farm.breaker("b").state == "closed"

    alone = Farm(store, {"a": garbage}, limit=2)
    with pytest.raises(BreakerOpen):  # nobody else, and this one is ill: the job keeps its budget
        run(alone.run())
    assert alone.submitted == [("a", 1)]
    assert (alone.state().attempt, alone.state().given_up) == (2, False)


def test_a_probe_comes_back_as_a_success_when_the_step_failed(store: Store) -> None:
    farm = Farm(store, {"a": fails(store, retryable=False)})
    now = [0.0]
    breaker = CircuitBreaker(
        "a", BreakerPolicy(min_calls=1, open_for=5.0), clock=lambda: now[0], rng=lambda: 0.0
    )
    breaker.acquire().failure()
    assert breaker.state == "open"
    now[0] = 100.0
    with pytest.raises(StepFailed):
        run(farm.run(breakers=lambda _: breaker))
    assert breaker.state == "closed"


def test_a_job_that_is_never_answered_ends_at_the_cap_and_goes_elsewhere(store: Store) -> None:
    farm = Farm(store, {"a": nothing, "b": done(store)})
    farm.budget = JobBudget(store, limit=1, hard_wait=0.2)
    assert run(farm.run()).content == "pixels"
    assert farm.breaker("a").state == "open"
    silent = Farm(store, {"a": nothing, "b": nothing})
    silent.budget = JobBudget(store, limit=1, hard_wait=0.2)
    with pytest.raises(ResultTimeout):
        run(silent.run())
    assert silent.state().given_up


def test_a_server_that_is_never_reached_costs_the_job_nothing(store: Store) -> None:
    farm = Farm(store, {"a": raises(ConnectionRefusedError()), "b": done(store)})
    assert run(farm.run()).content == "pixels"
    assert farm.submitted == [("a", 1), ("b", 1)]
    assert not farm.state().known
    nobody = Farm(
        store, {"a": raises(ConnectionRefusedError()), "b": raises(ConnectionRefusedError())}
    )
    with pytest.raises(ConnectionRefusedError):
        run(nobody.run())
    assert not nobody.state().given_up
    nobody.acts["a"] = done(store)  # the next delivery begins where this one ended
    nobody.breakers.clear()
    assert run(nobody.run()).content == "pixels"


def test_a_submission_that_may_have_arrived_costs_an_attempt(store: Store) -> None:
    farm = Farm(store, {"a": raises(TimeoutError()), "b": done(store)})
    assert run(farm.run()).content == "pixels"
    assert farm.submitted == [("a", 1), ("b", 2)]
    assert farm.state().spent == 1


def test_a_submission_that_is_refused_is_the_callers_to_see(store: Store) -> None:
    class Refused(Exception):
        retryable = False

    farm = Farm(store, {"a": raises(Refused()), "b": done(store)})
    with pytest.raises(Refused):
        run(farm.run())
    assert farm.submitted == [("a", 1)]
    assert not farm.state().given_up


def test_two_consumers_of_one_job_submit_each_attempt_once(store: Store) -> None:
    async def later(job: Submission) -> None:
        async def fail() -> None:
            await asyncio.sleep(0.1)
            await ResultWriter(store).error(job.result_id, "no")

        kept.append(asyncio.ensure_future(fail()))

    kept: list[Any] = []
    farm = Farm(store, {"a": later, "b": later, "c": later}, limit=2)

    async def consumers() -> list[Any]:
        return await asyncio.gather(
            *(farm.run(mode="acknowledge") for _ in range(5)), return_exceptions=True
        )

    ends = run(consumers())
    assert sorted(farm.submitted) == [("a", 1), ("b", 2), ("c", 3)]
    assert {type(end) for end in ends} <= {StepFailed, JobTaken, JobGivenUp}
    assert any(isinstance(end, StepFailed) for end in ends)
    assert farm.state().given_up


def test_a_consumer_that_comes_after_a_crash_waits_for_what_was_submitted(store: Store) -> None:
    farm = Farm(store, {"a": nothing, "b": nothing})

    async def crashed() -> None:
        first = asyncio.ensure_future(farm.run())
        await until(lambda: farm.submitted == [("a", 1)])
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(farm.run())
        await asyncio.sleep(0)
        await ResultWriter(store).done(farm.job_id, "late")
        assert (await second).content == "late"

    run(crashed())
    assert farm.submitted == [("a", 1)]
    assert farm.breaker("a").state == "closed"  # a cancelled wait proves nothing


def test_two_consumers_of_a_taken_result_one_is_told_so(store: Store) -> None:
    farm = Farm(store, {"a": done(store)})
    assert run(farm.run()).content == "pixels"
    with pytest.raises(AlreadyTaken):
        run(farm.run())


def test_a_cancelled_job_leaves_no_permit(store: Store) -> None:
    now = [100.0]
    breaker = CircuitBreaker(
        "a", BreakerPolicy(min_calls=1, open_for=5.0), clock=lambda: now[0], rng=lambda: 0.0
    )
    breaker.acquire().failure()
    now[0] = 200.0
    farm = Farm(store, {"a": nothing})

    async def cancelled() -> None:
        job = asyncio.ensure_future(farm.run(breakers=lambda _: breaker))
        await until(lambda: farm.submitted != [])
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    run(cancelled())
    breaker.acquire().success()  # the probe's slot is free
    assert breaker.state == "closed"


@pytest.mark.parametrize("servers", [[], "gpu-1", [1], None])
def test_servers_that_are_none_are_refused(store: Store, servers: Any) -> None:
    with pytest.raises(ValueError, match="servers takes"):
        run(Farm(store, {"a": nothing}).run(servers=servers))


def test_a_protocol_error_keeps_its_payload_out_of_the_notes(redis_url: str) -> None:
    store = RedisStore(redis_url, "tests")
    client = redis.Redis.from_url(redis_url)

    async def secret(job: Submission) -> None:
        client.set(f"tests:result:{job.result_id}", b"SECRET", ex=60)

    with pytest.raises(ProtocolError) as caught:
        run(Farm(store, {"a": secret, "b": secret}).run())
    assert "SECRET" not in str(caught.value) + repr(caught.value) + "".join(caught.value.__notes__)
    assert caught.value.raw == b"SECRET"
