"""What is built beside receipts, on every node of a real Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from retrysafe import JobBudget, Reservation, ResultReader, ResultWriter, Saga, open_store
from retrysafe.errors import AlreadyTaken
from tests.servers import Cluster
from tests.support import run


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
