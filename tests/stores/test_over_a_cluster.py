"""What is built beside receipts, on every node of a real Cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from retrysafe import (
    BreakerPolicy,
    CircuitBreaker,
    JobBudget,
    Reservation,
    ResultReader,
    ResultWriter,
    Saga,
    finished,
    open_store,
)
from retrysafe.desks import async_desk_for
from retrysafe.errors import AlreadyTaken
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call, Receipts
from retrysafe.records import Record
from retrysafe.stores.cluster import ClusterStore
from tests.receipting import held, policy
from tests.servers import Cluster
from tests.support import admitted, run, until, wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as started:
        yield started


def test_results_are_nudged_across_nodes_and_taken_once(cluster: Cluster) -> None:
    async def main() -> None:
        store = open_store(cluster.url, namespace="results")
        reader, writer = ResultReader(store), ResultWriter(store)
        jobs = [f"job-{n}" for n in range(30)]
        waits = [
            asyncio.ensure_future(reader.wait(job, step="s", server="x", timeout=20.0))
            for job in jobs
        ]
        await asyncio.sleep(0)
        for job in jobs:
            await asyncio.to_thread(writer.done_sync, job, job)
        assert [result.content for result in await asyncio.gather(*waits)] == jobs
        for job in jobs[:5]:
            with pytest.raises(AlreadyTaken):
                await asyncio.to_thread(reader.wait_sync, job, step="s", server="x", timeout=20.0)

    run(main(), limit=60)


def test_budgets_sagas_and_reservations_lie_on_every_node(cluster: Cluster) -> None:
    async def main() -> None:
        store = open_store(cluster.url, namespace="others")
        budget = JobBudget(store, limit=1, hard_wait=60.0)
        saga = Saga("order", store)

        @saga.step()
        async def pay(ctx: object, n: int) -> int:
            return n

        stock = Reservation(store, ttl=60.0)
        for n in range(20):
            assert await budget.spend(f"job-{n}", "s", attempt=1)
            assert await budget.requeue(f"job-{n}", "s", 1)
            assert not await budget.requeue(f"job-{n}", "s", 1)
            assert await saga.run(f"order-{n}", n) == {"pay": n}
            await stock.astock(f"item-{n}", 1)
            await stock.ahold(f"item-{n}", 1, "me")

    run(main(), limit=60)


def test_a_forget_and_a_breakers_move_cross_the_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished, "MAX_AGE", 3600.0)  # not by its end, but because it was told

    async def main() -> None:
        receipts = AsyncReceipts(ClusterStore(cluster.url, "told"), policy())
        elsewhere = Receipts(ClusterStore(cluster.url, "told"), policy())
        calls = [Call(f"k-{n}", "s") for n in range(12)]
        for call in calls:
            await (await held(receipts, call)).finish(b"r", 60)
            assert isinstance(await receipts.begin(call), Record)
        records = async_desk_for(receipts.store, MAX_WAITERS).finished
        await until(lambda: records.heard)
        for call in calls:
            assert isinstance(await receipts.begin(call), Record)
        assert len(records._found) == len(calls)
        for call in calls:
            assert await asyncio.to_thread(elsewhere.forget, call)
        await until(lambda: not records._found)

    run(main(), limit=60)
    rules = BreakerPolicy(failure_rate=1.0, min_calls=1, window=1, open_for=60.0)
    for n in range(6):
        idle, other = (
            CircuitBreaker(f"b-{n}", rules, shared=ClusterStore(cluster.url), clock=clock)
            for clock in (lambda: 50.0, time.monotonic)
        )
        idle.acquire().success()
        other.acquire().failure()
        wait_until(lambda idle=idle: not admitted(idle), limit=20)
