"""Taskiq's own receiver on a Redis list."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from taskiq import SimpleRetryMiddleware
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

from retrysafe.decorators import idempotent
from tests.support import run, until


@contextlib.asynccontextmanager
async def received(broker: ListQueueBroker) -> AsyncIterator[None]:
    """A worker while the block runs."""
    await broker.startup()
    receiver = asyncio.ensure_future(run_receiver_task(broker))
    try:
        yield
    finally:
        receiver.cancel()
        await asyncio.gather(receiver, return_exceptions=True)
        await broker.shutdown()


def broker_at(url: str) -> ListQueueBroker:
    broker = ListQueueBroker(url)
    return broker.with_result_backend(RedisAsyncResultBackend(url, result_ex_time=60))


def test_a_message_that_comes_twice_at_once_is_worked_once(redis_url: str, broker_url: str) -> None:
    ran: list[str] = []
    asked: list[str] = []

    async def main() -> None:
        broker = broker_at(broker_url)
        release = asyncio.Event()

        @idempotent(key="message_id", store=redis_url, wait=20)
        async def charge(message_id: str) -> str:
            ran.append(message_id)
            await release.wait()
            return f"charge {len(ran)}"

        @broker.task(task_name="handle")
        async def handle(message_id: str) -> str:
            asked.append(message_id)
            return await charge(message_id)

        async with received(broker):
            tasks = [await handle.kiq("m-1") for _ in range(2)]
            await until(lambda: len(asked) == 2)
            release.set()
            tasks.append(await handle.kiq("m-1"))  # and once more, later
            results = [await task.wait_result(timeout=20) for task in tasks]
        assert [each.return_value for each in results] == ["charge 1"] * 3

    run(main())
    assert ran == ["m-1"]


def test_a_failed_task_is_run_again_by_the_queues_retry(redis_url: str, broker_url: str) -> None:
    ran: list[str] = []
    answers: list[str] = []

    async def main() -> None:
        broker = broker_at(broker_url).with_middlewares(SimpleRetryMiddleware())

        @idempotent(key="message_id", store=redis_url)
        async def charge(message_id: str) -> str:
            ran.append(message_id)
            if len(ran) == 1:
                raise ConnectionError("the bank hung up")
            return "paid"

        @broker.task(task_name="handle", retry_on_error=True, max_retries=3)
        async def handle(message_id: str) -> None:
            answers.append(await charge(message_id))

        async with received(broker):
            await handle.kiq("m-1")
            await until(lambda: answers == ["paid"])

    run(main())
    assert ran == ["m-1", "m-1"]
