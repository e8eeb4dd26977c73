"""The figures that this project promises itself, drawn from those of the run."""

from __future__ import annotations

from benchmarks import memory, over_http, scale, waiters, wrappers
from benchmarks.figures import GOALS, Results, ratio


def report(results: Results) -> None:
    """Each goal whose figures were measured. They inform; nothing fails by them."""
    http, added = over_http.PART, over_http.ADDED
    cpu, rate = over_http.CPU, over_http.RATE
    functions = {n: f"functions: async, {n} task{'s' if n > 1 else ''}" for n in (64, 1)}
    ours, peer = "retrysafe, fresh", "idemkit, fresh"
    for name, goal, over, under in (
        ("fresh: idemkit's added CPU ÷ ours", "≥ 8", (http, peer, added), (http, ours, added)),
        ("fresh: our rate ÷ idemkit's", "≥ 3", (http, ours, rate), (http, peer, rate)),
        (
            "replay: our rate ÷ idemkit's",
            "≥ 3.5",
            (http, "retrysafe, replay", rate),
            (http, "idemkit, replay", rate),
        ),
        (
            "replay: our CPU ÷ the empty app's",
            "≤ 1",
            (http, "retrysafe, replay", cpu),
            (http, over_http.EMPTY, cpu),
        ),
        *(
            (
                f"async function, {n} task{'s' if n > 1 else ''}: our rate ÷ idemkit's",
                f"≥ {goal}",
                (part, ours, "calls/s"),
                (part, peer, "calls/s"),
            )
            for (n, part), goal in zip(functions.items(), (8, 2), strict=True)
        ),
        (
            "sync function: our rate ÷ aws-lambda-powertools'",
            "≥ 1.5",
            ("functions: sync, one thread", ours, "calls/s"),
            ("functions: sync, one thread", "aws-lambda-powertools, fresh", "calls/s"),
        ),
    ):
        top, bottom = results.values(*over), results.values(*under)
        if top and bottom:
            results.add(GOALS, name, "measured", ratio(top, bottom))
            results.note(GOALS, name, goal)
    for kind, part in wrappers.PARTS.items():
        ours_ns = results.values(part, wrappers.OURS, "ns")
        cheapest = wrappers.cheapest_stack(results, kind)
        if ours_ns and cheapest:
            name = f"{kind} retry over breaker: ours ÷ the others' cheapest"
            results.add(GOALS, name, "measured", ratio(ours_ns, cheapest))
            results.note(GOALS, name, "≤ 1")
    for name, goal, figure in (
        ("sync retry over breaker, ns", "≤ 2,000", (wrappers.SYNC, wrappers.OURS, "ns")),
        (
            "duplicates over HTTP: last answer, ms",
            "≤ 15 for 200",
            (waiters.HTTP, "retrysafe", "last answer after the finish, ms"),
        ),
        ("duplicates over HTTP: commands", "≤ 10", (waiters.HTTP, "retrysafe", "commands")),
        ("duplicates over HTTP: connections", "≤ 2", (waiters.HTTP, "retrysafe", "connections")),
        (
            "5,000 in one process ÷ 5,000 futures",
            "≤ 3",
            (waiters.LOCAL, "retrysafe, 5,000", "ratio"),
        ),
        (
            "rate of fresh calls with 10⁶ records ÷ with 10³",
            "≥ 0.9",
            (scale.KEYS_PART, "retrysafe, 1,000,000", "rate ÷ that at 1,000"),
        ),
        ("import retrysafe, ms", "≤ 60", (scale.IMPORTS_PART, "retrysafe, after them", "ms")),
        ("bytes per finished record", "≤ 600", (memory.PART, "retrysafe", "bytes")),
    ):
        if values := results.values(*figure):
            results.add(GOALS, name, "measured", values)
            results.note(GOALS, name, goal)
