"""Rounds of the campaign on one stage: each is checked as there, and the processes live on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.faults.campaign.checker import check
from tests.faults.campaign.drive import Driver
from tests.faults.campaign.history import Run
from tests.faults.campaign.plan import LOAD, Asked, Plan, from_seed
from tests.faults.campaign.stage import Stage, Worker
from tests.faults.soak.figures import Sample, server_figures
from tests.faults.soak.side import Side

WORKERS = 3
BURST = 80  # calls at once: more than a worker has threads or connections
JOBS, SAGAS = 8, 4  # in a round


@dataclass(slots=True)
class Report:
    """What came of it."""

    before: Sample
    after: Sample
    rounds: int = 0
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


class Soak:
    """`ttl`: seconds that receipts last; the samples are taken when all of them have gone, or,
    where `wipe` says so, when the harness has deleted them."""

    def __init__(
        self, out: Path, seed: int, *, ttl: int = 45, wipe: bool = False, keys: int = 16
    ) -> None:
        self._out, self._seed = out, seed
        self._ttl, self._wipe, self._keys = ttl, wipe, keys
        self._stage: Stage
        self.report = Report({}, {})

    async def run(
        self,
        warm: int,
        more: Callable[[], bool],
        steady: int,
        tell: Callable[[Report], None] = lambda report: None,
    ) -> Report:
        """`warm` rounds with faults, the figures; rounds with faults for as long as `more` says
        so; `steady` rounds without, the figures."""
        self._out.mkdir(parents=True, exist_ok=True)
        self._stage = await asyncio.to_thread(Stage, self._plan(faults=True), self._out)
        try:
            await self._stage.open()
            for _ in range(warm):
                await self._round(faults=True)
            await self._burst()  # as before the last figures: full pools are put beside full ones
            self.report.before = await self._at_rest()
            self._write("before", self.report.before)
            sampling = asyncio.create_task(self._sample_on())
            while more():
                await self._round(faults=True)
                tell(self.report)
            for _ in range(steady):
                await self._round(faults=False)
            sampling.cancel()
            await self._burst()
            self.report.after = await self._at_rest()
            self._write("after", self.report.after)
        finally:
            await asyncio.to_thread(self._stage.close)
        return self.report

    def _plan(self, faults: bool) -> Plan:
        """The next seed's. Only the last worker is killed: the others are to live on."""
        plan = from_seed(self._seed + self.report.rounds, self._keys)
        moved = tuple(
            dataclasses.replace(each, worker=WORKERS - 1)
            if each.name in ("kill", "terminate")
            else each
            for each in plan.faults
        )
        return dataclasses.replace(
            plan,
            workers=WORKERS,
            lasting=True,
            faults=moved if faults else (),
            ttl=f"{self._ttl}s",
        )

    async def _round(self, faults: bool) -> None:
        plan, stage, report = self._plan(faults), self._stage, self.report
        # What the workers wrote of the last round has been read.
        os.truncate(self._out / "effects.jsonl", 0)
        recent = time.monotonic() - 10
        stage.disturbances = [each for each in stage.disturbances if recent < each.until < 1e12]
        side = Side(stage, plan.seed, JOBS, SAGAS, LOAD)
        beside = asyncio.create_task(side.run())
        run = await Driver(plan, stage).run(self._out)
        await beside
        side.judge()
        _only_this_round(run)
        broken = check(run)
        if broken:
            run.save(self._out / f"round-{plan.seed}.json")
        report.broken += [f"seed {plan.seed}: {each}" for each in (*broken, *side.broken)]
        report.rounds += 1
        report.calls += len(run.calls)
        report.faults.update(fault.name for fault in plan.faults)
        report.counts += side.counts
        report.counts.update(seen.kind for seen in run.calls)

    async def _burst(self) -> None:
        """Each worker's threads and connections, all of them at once."""
        driver = Driver(self._plan(faults=False), self._stage)
        async with driver.session(), asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                for number in range(BURST):
                    for door in ("sync", "http"):
                        key = f"burst-{time.monotonic_ns()}-{number}"
                        asked = Asked(0.0, worker, door, "alice", key, "a", 0.5)
                        group.create_task(driver.call(asked))

    # Figures

    async def _at_rest(self) -> Sample:
        """The figures when nothing is asked of anyone and what lay in the store has expired."""
        await self._recover()
        self._clear()
        end = time.monotonic() + self._ttl + 20
        last: Sample = {}
        while time.monotonic() < end:
            await asyncio.sleep(1.0)
            found = await self._figures(collect=True)
            # Reconnects, polls and expiries have ended when nothing moves any more.
            kept = found["server"]["keys"] > 0
            if last and not kept and _counts(found) == _counts(last):
                return found
            last = found
        return last

    async def _recover(self) -> None:
        """No saga is left, unless it can't come to an end."""
        end = time.monotonic() + 30
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            while True:
                answers = [await client.post(f"{each.base}/sagas") for each in self._stage.workers]
                if all(each.json() == {"left": []} for each in answers):
                    return
                if time.monotonic() > end:
                    self.report.broken.append(f"sagas are left: {[a.text for a in answers]}")
                    return
                await asyncio.sleep(0.3)

    def _clear(self) -> None:
        """The breaker's keys outlive a soak, and so do sagas that wait for a person, which an
        eviction may have taken off their list; the rest is deleted only where time is short."""
        control = self._stage.control
        for key in control.scan_iter("*"):
            waits = b":saga" in key and control.pttl(key) > 1000 * self._ttl
            if self._wipe or b":b:{" in key or waits:
                control.delete(key)

    async def _figures(self, collect: bool = False) -> Sample:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            asked = [self._of(client, each, collect) for each in self._stage.workers]
            found: Sample = dict(
                zip(_names(self._stage), await asyncio.gather(*asked), strict=True)
            )
        found["server"] = await asyncio.to_thread(server_figures, self._stage.control)
        return found

    async def _of(self, client: httpx.AsyncClient, worker: Worker, collect: bool) -> dict[str, int]:
        params = {"collect": "1"} if collect else {}
        found: dict[str, int] = (
            await client.get(
                f"{worker.base}/figures", params=params, headers={"connection": "close"}
            )
        ).json()
        return found

    async def _sample_on(self) -> None:
        while True:
            await asyncio.sleep(5)
            try:
                self._write("", await self._figures())
            except (httpx.HTTPError, OSError):
                continue  # one of them stands still just now
            except Exception as error:  # a server that is away
                if not type(error).__module__.startswith("redis."):
                    raise

    def _write(self, word: str, found: Sample) -> None:
        with (self._out / "samples.jsonl").open("a") as file:
            line = {"at": time.time(), "word": word, "rounds": self.report.rounds, **found}
            file.write(json.dumps(line) + "\n")


def _names(stage: Stage) -> list[str]:
    return [worker.name for worker in stage.workers]


def _counts(found: Sample) -> list[tuple[str, int]]:
    return [
        (name, value)
        for each in found.values()
        for name, value in each.items()
        if name not in ("rss", "blocks", "memory")
    ]


def _only_this_round(run: Run) -> None:
    """Ends whose starts were in an earlier round's file say nothing here; and what the server
    holds of all rounds is looked at in the end."""
    started = {each.execution for each in run.effects if each.what == "start"}
    probes = {each.execution for each in run.effects if each.what == "probe-start"}
    run.effects = [
        each
        for each in run.effects
        if not (each.what == "end" and each.execution not in started)
        and not (each.what == "probe-end" and each.execution not in probes)
    ]
    run.receipts = run.other_keys = 0
