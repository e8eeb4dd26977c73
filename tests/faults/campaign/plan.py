"""A run from a seed: the calls, and the faults on their way."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

from tests.faults.campaign.history import Rules

RULES = Rules(lease=1.0, wait=5.0, permit_lease=1.0, probes=1)
DOORS = ("http", "http", "http", "async", "async", "sync", "sync", "fork")
LOAD = 3.5  # seconds in which the calls are made

WORKER_FAULTS = ("kill", "pause", "block", "terminate", "step-clock")
SERVER_FAULTS = (
    "restart",
    "flush-scripts",
    "kill-clients",
    "kill-subscribers",
    "pause-clients",
    "out-of-memory",
    "evict",
    "sleep",
    "stop",
    "max-clients",
    "read-only",
)
PROXY_FAULTS = (
    "cut",
    "lose-replies",
    "cut-commands",
    "half-command",
    "half-reply",
    "black-hole",
    "deaf",
    "mute",
    "delay",
    "down",
)
FAULTS = (*WORKER_FAULTS, *SERVER_FAULTS, *PROXY_FAULTS)
# Of several servers. `fail-over`: a primary is killed and another one takes its place.
# `hang-over`: it stops until it was replaced, and wakes up as one that doesn't know of it.
NODE_FAULTS = ("fail-over", "hang-over", "flush-scripts", "kill-clients")
KINDS = ("single", "sentinel", "cluster")

# These last for a moment, whatever else they do.
INSTANT = {
    "step-clock",
    "flush-scripts",
    "kill-clients",
    "kill-subscribers",
    "evict",
    "cut",
    "lose-replies",
    "cut-commands",
    "half-command",
    "half-reply",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`at` and `seconds` from the start of the load; `worker` is a number, -1 for the server."""

    name: str
    at: float
    seconds: float
    worker: int = -1


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that will be made. If it becomes the one that does the work, it takes `seconds` and,
    with `fails`, raises. `leaves`: the client hangs up after so long."""

    at: float
    worker: int
    door: str
    scope: str
    key: str
    variant: str
    seconds: float
    fails: bool = False
    leaves: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    workers: int
    lasting: bool  # the server keeps its data over a restart
    calls: tuple[Asked, ...]
    probes: tuple[tuple[float, int, bool], ...]  # when, at which worker, whether the call fails
    faults: tuple[Fault, ...]
    rules: Rules = RULES
    bug: str = ""
    kind: str = "single"
    most_faults: int = 2  # that the seed was drawn with
    replicas: int = 0  # that must hold a receipt (RETRYSAFE_REPLICAS)
    ttl: str = "10m"  # of receipts and results (RETRYSAFE_TTL)

    def without(self, number: int) -> Plan:
        faults = self.faults[:number] + self.faults[number + 1 :]
        return dataclasses.replace(self, faults=faults)


def from_seed(seed: int, keys: int = 16, most_faults: int = 2, kind: str = "single") -> Plan:
    """The plan of a seed: always the same one."""
    draw = random.Random(f"campaign {seed}" + ("" if kind == "single" else f" {kind}"))
    workers = draw.choice((2, 2, 3))
    calls: list[Asked] = []
    for number in range(keys):
        calls += _calls_of(draw, seed, number, workers)
    calls.sort(key=lambda each: each.at)
    probes = tuple(
        sorted(
            (draw.uniform(0.1, LOAD), draw.randrange(workers), draw.random() < 0.7)
            for _ in range(50)
        )
    )
    many = draw.randint(1, most_faults)
    names = FAULTS if kind == "single" else (*WORKER_FAULTS, *NODE_FAULTS, *NODE_FAULTS)
    faults = tuple(_fault(draw, name, workers) for name in draw.choices(names, k=many))
    lasting = draw.random() < 0.5
    replicas = draw.choice((0, 1)) if kind == "sentinel" else 0
    return Plan(
        seed,
        workers,
        lasting,
        tuple(calls),
        probes,
        faults,
        kind=kind,
        most_faults=most_faults,
        replicas=replicas,
    )


def _calls_of(draw: random.Random, seed: int, number: int, workers: int) -> list[Asked]:
    """One key's calls: a burst, and some later; two scopes; now and then another payload."""
    door = draw.choice(DOORS)
    first = draw.uniform(0.0, LOAD * 0.7)
    work = draw.choice((0.02, 0.2, 0.6, 1.6))
    failing = draw.random() < 0.15
    made: list[Asked] = []
    for scope in ("alice", "bob")[: draw.choice((1, 1, 2))]:
        for copy in range(draw.randint(4, 8)):
            at = first + draw.choice((0.0, draw.uniform(0, 0.3), draw.uniform(0, LOAD - first)))
            made.append(
                Asked(
                    at=at,
                    worker=draw.randrange(workers),
                    door=door,
                    scope=scope,
                    key=f"s{seed}-k{number}",
                    variant="b" if copy and draw.random() < 0.1 else "a",
                    seconds=work,
                    fails=failing and draw.random() < 0.3,
                    leaves=draw.uniform(0.02, 0.8) if draw.random() < 0.08 else None,
                )
            )
    return made


def _fault(draw: random.Random, name: str, workers: int) -> Fault:
    long = draw.random() < 0.7
    seconds = draw.uniform(1.4, 2.4) if long else draw.uniform(0.1, 0.3)
    if name in ("kill", "terminate"):
        seconds = draw.uniform(0.1, 1.0)  # until it is started again
    if name in INSTANT:
        seconds = 0.0
    worker = -1 if name in (*SERVER_FAULTS, *NODE_FAULTS) else draw.randrange(workers)
    return Fault(name, draw.uniform(0.2, LOAD), seconds, worker)
