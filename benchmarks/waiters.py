"""Part `waiters`: duplicates of a call in flight, over HTTP and in one process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import redis

from benchmarks.apps import FLOORS, SLOW
from benchmarks.figures import Results, ratio
from benchmarks.load import Load, run_once
from benchmarks.over_http import fresh_keys
from benchmarks.processes import App, unpin

HTTP = f"waiters: duplicates over HTTP of a call of {SLOW:g} s"
LOCAL = "waiters: in one process"
APART = "waiters: of a call that another process runs"
MANY = "waiters: one for each of many calls, in one process"


class Monitor:
    """Counts the commands that clients send, those that scripts make not among them."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        port = self._client.connection_pool.connection_kwargs["port"]
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Monitor:
        self._socket.sendall(b"MONITOR\r\n")
        assert self._file.readline().startswith(b"+OK")
        return self

    def count(self) -> int:
        """The commands since the start."""
        mark = f"end-{os.getpid()}-{time.monotonic_ns()}"
        self._client.echo(mark)
        seen = 0
        # The line of our ECHO ends it; our connection's own set-up is told by its address.
        lines: list[bytes] = []
        while True:
            line = self._file.readline()
            lines.append(line)
            if mark.encode() in line:
                break
        ours = line.split(b"]", 1)[0].rpartition(b" ")[2]
        for line in lines:
            source = line.split(b"]", 1)[0].rpartition(b" ")[2]
            seen += source not in (ours, b"lua")
        return seen

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._socket.close()
        self._client.close()


def over_http(
    apps: dict[str, App], results: Results, url: str, rounds: int, duplicates: int
) -> None:
    """The first storm shows the connections, the second the commands, the others the times."""
    late: dict[str, list[float]] = {}
    exact: dict[str, dict[str, int]] = {}
    with redis.Redis.from_url(url) as client:
        for name, app in apps.items():
            if name in FLOORS:
                continue
            before = client.info("clients")["connected_clients"]
            peak = before
            ended = threading.Event()

            def watch(done: threading.Event = ended) -> None:
                nonlocal peak
                while not done.wait(0.02):
                    peak = max(peak, client.info("clients")["connected_clients"])

            watching = threading.Thread(target=watch)
            watching.start()
            _storm(app, duplicates)
            ended.set()
            watching.join()
            late[name] = []
            with Monitor(url) as monitor:
                load = _storm(app, duplicates)
                exact[name] = {"commands": monitor.count(), "connections": peak - before}
            if load.statuses != {201: duplicates} and load.statuses != {200: duplicates}:
                answers = ", ".join(f"{n} × {s}" for s, n in sorted(load.statuses.items()))
                results.note(HTTP, name, f"answers: {answers}")
    for _ in range(rounds):
        for name in late:
            load = _storm(apps[name], duplicates)
            good = [body for body in load.bodies if b'"done"' in body]
            late[name].append((load.last - json.loads(good[0])["done"]) * 1e3)
    for name, values in late.items():
        results.add(HTTP, name, "last answer after the finish, ms", values)
        for column, number in exact[name].items():
            results.add(HTTP, name, column, [number])


def _storm(app: App, duplicates: int) -> Load:
    key = next(fresh_keys())
    return run_once(app.port, [key] * duplicates, duplicates, "/slow", bodies=True)


def in_process(url: str, rounds: int, counts: list[int]) -> dict[int, dict[str, Any]]:
    """Milliseconds to wake so many waiters, and the same number of bare futures; commands."""
    return asyncio.run(_in_process(url, rounds, counts))


async def _in_process(url: str, rounds: int, counts: list[int]) -> dict[int, dict[str, Any]]:
    from retrysafe.decorators import idempotent
    from retrysafe.stores import open_store

    started, go = asyncio.Event(), asyncio.Event()
    finished = 0.0

    @idempotent(key="order", store=open_store(url))
    async def work(order: str) -> str:
        nonlocal finished
        started.set()
        await go.wait()
        finished = time.perf_counter()
        return order

    async def wake_calls(count: int) -> float:
        started.clear()
        go.clear()
        key = next(fresh_keys())
        calls = [asyncio.create_task(work(key)) for _ in range(count + 1)]
        await started.wait()
        for _ in range(3):  # every task has come to its wait
            await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*calls)
        return (time.perf_counter() - finished) * 1e3

    async def wake_futures(count: int) -> float:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(count)]

        async def wait(future: asyncio.Future[str]) -> str:
            return await future

        waits = [asyncio.create_task(wait(future)) for future in futures]
        await asyncio.sleep(0)
        began = time.perf_counter()
        for future in futures:
            future.set_result("done")
        await asyncio.gather(*waits)
        return (time.perf_counter() - began) * 1e3

    found: dict[int, dict[str, Any]] = {}
    for count in counts:
        await wake_calls(count)
        with Monitor(url) as monitor:
            await wake_calls(count)
            commands = monitor.count()
        calls, futures = [], []
        for _ in range(rounds):
            calls.append(await wake_calls(count))
            futures.append(await wake_futures(count))
        found[count] = {"calls": calls, "futures": futures, "commands": commands}
    return found


