"""Part `memory`: what one finished record takes in the server."""

from __future__ import annotations

import redis

from benchmarks.apps import FLOORS
from benchmarks.figures import Results
from benchmarks.load import run_once
from benchmarks.over_http import fresh_keys
from benchmarks.processes import App

PART = "memory: one finished record of a 300-byte answer"
RECORDS = 200


def measure(apps: dict[str, App], results: Results, url: str) -> None:
    """The sum of MEMORY USAGE over every key that some requests left, by request. It is exact."""
    with redis.Redis.from_url(url) as client:
        for name, app in apps.items():
            if name == FLOORS[0]:
                continue
            client.flushdb()
            keys = fresh_keys()
            run_once(app.port, [next(keys) for _ in range(RECORDS)], 8)
            found = list(client.scan_iter(count=1000))
            taken = sum(client.memory_usage(key, samples=0) or 0 for key in found)
            results.add(PART, name, "bytes", [taken / RECORDS])
            results.add(PART, name, "keys", [len(found) / RECORDS])
        client.flushdb()
