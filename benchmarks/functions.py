"""Part `functions`: a decorated function, async with 64 tasks and with one, sync on one thread."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio as aioredis

from benchmarks.apps import POOL, installed
from benchmarks.figures import Results, ratio

Seen = dict[str, list[tuple[float, float]]]
"""By contender: CPU µs per call and calls per second, a pair a round."""

PEER = {"sync": "aws-lambda-powertools", "async": "idemkit"}
SETS = "two SETs by redis-py"
FROM_REDIS = "retrysafe, from Redis, replay"


def fresh_orders() -> Callable[[], str]:
    head, numbers = str(uuid.uuid4()), itertools.count()
    return lambda: f"{head}-{next(numbers)}"


def async_contenders(url: str) -> dict[str, Callable[[str], Awaitable[object]]]:
    from retrysafe.decorators import idempotent
    from retrysafe.desks import async_desk_for
    from retrysafe.receipts import MAX_WAITERS
    from retrysafe.stores import open_store

    client = aioredis.Redis.from_url(url, max_connections=POOL)

    async def work(order: str) -> dict[str, str]:
        return {"charged": order}

    async def two_sets(order: str) -> None:
        await client.set(order, b"running", px=600_000, nx=True)
        await client.set(order, b"done", px=600_000)

    store = open_store(url)
    ours = idempotent(key="order", store=store)(work)

    async def forgetful(order: str) -> object:
        """A replay as the first one in a process: the record is not at hand."""
        async_desk_for(store, MAX_WAITERS).finished.forget(None)
        return await ours(order)

    found: dict[str, Any] = {SETS: two_sets, "retrysafe": ours, FROM_REDIS: forgetful}
    if installed("idemkit"):
        import idemkit

        found["idemkit"] = idemkit.idempotent(backend=_idemkit_backend(url))(work)
    if installed("pyidempotent"):
        from pyidempotent import idempotent as other
        from pyidempotent.backends.redis import RedisBackend

        found["pyidempotent"] = other(
            backend=RedisBackend(aioredis.Redis.from_url(url, max_connections=POOL)),
            key_extractor=lambda order, **_: order,
        )(work)
    return found


def sync_contenders(url: str) -> dict[str, Callable[[str], object]]:
    from retrysafe.decorators import idempotent
    from retrysafe.stores import open_store

    client = redis.Redis.from_url(url)

    def work(order: str) -> dict[str, str]:
        return {"charged": order}

    def two_sets(order: str) -> None:
        client.set(order, b"running", px=600_000, nx=True)
        client.set(order, b"done", px=600_000)

    found: dict[str, Any] = {
        SETS: two_sets,
        "retrysafe": idempotent(key="order", store=open_store(url))(work),
    }
    if installed("aws_lambda_powertools") and installed("boto3"):
        found["aws-lambda-powertools"] = _powertools(url, work)
    if installed("idemkit"):
        import idemkit

        found["idemkit"] = idemkit.idempotent_sync(backend=_idemkit_backend(url))(work)
    return found


def _idemkit_backend(url: str) -> Any:
    import idemkit

    warnings.filterwarnings("ignore", message="idemkit: tool .* has no scope")
    return idemkit.RedisBackend(aioredis.Redis.from_url(url, max_connections=POOL))


def _powertools(url: str, work: Callable[[str], object]) -> Callable[[str], object]:
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.redis import (
        RedisCachePersistenceLayer,
    )

    class Context:
        """What it asks of its runtime."""

        @staticmethod
        def get_remaining_time_in_millis() -> int:
            return 30_000

    config = IdempotencyConfig()
    context: Any = Context()
    config.register_lambda_context(context)
    decorated = idempotent_function(
        work,
        data_keyword_argument="order",
        persistence_store=RedisCachePersistenceLayer(
            client=redis.Redis.from_url(url, decode_responses=True)
        ),
        config=config,
    )
    return lambda order: decorated(order=order)


async def async_round(
    call: Callable[[str], Awaitable[object]], order: Callable[[], str], calls: int, tasks: int
) -> tuple[float, float]:
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            await call(order())

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(tasks)))
    return (time.process_time() - cpu) / calls * 1e6, calls / (time.perf_counter() - wall)


def _sync_round(
    call: Callable[[str], object], order: Callable[[], str], calls: int
) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call(order())
    return (time.process_time() - cpu) / calls * 1e6, calls / (time.perf_counter() - wall)


def _modes(name: str) -> list[tuple[str, bool]]:
    if name in (SETS, FROM_REDIS):
        return [(name, name == SETS)]
    return [(f"{name}, fresh", True), (f"{name}, replay", False)]


def run_async(url: str, rounds: int, calls: int, tasks: int) -> Seen:
    """In a process of its own; `calls` by each contender and round."""

    async def main() -> Seen:
        contenders = async_contenders(url)
        seen: Seen = {}
        for number in range(rounds + 1):
            for name, call in contenders.items():
                for row, fresh in _modes(name):
                    again = f"again-{tasks}-{name}"
                    if not fresh:
                        await call(again)
                    order = fresh_orders() if fresh else lambda again=again: again
                    figures = await async_round(call, order, calls, tasks)
                    if number:  # the first round warms up
                        seen.setdefault(row, []).append(figures)
        return seen

    return asyncio.run(main())


def run_sync(url: str, rounds: int, calls: int) -> Seen:
    """In a process of its own; `calls` by each contender and round."""
    contenders = sync_contenders(url)
    seen: Seen = {}
    for number in range(rounds + 1):
        for name, call in contenders.items():
            for row, fresh in _modes(name):
                again = f"again-sync-{name}"
                if not fresh:
                    call(again)
                order = fresh_orders() if fresh else lambda again=again: again
                figures = _sync_round(call, order, calls)
                if number:
                    seen.setdefault(row, []).append(figures)
    return seen


def report(seen: Seen, results: Results, part: str, peer: str) -> None:
    for row, figures in seen.items():
        rate = [each for _, each in figures]
        results.add(part, row, "CPU, µs", [cpu for cpu, _ in figures])
        results.add(part, row, "calls/s", rate)
        results.add(part, row, f"rate ÷ {SETS}", ratio(rate, [r for _, r in seen[SETS]]))
        against = seen.get(f"{peer}, {row.rpartition(', ')[2]}") or seen.get(f"{peer}, fresh")
        if against:
            results.add(part, row, f"rate ÷ {peer}'s", ratio(rate, [r for _, r in against]))
