"""The short form of the fault campaign, and the proof that its checker finds bugs.

The long form: `python -m tests.faults.campaign`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign.bugs import BUGS
from tests.faults.campaign.campaign import Outcome, attempt, campaign, describe, shrink
from tests.faults.campaign.plan import FAULTS, Fault, from_seed
from tests.faults.campaign.planted import plan_for
from tests.support import run

pytestmark = pytest.mark.slow

# Between them every fault there is, alone or in a pair.
SEEDS = (3, 6, 7, 8, 9, 18, 20, 25, 36, 58, 61, 69, 248, 251)
# A primary is replaced while a worker is told to go, and while one is stopped.
REPLACED = {"sentinel": 21, "cluster": 10}

CAUGHT_AS = {
    "no-fencing": {"fenced", "same-answer"},
    "publish-before-record": {"same-answer", "fenced"},
    "forgotten-inbox": {"waiters-end"},
    "double-release": {"one-probe"},
}


def told(outcomes: list[Outcome]) -> str:
    return "\n".join(describe(outcome) for outcome in outcomes if outcome.broken)


def test_no_seeds_faults_break_an_invariant(tmp_path: Path) -> None:
    plans = [from_seed(seed) for seed in SEEDS]
    outcomes = run(campaign(plans, tmp_path, parallel=3), limit=110)
    assert not told(outcomes), told(outcomes)
    assert len(outcomes) == len(plans)
    assert all(outcome.run.calls for outcome in outcomes)


@pytest.mark.parametrize("kind", REPLACED)
def test_no_replaced_primary_breaks_an_invariant(kind: str, tmp_path: Path) -> None:
    outcome = run(attempt(from_seed(REPLACED[kind], kind=kind), tmp_path), limit=110)
    assert not outcome.broken, describe(outcome)
    assert outcome.run.calls


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Outcome]:
    """The outcome of a bug's plan, with the bug and without it."""
    bugged = [plan_for(bug, seed) for seed, bug in enumerate(BUGS)]
    sound = [dataclasses.replace(plan, bug="") for plan in bugged]
    out = tmp_path_factory.mktemp("planted")
    outcomes = run(campaign([*bugged, *sound], out, parallel=4), limit=110)
    by_seed = {(each.plan.seed, bool(each.plan.bug)): each for each in outcomes}
    return lambda bug, present: by_seed[BUGS.index(bug), present]


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, planted: Callable[[str, bool], Outcome]) -> None:
    """And the same plan without the bug breaks nothing: it is the bug that was found."""
    assert not planted(bug, False).broken, describe(planted(bug, False))
    found = {each.invariant for each in planted(bug, True).broken}
    assert found & CAUGHT_AS[bug], describe(planted(bug, True))


def test_a_failure_is_made_small(tmp_path: Path) -> None:
    """Given three faults of which one lets the bug show, then that one is left."""
    plan = plan_for("no-fencing", seed=9)
    (needed,) = plan.faults
    idle = (Fault("step-clock", 0.2, 0.0, 1), Fault("flush-scripts", 1.0, 0.0))
    plan = dataclasses.replace(plan, faults=(idle[0], needed, idle[1]))

    async def main() -> Outcome:
        found = await attempt(plan, tmp_path / "whole")
        assert found.broken
        return await shrink(found, tmp_path)

    smallest = run(main(), limit=110)
    assert smallest.plan.faults == (needed,), describe(smallest)
    assert {each.invariant for each in smallest.broken} & CAUGHT_AS["no-fencing"]


def test_the_short_forms_seeds_have_every_fault() -> None:
    assert {fault.name for seed in SEEDS for fault in from_seed(seed).faults} == set(FAULTS)


def test_a_seed_is_the_same_plan_each_time() -> None:
    assert from_seed(5) == from_seed(5)
    assert from_seed(5) != from_seed(6)
