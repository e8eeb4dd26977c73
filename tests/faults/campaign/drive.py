"""Carries a plan out and writes down what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from tests.faults.campaign import effects, faults
from tests.faults.campaign.history import Run, Seen
from tests.faults.campaign.plan import DOORS, Asked, Fault, Plan
from tests.faults.campaign.stage import Stage, Worker

PATIENCE = 25.0
CLEAN_WITHIN = 8.0
_PROBLEM = "urn:retrysafe:problem:"
_BEAT = 0.02
_LAG = 0.1
# What every worker may have more of at the end than at the start: its pools.
_ROOM = {"tasks": 8, "threads": 72, "files": 90}


async def perform(plan: Plan, out: Path) -> Run:
    """Run a plan on processes of its own; `out` gets the workers' logs."""
    stage = await asyncio.to_thread(Stage, plan, out)
    try:
        await stage.open()
        return await Driver(plan, stage).run(out)
    finally:
        await asyncio.to_thread(stage.close)


class Driver:
    """Carries one plan out on a stage that is open."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self._plan = plan
        self._stage = stage
        self._result = Run(plan.seed, plan.rules)
        self._names = itertools.count()
        self._server_fault = asyncio.Lock()
        self._client: httpx.AsyncClient

    async def run(self, out: Path) -> Run:
        result, stage, plan = self._result, self._stage, self._plan
        beats = asyncio.create_task(self._beats())
        async with self.session():
            await self._warm_up()
        before = [await self._gauges(worker) for worker in stage.workers]
        self._begin = time.monotonic()
        async with self.session(), asyncio.TaskGroup() as group:
            for asked in plan.calls:
                group.create_task(self._timed(asked))
            for at, worker, fails in plan.probes:
                group.create_task(self._probe(at, stage.workers[worker], fails))
            for fault in plan.faults:
                group.create_task(self._fault(fault))
        await self._heal()
        async with self.session():
            await self._settle()
        await self._look_behind(before)
        beats.cancel()
        result.disturbances += stage.disturbances
        result.effects = effects.read(out / "effects.jsonl")
        return result

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        # No keep-alive: a connection of a worker that is gone would be an error of ours.
        headers = {"connection": "close"}
        async with httpx.AsyncClient(
            limits=limits, timeout=PATIENCE, headers=headers, trust_env=False
        ) as self._client:
            yield

    async def _beats(self) -> None:
        """The clients and proxies live in this process: when it doesn't run, nobody is served."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_BEAT)
            now = time.monotonic()
            if now - last > _BEAT + _LAG:
                self._stage.disturb("store", "harness-lag", last, now)
                self._stage.disturb("process", "harness-lag", last, now)
            last = now

    async def _until(self, at: float) -> None:
        await asyncio.sleep(self._begin + at - time.monotonic())

    # Calls

    async def _warm_up(self) -> None:
        """Every door once, with a duplicate, so that pools and subscriptions stand."""
        async with asyncio.TaskGroup() as group:
            for worker in self._stage.workers:
                for door in sorted(set(DOORS)):
                    key = f"s{self._plan.seed}-warm-{door}"
                    asked = Asked(0.0, worker.number, door, "alice", key, "a", 0.2)
                    for _ in range(2):
                        group.create_task(self.call(asked))

    async def _timed(self, asked: Asked) -> None:
        await self._until(asked.at)
        if asked.leaves is None:
            await self.call(asked)
            return
        call = f"c{next(self._names)}"
        sent = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(asked.leaves):
                await self.call(asked, call=call)
                return
        self._note(asked, call, sent, kind="left")

    def _note(self, asked: Asked, call: str, sent: float, **facts: Any) -> None:
        key = f"{asked.door}|{asked.scope}|{asked.key}"
        worker = self._stage.workers[asked.worker].name
        now = time.monotonic()
        seen = Seen(call, worker, asked.door, key, asked.variant, sent, now, **facts)
        self._result.calls.append(seen)

    async def call(self, asked: Asked, settling: bool = False, call: str = "") -> Seen | None:
        worker = self._stage.workers[asked.worker]
        call = call or f"c{next(self._names)}"
        path = "/orders" if asked.door == "http" else f"/functions/{asked.door}"
        headers = {"x-call": call, "x-seconds": str(asked.seconds), "authorization": asked.scope}
        headers["idempotency-key"] = asked.key
        if asked.fails:
            headers["x-fails"] = "1"
        body = {"key": asked.key, "variant": asked.variant}
        sent = time.monotonic()
        facts: dict[str, Any] = {"settling": settling}
        try:
            answer = await self._client.post(f"{worker.base}{path}", json=body, headers=headers)
        except httpx.TimeoutException:
            facts["kind"] = "hung"
        except httpx.TransportError as error:
            facts |= {"kind": "broken", "word": type(error).__name__}
        else:
            facts |= _read(answer)
        self._note(asked, call, sent, **facts)
        return self._result.calls[-1]

    async def _probe(self, at: float, worker: Worker, fails: bool) -> None:
        await self._until(at)
        with contextlib.suppress(httpx.TransportError):
            await self._client.post(f"{worker.base}/probe", params={"fails": "1"} if fails else {})

    # Faults

    async def _fault(self, fault: Fault) -> None:
        await self._until(fault.at)
        if fault.worker < 0:
            async with self._server_fault:
                await faults.do(self._stage, fault)
        else:
            await faults.do(self._stage, fault)

    async def _heal(self) -> None:
        """Undo what waits for traffic, and wait until every worker is there."""
        for proxy in self._stage.proxies:
            proxy.forgive()
        for worker in self._stage.workers:
            if not worker.alive:
                worker.start()
            await worker.ready()
        if self._stage.replaced:
            await asyncio.sleep(faults.FOUND)
        await asyncio.sleep(0.3)  # reconnects, at most so long apart when a server serves again

    # Afterwards

    async def _settle(self) -> None:
        """Ask every key once more at every worker: now nothing stands in the way."""
        right: dict[str, Asked] = {}
        for asked in self._plan.calls:
            right.setdefault(f"{asked.door}|{asked.scope}|{asked.key}|{asked.variant}", asked)
        chosen: dict[str, str] = {}
        for seen in sorted(self._result.calls, key=lambda seen: seen.ended):
            if seen.kind == "answer" or seen.key not in chosen:
                chosen[seen.key] = seen.variant
        gate = asyncio.Semaphore(8)

        async def ask(worker: int, key: str, variant: str) -> None:
            door, scope, name = key.split("|")
            async with gate:
                asked = Asked(0.0, worker, door, scope, name, variant, 0.0)
                await self.call(asked, settling=True)

        async with asyncio.TaskGroup() as group:
            for key, variant in chosen.items():
                for worker in range(len(self._stage.workers)):
                    group.create_task(ask(worker, key, variant))

    async def _gauges(self, worker: Worker) -> dict[str, int]:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            found: dict[str, int] = (await client.get(f"{worker.base}/gauges")).json()
            return found

    async def _look_behind(self, before: list[dict[str, int]]) -> None:
        result, stage = self._result, self._stage
        end = time.monotonic() + CLEAN_WITHIN
        while True:
            result.leftovers = await self._leftovers(before)
            result.at_work, result.permits = self._at_work()
            clean = not (result.leftovers or result.at_work or result.permits)
            if clean or time.monotonic() > end:
                break
            await asyncio.sleep(0.1)
        names: set[str] = set()  # two servers may take writes for a while after a failover
        for server in stage.primaries():
            with server.client() as control:
                for key in control.scan_iter(count=1000):
                    names.add(key.decode(errors="replace"))
                    if control.pttl(key) == -1:
                        result.lasting_keys.append(key.decode(errors="replace"))
        result.receipts = sum(":r:" in name for name in names)
        result.other_keys = len(names) - result.receipts

    async def _leftovers(self, before: list[dict[str, int]]) -> list[str]:
        found: list[str] = []
        for worker, start in zip(self._stage.workers, before, strict=True):
            for gauge, value in (await self._gauges(worker)).items():
                most = start[gauge] + _ROOM[gauge] if gauge in _ROOM else 0
                if value > most:
                    found.append(f"{worker.incarnation} {gauge}: {value}, at most {most}")
        return found

    def _at_work(self) -> tuple[list[str], int]:
        """Receipts that are not done and whose leases run; probe permits whose leases run."""
        found: list[str] = []
        permits = 0
        for server in self._stage.primaries():
            with server.client() as control:
                seconds, micros = control.time()
                now = seconds * 1_000_000 + micros
                for key in control.scan_iter("*:r:*", count=1000):
                    value = control.get(key) or b""
                    if value[:3] == b"r1R" and int(value[51:67]) > now:
                        found.append(key.decode())
                for key in control.scan_iter("*:permits", count=1000):
                    permits += control.zcount(key, now, "+inf")
        return found, permits


def _read(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = {}
    if answer.status_code == 201:
        return {
            "kind": "answer",
            "execution": body["execution"],
            "by": body["call"],
            "of": body["of"],
        }
    word = str(body.get("type", "")).removeprefix(_PROBLEM)
    if not word:
        word = f"server-error {answer.status_code}"
    return {"kind": "refused", "word": word}
