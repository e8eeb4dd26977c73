"""Many seeds: each performed and checked; a failure is made small and told so that it can be run
again."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.campaign.checker import Broken, check
from tests.faults.campaign.drive import perform
from tests.faults.campaign.history import Run
from tests.faults.campaign.plan import Plan

COMMAND = "python -m tests.faults.campaign --seeds 1 --seed"


@dataclass(slots=True)
class Outcome:
    plan: Plan
    run: Run
    broken: list[Broken] = field(default_factory=list)


async def attempt(plan: Plan, out: Path) -> Outcome:
    """Perform a plan and check it. Its history stays in `out` where something broke."""
    _empty(out)
    run = await perform(plan, out)
    outcome = Outcome(plan, run, check(run))
    if outcome.broken:
        run.save(out / "run.json")
    return outcome


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


async def shrink(outcome: Outcome, out: Path, tries: int = 2) -> Outcome:
    """Drop one fault at a time while the same invariant still breaks: the smallest that did.

    Faults meet the load at another moment in each run, so each smaller plan gets several tries.
    """
    names = {each.invariant for each in outcome.broken}
    smallest = outcome
    number = 0
    while number < len(smallest.plan.faults):
        for again in range(tries):
            smaller = await attempt(smallest.plan.without(number), out / f"shrink-{number}-{again}")
            if names & {each.invariant for each in smaller.broken}:
                smallest, number = smaller, -1
                break
        number += 1
    return smallest


def describe(outcome: Outcome) -> str:
    """What a person needs: the seed, the faults, what broke, how to see it again."""
    plan = outcome.plan
    lines = [
        f"seed {plan.seed}: {len(outcome.broken)} broken"
        + (f" (planted: {plan.bug})" if plan.bug else ""),
        f"  {plan.workers} workers, {plan.kind}, the server "
        f"{'keeps' if plan.lasting else 'forgets'} its data, {plan.replicas} replicas confirm",
        *(f"  fault {dataclasses.asdict(fault)}" for fault in plan.faults),
        *(f"  {line}" for each in outcome.broken for line in str(each).splitlines()),
        f"  again: {COMMAND} {plan.seed} --kind {plan.kind} --faults {plan.most_faults}",
    ]
    return "\n".join(lines)


async def campaign(
    plans: list[Plan],
    out: Path,
    parallel: int,
    more: Callable[[], bool] = lambda: True,
    tell: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Perform plans, a few at a time, as long as `more` says so."""
    outcomes: list[Outcome] = []
    waiting = iter(plans)

    async def work() -> None:
        for plan in waiting:
            if not more():
                return
            outcome = await attempt(plan, out / f"seed-{plan.seed}{plan.bug and '-'}{plan.bug}")
            if not outcome.broken:
                shutil.rmtree(out / f"seed-{plan.seed}", ignore_errors=True)
            outcomes.append(outcome)
            tell(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(parallel):
            group.create_task(work())
    return outcomes
