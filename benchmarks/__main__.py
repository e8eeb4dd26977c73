"""`python -m benchmarks`: measure everything, print the tables, write table, CSV and chart."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import functions, goals, memory, over_http, scale, waiters, wrappers
from benchmarks.apps import CONTENDERS, installed
from benchmarks.figures import Results
from benchmarks.processes import alone, fleet, pin, server

PARTS = (
    "http",
    "memory",
    "waiters",
    "functions",
    "wrappers",
    "sizes",
    "keys",
    "processes",
    "imports",
)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    rounds: int
    seconds: float
    calls: int
    duplicates: int
    local_waiters: tuple[int, ...]
    waited_for: int
    result_bytes: int
    records: tuple[int, ...]


FULL = Size(
    rounds=7,
    seconds=1.0,
    calls=2000,
    duplicates=200,
    local_waiters=(1, 200, 5000),
    waited_for=2000,
    result_bytes=64 << 20,
    records=(10**3, 10**4, 10**5, 10**6),
)
QUICK = Size(
    rounds=2,
    seconds=0.15,
    calls=200,
    duplicates=20,
    local_waiters=(1, 200),
    waited_for=50,
    result_bytes=1 << 20,
    records=(10**2, 10**3),
)


def measure(parts: list[str], size: Size, results: Results) -> None:
    served = {"http", "memory", "waiters"} & set(parts)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(server())
        apps = stack.enter_context(fleet(url)) if served else {}
        if "waiters" in parts:  # first: its connections are counted from none
            waiters.over_http(apps, results, url, size.rounds, size.duplicates)
            counts = list(size.local_waiters)
            waiters.report(alone(waiters.in_process, url, size.rounds, counts), results)
            waiters.over_processes(url, size.rounds, size.local_waiters[-1], results)
            waiters.of_many_keys(
                alone(waiters.many_keys, url, size.rounds, size.waited_for), results
            )
        if "http" in parts:
            over_http.measure(apps, results, size.rounds, size.seconds)
        if "memory" in parts:
            memory.measure(apps, results, url)
        if "functions" in parts:
            for tasks in (64, 1):
                calls = size.calls if tasks > 1 else size.calls // 4
                seen = alone(functions.run_async, url, size.rounds, calls, tasks)
                part = f"functions: async, {tasks} task{'s' if tasks > 1 else ''}"
                functions.report(seen, results, part, functions.PEER["async"])
            seen = alone(functions.run_sync, url, size.rounds, size.calls // 4)
            functions.report(seen, results, "functions: sync, one thread", functions.PEER["sync"])
        if "sizes" in parts:
            scale.report_sizes(alone(scale.sizes, url, size.rounds, size.result_bytes), results)
        if "processes" in parts:
            scale.processes(url, size.rounds, size.calls, results)
    if "keys" in parts:
        found = alone(scale.keys, size.rounds, size.calls * 2, list(size.records))
        scale.report_keys(found, results)
    if "imports" in parts:
        scale.imports(size.rounds, results)
    if "wrappers" in parts:
        wrappers.report(alone(wrappers.run, size.rounds, size.calls * 10), results)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"default {FULL.rounds}")
    parser.add_argument("--seconds", type=float, help=f"of load a figure; {FULL.seconds}")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quick", action="store_true", help="shows that it runs; no figures")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    size = replace(
        size, rounds=options.rounds or size.rounds, seconds=options.seconds or size.seconds
    )
    results = Results()
    modules = {name: module for name, (module, _) in CONTENDERS.items()}
    modules["aws-lambda-powertools"] = "aws_lambda_powertools"
    modules.update((name, name) for name in wrappers.CONTENDERS)
    for name, module in modules.items():
        if not installed(module):
            results.remarks.append(f"{name} is left out: it is not installed")
    began = time.monotonic()
    pin(os.getpid(), last=True)
    measure(options.only, size, results)
    goals.report(results)
    results.remarks.append(
        f"{size.rounds} rounds, {time.monotonic() - began:.0f} s; median (lower–upper quartile)"
    )
    written = results.write(options.out)
    print(results.markdown())
    print("\nwritten:", *written)


if __name__ == "__main__":
    main()
