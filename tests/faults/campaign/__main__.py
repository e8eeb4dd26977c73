"""The long form: `python -m tests.faults.campaign --seeds 100 --minutes 20 --out DIR`."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.faults.campaign.campaign import Outcome, campaign, describe, shrink
from tests.faults.campaign.plan import KINDS, from_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="how many plans")
    parser.add_argument("--seed", type=int, help="the first one; drawn, and printed, if not given")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin none after so long")
    parser.add_argument(
        "--out", type=Path, default=Path("campaign-out"), help="what broke goes here"
    )
    parser.add_argument("--parallel", type=int, default=2, help="plans at a time")
    parser.add_argument("--faults", type=int, default=2, help="at most so many in a plan")
    parser.add_argument("--kind", choices=KINDS, default="single", help="of server")
    parser.add_argument("--no-shrink", action="store_true")
    asked = parser.parse_args()
    asked.out = asked.out.resolve()  # the workers' own directory is another
    first = random.randrange(1_000_000) if asked.seed is None else asked.seed
    print(f"seeds {first} to {first + asked.seeds - 1}", flush=True)
    plans = [
        from_seed(first + n, most_faults=asked.faults, kind=asked.kind) for n in range(asked.seeds)
    ]
    end = time.monotonic() + 60 * asked.minutes
    done = Counter[str]()

    def tell(outcome: Outcome) -> None:
        done.update(fault.name for fault in outcome.plan.faults)
        names = ", ".join(fault.name for fault in outcome.plan.faults)
        counts = Counter(seen.kind for seen in outcome.run.calls)
        said = "BROKEN" if outcome.broken else "held"
        print(f"{outcome.plan.seed} {said} [{names}] {dict(counts)}", flush=True)
        if outcome.broken:
            print(describe(outcome), flush=True)

    outcomes = asyncio.run(
        campaign(plans, asked.out, asked.parallel, lambda: time.monotonic() < end, tell)
    )
    broken = [outcome for outcome in outcomes if outcome.broken]
    calls = sum(len(outcome.run.calls) for outcome in outcomes)
    print(f"{len(outcomes)} plans, {calls} calls, {len(broken)} plans broke an invariant")
    print("faults:", ", ".join(f"{name} {count}" for name, count in sorted(done.items())))
    for outcome in broken if not asked.no_shrink else ():
        smallest = asyncio.run(shrink(outcome, asked.out / f"seed-{outcome.plan.seed}"))
        print("the smallest plan that still breaks it:")
        print(describe(smallest), flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
