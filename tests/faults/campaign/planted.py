"""Plans that make the deliberate bugs show, every time: few calls, the faults at fixed moments."""

from __future__ import annotations

import itertools

from tests.faults.campaign.plan import Asked, Fault, Plan

DOORS = ("http", "async")


def plan_for(bug: str, seed: int = 0) -> Plan:
    """The plan in which a worker with this bug breaks an invariant, and one without it none."""
    calls, faults, probes = {
        "no-fencing": _late_finish,
        "publish-before-record": _death_between,
        "forgotten-inbox": _waiting,
        "double-release": _probing,
    }[bug](seed)
    calls = tuple(sorted(calls, key=lambda each: each.at))
    return Plan(seed, 2, True, calls, probes, faults, bug=bug)


Parts = tuple[tuple[Asked, ...], tuple[Fault, ...], tuple[tuple[float, int, bool], ...]]


def _ask(at: float, worker: int, key: str, seconds: float, door: str = "http") -> Asked:
    return Asked(at, worker, door, "alice", f"planted-{key}", "a", seconds)


def _late_finish(seed: int) -> Parts:
    """An owner is paused for two leases, another takes over and finishes, the first wakes up."""
    calls = [
        _ask(at, worker, f"{seed}-{door}", seconds, door)
        for door in DOORS
        for at, worker, seconds in (
            (0.0, 0, 0.8),
            (0.5, 1, 0.1),
            (1.9, 1, 0.1),
            (3.6, 1, 0.1),
        )
    ]
    return tuple(calls), (Fault("pause", 0.3, 2.0, 0),), ()


def _death_between(seed: int) -> Parts:
    """An owner dies after its waiters were told and before its result was recorded."""
    calls = [
        _ask(at, worker, f"{seed}-{number}-{door}", seconds, door)
        for number in range(3)
        for door in DOORS
        for at, worker, seconds in (
            (0.05 * number, 0, 0.5),
            (0.1 + 0.05 * number, 1, 0.1),
            (2.5, 1, 0.1),
        )
    ]
    return tuple(calls), (Fault("kill", 1.1, 0.0, 0),), ()


def _waiting(seed: int) -> Parts:
    """A duplicate waits in another process for a result that comes soon."""
    doors = (*DOORS, "sync")
    calls = [
        _ask(at, worker, f"{seed}-{door}", 0.4, door)
        for door in doors
        for at, worker in ((0.0, 0), (0.2, 1))
    ]
    return tuple(calls), (), ()


def _probing(seed: int) -> Parts:
    """A crowd at a breaker that has just opened: every probe fails, and opens it again."""
    moments = itertools.count()
    probes = tuple((0.02 * next(moments), worker, True) for _ in range(40) for worker in (0, 1))
    return (_ask(0.0, 0, f"{seed}-idle", 0.0),), (), probes
