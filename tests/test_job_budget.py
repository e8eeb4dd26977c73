"""The retry budget of a queued job: it ends, and a job that was given up never comes back."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from retrysafe import JobBudget
from retrysafe.errors import StoreUnavailable
from retrysafe.events import Event, listening
from retrysafe.job_budget import JobState
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.testing import FakeClock
from tests.conftest import OwnServer
from tests.support import run

_jobs = (f"job-{number}" for number in itertools.count())


def test_R12_a_retry_is_spent_and_the_next_failure_gives_the_job_up(store: Store) -> None:
    budget, heard = JobBudget(store, limit=1, hard_wait=60), list[Event]()
    with listening(heard.append):
        assert budget.spend_sync("j", "render")
        assert budget.requeue_sync("j", "render", 1)
        assert budget.state_sync("j", "render") == JobState(1, 2, given_up=False)
        assert not budget.spend_sync("j", "render")
        assert not budget.requeue_sync("j", "render", 2)
    assert budget.state_sync("j", "render") == JobState(1, 2, given_up=True)
    (event,) = (each for each in heard if each.kind == "job-given-up")
    assert "j" not in (event.key, event.detail)


def test_the_async_forms_do_the_same(store: Store) -> None:
    async def main() -> None:
        budget = JobBudget(store, limit=2, hard_wait=60)
        assert not (await budget.state("j", "s")).known
        for attempt in (1, 2):
            assert await budget.spend("j", "s", attempt=attempt)
            assert await budget.requeue("j", "s", attempt)
        assert await budget.state("j", "s") == JobState(2, 3, given_up=False)
        assert not await budget.spend("j", "s", attempt=3)
        assert await budget.give_up("j", "s")
        assert (await budget.state("j", "s")).given_up

    run(main())


def test_C63_each_job_and_each_step_has_its_own_budget(store: Store) -> None:
    budget = JobBudget(store, hard_wait=60)
    names = [("a", "b"), ("a", "c"), ("b", "b"), ("a:b", "c"), ("a", "b:c"), ("a%3Ab", "c")]
    assert all(budget.spend_sync(*each) for each in names)
    assert not any(budget.spend_sync(*each) for each in names)


def test_C63_the_first_spend_sets_the_expiry_with_it(redis_url: str) -> None:
    budget = JobBudget(RedisStore(redis_url, "tests"), limit=2, hard_wait=30)
    assert budget.spend_sync("j", "s")
    with redis.Redis.from_url(redis_url) as client:
        (key,) = client.keys()
        assert key == b"tests:job:j:s"
        assert 59_000 < client.pttl(key) <= 60_000
        client.pexpire(key, 5_000)  # some time later
        assert budget.spend_sync("j", "s")  # the next attempt may take as long again
        assert 59_000 < client.pttl(key) <= 60_000
        assert not budget.spend_sync("j", "s")
        client.pexpire(key, 5_000)
        assert not budget.spend_sync("j", "s")  # refused: nothing changes
        assert not budget.requeue_sync("j", "s", 1)
        assert client.pttl(key) <= 5_000


def test_the_budget_outlives_every_gap_up_to_twice_the_hard_wait() -> None:
    clock = FakeClock()
    budget = JobBudget(MemoryStore("tests", clock), limit=3, hard_wait=60)
    for attempt in (1, 2, 3):
        assert budget.spend_sync("j", "s")
        assert budget.requeue_sync("j", "s", attempt)
        clock.advance(119.9)
    assert not budget.spend_sync("j", "s")
    clock.advance(119.9)
    assert budget.state_sync("j", "s").given_up
    clock.advance(0.2)
    assert not budget.state_sync("j", "s").known


def test_C86_of_the_consumers_of_one_attempt_one_requeues(store: Store) -> None:
    budget = JobBudget(store, limit=3, hard_wait=60)
    assert [budget.requeue_sync("j", "s", 1) for _ in range(3)] == [True, False, False]
    assert not budget.requeue_sync("j", "s", 4)
    assert budget.requeue_sync("j", "s", 2)
    assert not budget.state_sync("j", "s").given_up


def test_R14_a_late_consumer_of_an_earlier_attempt_gives_nothing_up(store: Store) -> None:
    budget = JobBudget(store, limit=1, hard_wait=60)
    assert budget.spend_sync("j", "s", attempt=1)
    assert budget.spend_sync("j", "s", attempt=1)  # the second consumer: spent once
    assert budget.requeue_sync("j", "s", 1)
    assert not budget.spend_sync("j", "s", attempt=1)
    assert not budget.give_up_sync("j", "s", attempt=1)
    assert budget.state_sync("j", "s") == JobState(1, 2, given_up=False)
    assert not budget.spend_sync("j", "s", attempt=2)  # its own consumer's word
    assert budget.state_sync("j", "s").given_up


def test_requeues_alone_end_too(store: Store) -> None:
    budget = JobBudget(store, limit=2, hard_wait=60)
    assert [budget.requeue_sync("j", "s", n) for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert budget.state_sync("j", "s") == JobState(2, 3, given_up=True)


def test_R15_what_was_given_up_by_the_producers_word_stays_so(store: Store) -> None:
    budget = JobBudget(store, limit=5, hard_wait=60)
    assert budget.give_up_sync("j", "s")
    assert budget.give_up_sync("j", "s")
    assert not budget.spend_sync("j", "s", attempt=1)
    assert not budget.requeue_sync("j", "s", 1)


def test_the_same_token_counts_once(store: Store) -> None:
    budget = JobBudget(store, limit=1, hard_wait=60)
    assert budget.spend_sync("j", "s", token="delivery-1")
    assert budget.spend_sync("j", "s", token="delivery-1")
    assert budget.requeue_sync("j", "s", 1, token="delivery-1")
    assert budget.requeue_sync("j", "s", 1, token="delivery-1")  # it died before it put the job
    assert not budget.requeue_sync("j", "s", 1, token="delivery-2")
    assert budget.state_sync("j", "s") == JobState(1, 2, given_up=False)
    budget.give_up_sync("j", "s")
    assert not budget.requeue_sync("j", "s", 1, token="delivery-1")


def test_a_message_knows_its_attempt_where_the_record_was_lost(store: Store) -> None:
    budget = JobBudget(store, limit=3, hard_wait=60)
    assert not budget.requeue_sync("j", "s", 3)  # not the one recorded: none is
    assert budget.spend_sync("j", "s", attempt=3)
    assert budget.requeue_sync("j", "s", 3)
    assert budget.state_sync("j", "s") == JobState(3, 4, given_up=False)
    assert not budget.spend_sync("k", "s", attempt=4)
    assert budget.state_sync("k", "s").given_up


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("limit", wrong) for wrong in (0, -1, True, 1.5, None, "1", float("nan"), 10_001)),
        *(("hard_wait", wrong) for wrong in (0, -1, True, float("nan"), float("inf"), "60", None)),
        *(("ttl", wrong) for wrong in (0, -1, True, float("nan"), 119.9, "120")),
    ],
)
def test_what_is_no_budget_is_refused_and_named(field: str, value: Any) -> None:
    given: dict[str, Any] = {"hard_wait": 60, field: value}
    with pytest.raises(ValueError, match=field):
        JobBudget(MemoryStore("tests"), **given)


def test_C63_a_ttl_below_twice_the_hard_wait_is_refused_with_the_rule() -> None:
    with pytest.raises(ValueError, match="twice hard_wait"):
        JobBudget(MemoryStore("tests"), hard_wait=60, ttl=100)
    assert JobBudget(MemoryStore("tests"), hard_wait=60, ttl=120).ttl == 120
    assert JobBudget(MemoryStore("tests"), hard_wait=60).ttl == 120


def test_what_names_no_job_is_refused() -> None:
    budget = JobBudget(MemoryStore("tests"), hard_wait=60)
    for name in ("", "x" * 513, "\ud800", 3, None):
        with pytest.raises(ValueError, match="job_id"):
            budget.spend_sync(name, "s")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="step"):
            budget.spend_sync("j", name)  # type: ignore[arg-type]
    for attempt in (0, -1, True, 1.5, None, "1", 2**53 + 1):
        with pytest.raises(ValueError, match="attempt"):
            budget.requeue_sync("j", "s", attempt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token"):
        budget.spend_sync("j", "s", token="")


def test_without_the_store_there_is_no_yes(own_server: OwnServer) -> None:
    server = own_server()
    budget = JobBudget(RedisStore(server.url, "tests"), limit=5, hard_wait=60)
    assert budget.spend_sync("j", "s")
    server.stop()

    async def main() -> None:
        for call in (budget.spend("j", "s"), budget.requeue("j", "s", 1), budget.state("j", "s")):
            with pytest.raises(StoreUnavailable):
                await call

    run(main())
    for ask in (
        lambda: budget.spend_sync("j", "s"),
        lambda: budget.requeue_sync("j", "s", 1),
        lambda: budget.give_up_sync("j", "s"),
    ):
        with pytest.raises(StoreUnavailable):
            ask()


def test_what_is_no_budget_in_the_store_is_no_yes(redis_url: str) -> None:
    budget = JobBudget(RedisStore(redis_url, "tests"), limit=5, hard_wait=60)
    with redis.Redis.from_url(redis_url) as client:
        client.set("tests:job:j:s", "5", ex=60)
        client.hset("tests:job:k:s", mapping={"n": "none", "a": "first"})
        client.expire("tests:job:k:s", 60)
    for job in ("j", "k"):
        for ask in (
            lambda job=job: budget.spend_sync(job, "s"),
            lambda job=job: budget.requeue_sync(job, "s", 1),
        ):
            with pytest.raises(StoreUnavailable):
                ask()


def test_R14_consumers_at_the_budgets_edge_never_spend_nor_requeue_too_often(store: Store) -> None:
    """Each of 4 threads consumes whatever attempt of whatever job is there, twice delivered."""
    limit, jobs = 3, [next(_jobs) for _ in range(40)]
    budget = JobBudget(store, limit=limit, hard_wait=60)
    queue: list[tuple[str, int]] = [(job, 1) for job in jobs for _ in range(2)]
    granted: list[tuple[str, int]] = []
    failed: list[str] = []
    lock = threading.Lock()

    def consume() -> None:
        while True:
            with lock:
                if not queue:
                    return
                job, attempt = queue.pop(0)
            if budget.spend_sync(job, "s", attempt=attempt) and budget.requeue_sync(
                job, "s", attempt
            ):
                with lock:
                    granted.append((job, attempt))
                    queue.extend([(job, attempt + 1)] * 2)
            elif budget.state_sync(job, "s").given_up:
                with lock:
                    failed.append(job)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # Threads may end while another still holds the last message: drain what it put.
    consume()
    assert sorted(granted) == sorted((job, n) for job in jobs for n in range(1, limit + 1))
    assert set(failed) == set(jobs)
    assert all(budget.state_sync(job, "s") == JobState(limit, limit + 1, True) for job in jobs)


def test_tasks_of_one_loop_spend_no_more_than_the_limit(store: Store) -> None:
    async def main() -> None:
        budget = JobBudget(store, limit=7, hard_wait=60)
        answers = await asyncio.gather(*(budget.spend("j", "s") for _ in range(50)))
        assert sum(answers) == 7
        requeues = await asyncio.gather(*(budget.requeue("j", "s", 1) for _ in range(50)))
        assert sum(requeues) == 0  # given up by then

    run(main())


class Model:
    """What the budget of one job and step is meant to be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.state = JobState(0, 1, given_up=False, known=False)
        self.tokens: set[str] = set()
        self.requeued_by = ""

    def now(self, **facts: Any) -> None:
        held = {"spent": self.state.spent, "attempt": self.state.attempt, "given_up": False}
        self.state = JobState(**{**held, **facts})

    def spend(self, attempt: int | None, token: str) -> bool:
        if self.state.given_up:
            return False
        if attempt is None:
            if token in self.tokens:
                return True
            if self.state.spent == self.limit:
                self.now(given_up=True)
                return False
            self.tokens.add(token)
            self.now(spent=self.state.spent + 1)
            return True
        if attempt < self.state.attempt:
            return False
        if attempt > self.limit:
            self.now(attempt=attempt, given_up=True)
            return False
        self.now(attempt=attempt, spent=max(attempt, self.state.spent))
        return True

    def requeue(self, attempt: int, token: str) -> bool:
        if self.state.given_up:
            return False
        if attempt == self.state.attempt - 1 and token == self.requeued_by:
            return True
        if attempt != self.state.attempt:
            return False
        if attempt > self.limit:
            self.now(given_up=True)
            return False
        self.requeued_by = token
        self.now(attempt=attempt + 1, spent=max(attempt, self.state.spent))
        return True

    def give_up(self, attempt: int | None) -> bool:
        if self.state.given_up:
            return True
        if attempt is not None and attempt < self.state.attempt:
            return False
        self.now(attempt=max(attempt or 1, self.state.attempt), given_up=True)
        return True


