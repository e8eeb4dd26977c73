"""Half an hour of faults, and what has grown: `python -m tests.faults.soak --minutes 30`."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

from tests.faults.soak.figures import compare, table
from tests.faults.soak.soak import Report, Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults, after the warm-up")
    parser.add_argument("--seed", type=int, help="the first round's; drawn, if not given")
    parser.add_argument("--warm", type=int, default=12, help="rounds before the first figures")
    parser.add_argument("--steady", type=int, default=8, help="rounds without faults at the end")
    parser.add_argument("--out", type=Path, default=Path("soak-out"), help="samples, broken rounds")
    asked = parser.parse_args()
    asked.out = asked.out.resolve()  # the workers' own directory is another
    seed = random.randrange(1_000_000) if asked.seed is None else asked.seed
    print(f"seed {seed}, samples in {asked.out}/samples.jsonl", flush=True)
    end: list[float] = []

    def more() -> bool:
        if not end:
            end.append(time.monotonic() + 60 * asked.minutes)
        return time.monotonic() < end[0]

    def tell(report: Report) -> None:
        if report.rounds % 10 == 0:
            left = max(0.0, end[0] - time.monotonic()) / 60
            print(
                f"{report.rounds} rounds, {report.calls} calls, {report.faults.total()} faults, "
                f"{len(report.broken)} broken, {left:.1f} minutes left",
                flush=True,
            )

    report = asyncio.run(Soak(asked.out, seed).run(asked.warm, more, asked.steady, tell))
    return finish(report)


def finish(report: Report) -> int:
    """Print the figures; the exit status."""
    figures = compare(report.before, report.after)
    print(table(figures))
    print(f"{report.rounds} rounds, {report.calls} calls")
    print("faults:", ", ".join(f"{name} {n}" for name, n in sorted(report.faults.items())))
    print("ended:", ", ".join(f"{name} {n}" for name, n in sorted(report.counts.items())))
    for line in report.broken:
        print(line)
    grew = [f"{each.of} {each.name}" for each in figures if each.grew]
    print("grew:", ", ".join(grew) or "nothing")
    return 1 if grew or report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