def report(found: dict[int, dict[str, Any]], results: Results) -> None:
    for count, figures in found.items():
        row = f"retrysafe, {count:,}"
        results.add(LOCAL, row, "last one after the finish, ms", figures["calls"])
        results.add(LOCAL, row, "waking as many futures, ms", figures["futures"])
        results.add(LOCAL, row, "ratio", ratio(figures["calls"], figures["futures"]))
        results.add(LOCAL, row, "commands", [figures["commands"]])


def _keyed(url: str, body: Callable[[], Awaitable[str]]) -> Callable[[str], Awaitable[str]]:
    """One function by name in every process, so that they share their receipts."""
    from retrysafe.decorators import idempotent
    from retrysafe.stores import open_store

    @idempotent(key="order", store=open_store(url))
    async def work(order: str) -> str:
        return await body()

    return work


def _wait_elsewhere(url: str, key: str, count: int) -> float:
    """So many duplicates of a call that another process runs; when the last one was answered."""

    async def not_here() -> str:
        raise AssertionError("another process has this key")

    async def main() -> float:
        work = _keyed(url, not_here)
        await asyncio.gather(*(work(key) for _ in range(count)))
        return time.monotonic()

    return asyncio.run(main())


def over_processes(url: str, rounds: int, count: int, results: Results) -> None:
    """Milliseconds from the finish in one process to the last answer in another."""
    spawn = multiprocessing.get_context("spawn")
    late: list[float] = []
    commands = 0
    with ProcessPoolExecutor(1, spawn, unpin) as pool, redis.Redis.from_url(url) as client:
        for number in range(rounds + 1):
            key = next(fresh_keys())
            finished: list[float] = []
            waiting: list[Future[float]] = []

            async def body(key: str = key, finished: Any = finished, waiting: Any = waiting) -> str:
                waiting.append(pool.submit(_wait_elsewhere, url, key, count))
                while not any(b":i:" in each for each in client.pubsub_channels()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.5)  # its first duplicate waits; the others join it
                finished.append(time.monotonic())
                return key

            with Monitor(url) as monitor:
                asyncio.run(_finished(_keyed(url, body)(key)))
                ended = waiting[0].result(60)
                commands = monitor.count()
            if number:
                late.append((ended - finished[0]) * 1e3)
    row = f"retrysafe, {count:,}"
    results.add(APART, row, "last one after the finish, ms", late)
    results.add(APART, row, "commands, all told", [commands])


async def _finished(call: Awaitable[str]) -> None:
    await call


def many_keys(url: str, rounds: int, count: int) -> dict[str, Any]:
    """So many calls run at once, each with one duplicate; all are let go together."""

    async def main() -> dict[str, Any]:
        all_run, go = asyncio.Event(), asyncio.Event()
        running = 0

        async def body() -> str:
            nonlocal running
            running += 1
            if running == count:
                all_run.set()
            await go.wait()
            return "done"

        work = _keyed(url, body)

        async def once() -> tuple[float, float]:
            nonlocal running
            running = 0
            all_run.clear()
            go.clear()
            names = fresh_keys()
            keys = [next(names) for _ in range(count)]
            calls = [asyncio.ensure_future(work(key)) for key in keys]
            await all_run.wait()
            duplicates = [asyncio.ensure_future(work(key)) for key in keys]
            for _ in range(3):
                await asyncio.sleep(0)
            began, cpu = time.perf_counter(), time.process_time()
            go.set()
            await asyncio.gather(*calls, *duplicates)
            return (time.perf_counter() - began) * 1e3, (time.process_time() - cpu) / count * 1e6

        await once()
        with Monitor(url) as monitor:
            await once()
            commands = monitor.count()
        return {"seen": [await once() for _ in range(rounds)], "commands": commands, "count": count}

    return asyncio.run(main())


def of_many_keys(found: dict[str, Any], results: Results) -> None:
    row = f"retrysafe, {found['count']:,} keys"
    results.add(MANY, row, "last answer after all may finish, ms", [ms for ms, _ in found["seen"]])
    results.add(
        MANY, row, "CPU for a finish and its duplicate, µs", [us for _, us in found["seen"]]
    )
    results.add(MANY, row, "commands for each", [found["commands"] / found["count"]])