tokens = st.sampled_from(["a", "b", "c", "d", "e"])
attempts = st.integers(1, 5)


class Budgets(RuleBasedStateMachine):
    """Both stores beside the model, step by step."""

    stores: tuple[Store, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.job = next(_jobs)
        self.model = Model(3)
        self.budgets = [JobBudget(each, limit=3, hard_wait=60) for each in self.stores]

    def check(self, expected: bool, answers: Iterator[bool]) -> None:
        assert list(answers) == [expected] * len(self.budgets)
        for each in self.budgets:
            assert each.state_sync(self.job, "s") == self.model.state
        assert self.model.state.spent <= 3

    @rule(attempt=st.none() | attempts, token=tokens)
    def spend(self, attempt: int | None, token: str) -> None:
        self.check(
            self.model.spend(attempt, token),
            (b.spend_sync(self.job, "s", attempt=attempt, token=token) for b in self.budgets),
        )

    @rule(attempt=attempts, token=tokens)
    def requeue(self, attempt: int, token: str) -> None:
        self.check(
            self.model.requeue(attempt, token),
            (b.requeue_sync(self.job, "s", attempt, token=token) for b in self.budgets),
        )

    @rule(attempt=st.none() | attempts)
    def give_up(self, attempt: int | None) -> None:
        self.check(
            self.model.give_up(attempt),
            (b.give_up_sync(self.job, "s", attempt=attempt) for b in self.budgets),
        )


def test_both_stores_do_what_the_model_says(redis_url: str) -> None:
    class Here(Budgets):
        stores = (MemoryStore("tests"), RedisStore(redis_url, "tests"))

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
