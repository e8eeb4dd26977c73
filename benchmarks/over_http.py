"""Part `http`: the same POST through each library; CPU of the app's process, and the rate."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

from benchmarks.apps import FLOORS
from benchmarks.figures import Results, ratio
from benchmarks.load import run_for, run_once
from benchmarks.processes import App, cpu_of

PART = "http: one POST of 300 bytes, 64 connections"
CPU, ADDED, RATE = "CPU, µs", "added over the empty app, µs", "requests/s"
EMPTY = FLOORS[0]


def fresh_keys() -> Iterator[str]:
    """As unlike as clients send them, without the cost of making each anew."""
    head = str(uuid.uuid4())[:24]
    return (f"{head}{number:012x}" for number in itertools.count())


def measure(apps: dict[str, App], results: Results, rounds: int, seconds: float) -> None:
    """Contenders take turns in each round; the ratios are of one round's figures."""
    cases: dict[str, tuple[App, list[str]]] = {}
    for name, app in apps.items():
        again = [next(keys) for keys in (fresh_keys() for _ in range(64))]
        run_once(app.port, again, 64)
        run_for(app.port, min(0.3, seconds), fresh_keys())
        if name in FLOORS:
            cases[name] = (app, [])
        else:
            cases[f"{name}, fresh"] = (app, [])
            statuses = run_once(app.port, again, 64).statuses
            if wrong := [status for status in statuses if not 200 <= status < 300]:
                results.note(PART, f"{name}, replay", f"answers {wrong[0]}")
            else:
                cases[f"{name}, replay"] = (app, again)
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    rate: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (app, again) in cases.items():
            keys = itertools.cycle(again) if again else fresh_keys()
            before = cpu_of(app.pid)
            load = run_for(app.port, seconds, keys)
            cpu[name].append((cpu_of(app.pid) - before) / load.answers * 1e6)
            rate[name].append(load.answers / load.seconds)
            bad = sum(n for status, n in load.statuses.items() if not 200 <= status < 300)
            if bad:
                results.note(PART, name, f"{bad} answers were errors")
    for name in cases:
        added = [a - b for a, b in zip(cpu[name], cpu[EMPTY], strict=True)]
        results.add(PART, name, CPU, cpu[name])
        results.add(PART, name, ADDED, added)
        results.add(PART, name, RATE, rate[name])
        results.add(PART, name, "rate ÷ empty app's", ratio(rate[name], rate[EMPTY]))
        peer = f"idemkit, {name.rpartition(', ')[2]}"
        reference = rate.get(peer) or rate.get("idemkit, fresh")
        if reference:
            results.add(PART, name, "rate ÷ idemkit's", ratio(rate[name], reference))
