"""A job on one of several servers, from its submission to its result (S1, whole).

Each attempt goes to a server that has not failed it yet. A failed attempt spends from the budget of
the job's step; whether it is tried again is one compare-and-set, so a job that was given up never
comes back, whoever else consumes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from retrysafe.breaker import CircuitBreaker, named
from retrysafe.breaker_permit import Permit
from retrysafe.classify import classify
from retrysafe.errors import (
    BreakerOpen,
    JobGivenUp,
    JobTaken,
    ProtocolError,
    ResultTimeout,
    StepFailed,
)
from retrysafe.events import Event, emit
from retrysafe.job_budget import JobBudget
from retrysafe.outcomes import RETRIED
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import AsyncHeld, AsyncReceipts, Call
from retrysafe.records import Record
from retrysafe.results import Mode, Result, ResultReader
from retrysafe.settings import Settings
from retrysafe.stores.base import Store

__all__ = ["Submission", "run_job"]


@dataclass(frozen=True, slots=True)
class Submission:
    """What is to be submitted: `attempt` (from 1) of a job's step, to `server`.

    The server writes its result under `result_id`: an attempt of its own has a result of its own,
    so a slow server's late answer is never taken for another's.
    """

    job_id: str
    step: str
    server: str
    attempt: int
    result_id: str


Submit = Callable[[Submission], Awaitable[object]]
Breakers = Callable[[str], CircuitBreaker]


async def run_job(
    job_id: str,
    *,
    step: str,
    servers: Sequence[str],
    submit: Submit,
    reader: ResultReader,
    budget: JobBudget,
    mode: Mode = "take",
    breakers: Breakers = named,
) -> Result:
    """Submit a job, wait for its result, and try another server within the budget.

    job_id: this enqueueing's own ID. step: the one that really computes.
    servers: names, the preferred one first. One that failed this job is tried again only when
        there is no other, one whose breaker is open not at all.
    submit: starts one attempt and returns; inside it outbound clients send a key of this attempt,
        the same when it is run again. It is called once for each attempt, whoever consumes the
        job: a consumer that comes later, or again after a crash, waits for what was submitted.
    reader, mode: where the results come from, and how they are read; see `ResultReader.wait`.
    budget: retries of this step. Its `hard_wait` caps each wait.
    breakers: the breaker of a server; by default this process's breaker of that name. A result
        that can't be understood, none at all, and a failed submission count against the server;
        a step that failed does not: the server answered. Its probe is released as a success.

    Raises the last attempt's StepFailed, ProtocolError or ResultTimeout, with a note of all: the
    job is given up. JobTaken, AlreadyTaken: another consumer has it; JobGivenUp: so it was
    before. BreakerOpen: no server may be asked just now, nothing was spent. What `submit` raises,
    where that is a definite no. StoreUnavailable: nothing is known; ask again.
    """
    if isinstance(servers, str) or not servers or not all(isinstance(s, str) for s in servers):
        raise ValueError(f"servers takes the names of one server or more, not {servers!r}")
    return await _Job(job_id, step, tuple(servers), submit, reader, budget, mode, breakers).run()


@dataclass
class _Job:
    job_id: str
    step: str
    servers: tuple[str, ...]
    submit: Submit
    reader: ResultReader
    budget: JobBudget
    mode: Mode
    breakers: Breakers

    async def run(self) -> Result:
        state = await self.budget.state(self.job_id, self.step)
        if state.given_up:
            raise JobGivenUp(self.job_id, self.step)
        receipts = self._receipts(self.reader.store)
        tried = await self._tried(receipts, state.attempt)
        history: list[str] = []
        attempt = state.attempt
        while True:
            server, permit, error = await self._submitted(receipts, attempt, tried)
            if error is None:
                try:
                    return await self._result(attempt, server, permit)
                except (StepFailed, ProtocolError, ResultTimeout) as failed:
                    error = failed
            tried.append(server)
            history.append(f"attempt {attempt} on {server!r}: {error}")
            emit(Event("job-attempt-failed", outcome=type(error).__name__, detail=server))
            try:
                attempt = await self._again(attempt, error)
            except type(error) as last:
                last.add_note("retrysafe: " + "; ".join(history))
                raise

    async def _submitted(
        self, receipts: AsyncReceipts, attempt: int, tried: list[str]
    ) -> tuple[str, Permit | None, Exception | None]:
        """The server that has this attempt, our permit if it was us who submitted, and what the
        submission failed by, if it did and may have arrived nevertheless."""
        held = await receipts.begin(self._call(attempt))
        if isinstance(held, Record):
            return (held.payload or b"").decode(), None, None
        unreachable: list[str] = []
        try:
            while True:
                server, permit = await self._choose(tried, unreachable)
                failed = await self._submit(held, attempt, server, permit)
                if failed is None:
                    return server, permit, None
                word = classify(failed)
                if word.outcome in RETRIED and not word.may_have_run:
                    unreachable.append(server)  # it never arrived: costs the job nothing
                    if len(unreachable) < len(set(self.servers)):
                        continue
                    raise failed
                if not word.may_have_run:
                    raise failed
                await held.finish(server.encode(), self.budget.ttl)
                return server, None, failed
        finally:
            if not held.ending:  # another consumer, or the next delivery, submits
                await held.release()

    async def _submit(
        self, held: AsyncHeld, attempt: int, server: str, permit: Permit
    ) -> Exception | None:
        submission = Submission(
            self.job_id, self.step, server, attempt, _result_id(self.job_id, attempt)
        )
        try:
            with held.working():
                await self.submit(submission)
        except Exception as error:
            await self.breakers(server).asettle(permit, error)
            return error
        except BaseException:
            await permit.arelease()
            raise
        try:
            await held.finish(server.encode(), self.budget.ttl)
        except BaseException:
            await permit.arelease()
            raise
        return None

    async def _choose(self, tried: list[str], unreachable: list[str]) -> tuple[str, Permit]:
        """A server and the right to ask it. Raises BreakerOpen where none may be asked."""
        fresh = [s for s in self.servers if s not in tried]
        soonest: BreakerOpen | None = None
        for server in (*fresh, *(s for s in self.servers if s in tried)):
            if server in unreachable:
                continue
            try:
                return server, await self.breakers(server).aacquire()
            except BreakerOpen as error:
                if soonest is None or error.retry_after < soonest.retry_after:
                    soonest = error
        assert soonest is not None
        raise soonest

    async def _result(self, attempt: int, server: str, permit: Permit | None) -> Result:
        """The result of one attempt; the permit goes back with what it says of the server."""
        try:
            result = await self.reader.wait(
                _result_id(self.job_id, attempt),
                step=self.step,
                server=server,
                timeout=self.budget.hard_wait,
                mode=self.mode,
            )
        except BaseException as error:
            if permit is not None:
                if isinstance(error, StepFailed):
                    await permit.arelease_as_success()
                elif isinstance(error, ProtocolError | ResultTimeout):
                    await permit.afailure()
                else:  # cancelled, taken by another reader: nothing is known of the server
                    await permit.arelease()
            raise
        if permit is not None:
            await permit.asuccess()
        return result

    async def _again(self, attempt: int, error: Exception) -> int:
        """The number of the next attempt. Raises `error` where there is none, JobTaken where
        another consumer decided first."""
        if getattr(error, "retryable", None) is False and isinstance(error, StepFailed):
            if await self.budget.give_up(self.job_id, self.step, attempt=attempt):
                raise error  # the producer's own word
        elif await self.budget.spend(
            self.job_id, self.step, attempt=attempt
        ) and await self.budget.requeue(self.job_id, self.step, attempt):
            return attempt + 1
        state = await self.budget.state(self.job_id, self.step)
        if state.given_up:
            raise error
        raise JobTaken(self.job_id, self.step, state.attempt) from error

    async def _tried(self, receipts: AsyncReceipts, attempt: int) -> list[str]:
        """The servers of the attempts before, which another consumer may have made."""
        tried = []
        for before in range(max(1, attempt - len(self.servers)), attempt):
            seen = await receipts.look(self._call(before))
            if isinstance(seen, Record) and seen.payload:
                tried.append(seen.payload.decode())
        return tried

    def _receipts(self, store: Store) -> AsyncReceipts:
        policy = IdempotencyPolicy(ttl=self.budget.ttl)
        return AsyncReceipts(store, policy.resolve(Settings.from_env()))

    def _call(self, attempt: int) -> Call:
        return Call(key=f"{self.job_id}/{attempt}", scope=f"job:{self.step}")


def _result_id(job_id: str, attempt: int) -> str:
    return job_id if attempt == 1 else f"{job_id}:{attempt}"
