"""The load beside the keyed calls: jobs whose results are waited for, and sagas."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx

from tests.faults.campaign.flows import WAIT
from tests.faults.campaign.stage import Stage

PATIENCE = 20.0
COLOURS = ("async", "sync")


class Side:
    """One round's: `counts` says how each ended, `broken` what must not be."""

    def __init__(self, stage: Stage, seed: int, jobs: int, sagas: int, lasts: float) -> None:
        self.counts = Counter[str]()
        self.broken: list[str] = []
        self._cut_off: list[tuple[float, str]] = []
        self._stage = stage
        self._draw = random.Random(f"side {seed}")
        self._seed = seed
        self._jobs, self._sagas, self._lasts = jobs, sagas, lasts

    async def run(self) -> None:
        async with (
            httpx.AsyncClient(
                timeout=PATIENCE, headers={"connection": "close"}, trust_env=False
            ) as self._client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._jobs):
                group.create_task(self._job(number))
            for number in range(self._sagas):
                group.create_task(self._saga(number))

    def _base(self) -> str:
        return self._draw.choice(self._stage.workers).base

    async def _job(self, number: int) -> None:
        job = f"s{self._seed}-j{number}"
        at, later = self._draw.uniform(0, self._lasts), self._draw.uniform(0.0, 0.5)
        reader, writer = self._base(), self._base()
        await asyncio.sleep(at)
        written = asyncio.create_task(self._write(job, writer, later))
        try:
            await self._read(job, reader, self._draw.choice(COLOURS))
        finally:
            await written

    async def _write(self, job: str, base: str, later: float) -> None:
        await asyncio.sleep(later)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                answer = await self._client.post(f"{base}/jobs/{job}")
            except httpx.TransportError:
                pass  # its worker is gone, or stands still
            else:
                if answer.status_code == 200:
                    self.counts["written"] += 1
                    return
            await asyncio.sleep(0.2)
            base = self._base()
        self.broken.append(f"the result of {job} could not be written")

    async def _read(self, job: str, base: str, colour: str) -> None:
        sent = time.monotonic()
        try:
            answer = await self._client.get(f"{base}/jobs/{colour}/{job}")
        except httpx.TimeoutException:
            self.broken.append(f"the reader of {job} had no answer in {PATIENCE:g} s")
        except httpx.TransportError:
            self.counts["reader died"] += 1
        else:
            took = time.monotonic() - sent
            if self._ended_by_its_server(answer, base):
                self.counts["reader died"] += 1
                return
            if answer.status_code != 200:
                self.counts[answer.json().get("error", "?")] += 1
                if took < WAIT - 0.5:
                    self.broken.append(f"{job} ended after {took:.2f} s: {answer.text}")
                return
            self.counts["read"] += 1
            if answer.json() != {"content": f"of {job}"}:
                self.broken.append(f"{job} was answered {answer.text}")

    async def _saga(self, number: int) -> None:
        id, colour = f"s{self._seed}-{number}", self._draw.choice(COLOURS)
        fails = {"fails": "1"} if self._draw.random() < 0.4 else {}
        base = self._base()
        await asyncio.sleep(self._draw.uniform(0, self._lasts))
        try:
            answer = await self._client.post(f"{base}/sagas/{colour}/{id}", params=fails)
        except httpx.TimeoutException:
            self.broken.append(f"saga {id} had no answer in {PATIENCE:g} s")
        except httpx.TransportError:
            self.counts["saga's worker died"] += 1
        else:
            if self._ended_by_its_server(answer, base):
                self.counts["saga's worker died"] += 1
                return
            said = answer.json()
            status = said.get("status") or said.get("error", "?")
            self.counts[f"saga {status}"] += 1
            if status in ("done", "undone") and (status == "undone") != bool(fails):
                self.broken.append(f"saga {id} is {status}, its order: {fails}")

    def _ended_by_its_server(self, answer: httpx.Response, base: str) -> bool:
        """A server that is told to go answers for what it cancels, in its own words."""
        if answer.status_code != 500 or "json" in answer.headers.get("content-type", ""):
            return False
        (worker,) = [each.name for each in self._stage.workers if each.base == base]
        self._cut_off.append((time.monotonic(), worker))
        return True

    def judge(self) -> None:
        """When what was done to the workers is known: whether each such server was told to go."""
        for at, worker in self._cut_off:
            told = (
                each.name == "terminating" and each.hits(worker) and each.since <= at <= each.until
                for each in self._stage.disturbances
            )
            if not any(told):
                self.broken.append(f"{worker} answered 500 at {at:.3f}, and nobody had ended it")
