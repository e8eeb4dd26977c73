"""Part `wrappers`: what `@retry` and `@circuit_breaker` cost a call that succeeds, beside the
retries and breakers of others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from benchmarks.apps import installed
from benchmarks.figures import Results, ratio

SYNC = "wrappers: a sync call that succeeds"
ASYNC = "wrappers: an async call that succeeds"
PARTS = {"sync": SYNC, "async": ASYNC}
OURS = "retrysafe: retry over circuit_breaker"
STACK = " over "
"""In the name of every row that has both a retry and a breaker."""

Wrapper = Callable[[Any], Any]
Seen = dict[str, dict[str, list[float]]]
"""By kind of call and wrapper: nanoseconds per call, a value a round."""


def _plain(value: int) -> int:
    return value


async def _aplain(value: int) -> int:
    return value


def _retrysafe(kind: str) -> Iterator[tuple[str, Wrapper]]:
    from retrysafe.decorators import circuit_breaker, retry

    yield "retrysafe: retry", retry
    yield "retrysafe: circuit_breaker", circuit_breaker(f"bench {kind}")
    yield OURS, lambda work: retry(circuit_breaker(f"bench both {kind}")(work))


def _nopanic(kind: str) -> Iterator[tuple[str, Wrapper]]:
    import nopanic

    yield "nopanic: retry", nopanic.retry()
    yield "nopanic: circuit_breaker", nopanic.circuit_breaker()
    yield (
        "nopanic: retry over circuit_breaker",
        lambda work: nopanic.retry()(nopanic.circuit_breaker()(work)),
    )


def _pyresilience(kind: str) -> Iterator[tuple[str, Wrapper]]:
    from pyresilience import CircuitBreakerConfig, RetryConfig, resilient

    yield "pyresilience: retry", resilient(retry=RetryConfig())
    yield "pyresilience: circuit breaker", resilient(circuit_breaker=CircuitBreakerConfig())
    yield (
        "pyresilience: retry over circuit breaker",
        resilient(retry=RetryConfig(), circuit_breaker=CircuitBreakerConfig()),
    )


def _circuitbreaker(kind: str) -> Iterator[tuple[str, Wrapper]]:
    from circuitbreaker import circuit

    yield "circuitbreaker", circuit(name=f"bench {kind}")
    if installed("backoff"):
        import backoff

        again = backoff.on_exception(backoff.expo, ConnectionError, max_tries=4)
        yield "backoff over circuitbreaker", lambda w: again(circuit(name=f"both {kind}")(w))


def _purgatory(kind: str) -> Iterator[tuple[str, Wrapper]]:
    from purgatory import AsyncCircuitBreakerFactory, SyncCircuitBreakerFactory

    def guard(name: str) -> Wrapper:
        made: Any = SyncCircuitBreakerFactory() if kind == "sync" else AsyncCircuitBreakerFactory()
        wrapper: Wrapper = made(name)
        return wrapper

    yield "purgatory", guard("alone")
    if installed("stamina"):
        import stamina

        again = stamina.retry(on=ConnectionError, attempts=4)
        yield "stamina over purgatory", lambda work: again(guard("both")(work))


def _aiobreaker(kind: str) -> Iterator[tuple[str, Wrapper]]:
    from aiobreaker import CircuitBreaker

    yield "aiobreaker", CircuitBreaker()
    if installed("tenacity"):
        import tenacity

        again = tenacity.retry(stop=tenacity.stop_after_attempt(4))
        yield "tenacity over aiobreaker", lambda work: again(CircuitBreaker()(work))


def _pybreaker(kind: str) -> Iterator[tuple[str, Wrapper]]:
    if kind == "sync":  # its async form is tornado's
        from pybreaker import CircuitBreaker

        yield "pybreaker", CircuitBreaker()


def _backoff(kind: str) -> Iterator[tuple[str, Wrapper]]:
    import backoff

    yield "backoff", backoff.on_exception(backoff.expo, ConnectionError, max_tries=4)


def _stamina(kind: str) -> Iterator[tuple[str, Wrapper]]:
    import stamina

    yield "stamina", stamina.retry(on=ConnectionError, attempts=4)


def _tenacity(kind: str) -> Iterator[tuple[str, Wrapper]]:
    import tenacity

    yield "tenacity", tenacity.retry(stop=tenacity.stop_after_attempt(4))


CONTENDERS = {
    "retrysafe": _retrysafe,
    "nopanic": _nopanic,
    "pyresilience": _pyresilience,
    "circuitbreaker": _circuitbreaker,
    "purgatory": _purgatory,
    "aiobreaker": _aiobreaker,
    "pybreaker": _pybreaker,
    "backoff": _backoff,
    "stamina": _stamina,
    "tenacity": _tenacity,
}


def _wrapped(kind: str, work: Any) -> dict[str, Any]:
    found = {"bare": work}
    for module, wrappers in CONTENDERS.items():
        if installed(module):
            found.update((name, wrapper(work)) for name, wrapper in wrappers(kind))
    return found


def _time(function: Callable[[int], object], calls: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(calls):
        function(1)
    return (time.perf_counter_ns() - began) / calls


async def _atime(function: Callable[[int], Awaitable[object]], calls: int) -> float:
    began = time.perf_counter_ns()
    for _ in range(calls):
        await function(1)
    return (time.perf_counter_ns() - began) / calls


def run(rounds: int, calls: int) -> Seen:
    """In a process of its own. All take turns within a round; the first one warms up."""
    logging.disable()  # what some of them log is not what is measured
    sync, seen = _wrapped("sync", _plain), Seen()

    def note(kind: str, name: str, value: float) -> None:
        seen.setdefault(kind, {}).setdefault(name, []).append(value)

    async def main() -> None:
        other = _wrapped("async", _aplain)
        for number in range(rounds + 1):
            for name, function in sync.items():
                value = _time(function, calls)
                if number:
                    note("sync", name, value)
            for name, function in other.items():
                value = await _atime(function, calls)
                if number:
                    note("async", name, value)

    asyncio.run(main())
    return seen


def report(seen: Seen, results: Results) -> None:
    for kind, found in seen.items():
        for name, values in found.items():
            results.add(PARTS[kind], name, "ns", values)
            results.add(PARTS[kind], name, "ratio to bare", ratio(values, found["bare"]))


def cheapest_stack(results: Results, kind: str) -> list[float]:
    """Round by round, the cheapest of the others' retries over a breaker; empty without any."""
    rows = [
        figure.values
        for figure in results.figures
        if figure.part == PARTS[kind]
        and figure.column == "ns"
        and STACK in figure.row
        and figure.row != OURS
    ]
    return [min(values) for values in zip(*rows, strict=True)]
