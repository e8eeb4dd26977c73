"""Part `wrappers`: what `@retry` and `@circuit_breaker` cost a call that succeeds."""

from __future__ import annotations

import time

from benchmarks.figures import Results, ratio

PART = "wrappers: a sync call that succeeds"


def run(rounds: int, calls: int) -> dict[str, list[float]]:
    """Nanoseconds per call, by wrapper, a value a round."""
    from retrysafe.decorators import circuit_breaker, retry

    def plain(value: int) -> int:
        return value

    wrapped = {
        "bare": plain,
        "retrysafe retry": retry(plain),
        "retrysafe retry over circuit_breaker": retry(circuit_breaker("bench")(plain)),
    }
    found: dict[str, list[float]] = {name: [] for name in wrapped}
    for _ in range(rounds):
        for name, function in wrapped.items():
            began = time.perf_counter_ns()
            for _ in range(calls):
                function(1)
            found[name].append((time.perf_counter_ns() - began) / calls)
    return found


def report(found: dict[str, list[float]], results: Results) -> None:
    for name, values in found.items():
        results.add(PART, name, "ns", values)
        results.add(PART, name, "ratio to bare", ratio(values, found["bare"]))
