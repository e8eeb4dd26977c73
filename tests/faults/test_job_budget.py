"""Two consumers of one job at the edge of its budget, with replies lost on the way."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from retrysafe import JobBudget
from retrysafe.job_budget import JobState
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.wire import script
from tests.faults.proxy import Proxy
from tests.servers import port_of

pytestmark = pytest.mark.slow

ROUNDS = 500  # in each of two ways
Ask = Callable[..., Any]


@dataclass
class Job:
    """What the consumers of one job were told of it."""

    name: str
    spent: int = 0
    requeued: list[tuple[int, float]] = field(default_factory=list)  # attempt, when it was asked
    given_up_at: float = float("inf")  # when the first consumer knew


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(port_of(redis_url)) as started:
        yield started


@pytest.fixture
def consumers(proxy: Proxy) -> Iterator[list[Ask]]:
    """A sync one and an async one, each with connections of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    here, there = (
        JobBudget(RedisStore(proxy.url, "faults"), limit=1, hard_wait=60) for _ in range(2)
    )

    def ask_sync(what: str, *args: Any, **named: Any) -> Any:
        return getattr(here, f"{what}_sync")(*args, **named)

    def ask_async(what: str, *args: Any, **named: Any) -> Any:
        call = getattr(there, what)(*args, **named)
        return asyncio.run_coroutine_threadsafe(call, loop).result(20)

    yield [ask_sync, ask_async]
    asyncio.run_coroutine_threadsafe(loop.shutdown_asyncgens(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def consume(ask: Ask, job: Job, attempt: int, named: bool, pauses: list[float]) -> None:
    """What a consumer does when its attempt has failed; `named`: it says which one that was."""
    time.sleep(pauses[0])
    whose = {"attempt": attempt} if named else {}
    if ask("spend", job.name, "s", **whose):
        job.spent += 1
        time.sleep(pauses[1])
        asked = time.monotonic()
        if ask("requeue", job.name, "s", attempt):
            job.requeued.append((attempt, asked))
    if ask("state", job.name, "s").given_up:
        job.given_up_at = min(job.given_up_at, time.monotonic())


def interleave(
    proxy: Proxy, consumers: list[Ask], rng: random.Random, job: Job, attempt: int, named: bool
) -> None:
    """Both consume one attempt at once; now and then a reply is lost."""
    if rng.random() < 0.3:
        proxy.lose_reply(script("job_act")[1], rng.randint(1, 6))
    with ThreadPoolExecutor(2) as threads:
        running = [
            threads.submit(
                consume, ask, job, attempt, named, [rng.choice((0, 0, 0.001, 0.003)) for _ in "ab"]
            )
            for ask in consumers
        ]
        for each in running:
            each.result(60)


def test_R14_two_consumers_that_say_their_attempt_requeue_once_and_give_up_together(
    proxy: Proxy, consumers: list[Ask]
) -> None:
    rng = random.Random(14)
    for number in range(ROUNDS // 2):
        job = Job(f"named-{number}")
        interleave(proxy, consumers, rng, job, 1, named=True)
        assert [attempt for attempt, _ in job.requeued] == [1]
        assert consumers[0]("state", job.name, "s") == JobState(1, 2, given_up=False)
        interleave(proxy, consumers, rng, job, 2, named=True)
        assert [attempt for attempt, _ in job.requeued] == [1]
        assert consumers[0]("state", job.name, "s") == JobState(1, 2, given_up=True)
        assert not any(ask("requeue", job.name, "s", n) for ask in consumers for n in (1, 2, 3))
    assert proxy.lost > ROUNDS // 10


def test_R14_two_consumers_at_the_budgets_edge_never_requeue_what_was_given_up(
    proxy: Proxy, consumers: list[Ask]
) -> None:
    rng, requeued = random.Random(41), 0
    for number in range(ROUNDS):
        job = Job(f"unnamed-{number}")
        interleave(proxy, consumers, rng, job, 1, named=False)
        # A yes whose reply was lost is a no when it is asked for again after the giving up.
        assert job.spent <= 1
        assert len(job.requeued) <= 1
        assert all(asked < job.given_up_at for _, asked in job.requeued)
        requeued += len(job.requeued)
        after = consumers[1]("state", job.name, "s")
        assert (after.spent, after.given_up) == (1, True)
        assert 1 + len(job.requeued) <= after.attempt <= 2
        assert not any(ask("requeue", job.name, "s", n) for ask in consumers for n in (1, 2))
    assert 0 < requeued < ROUNDS  # both orders were met: requeued first, given up first
    assert proxy.lost > ROUNDS // 10
