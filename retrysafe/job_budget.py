"""How often a queued job is tried again: a budget per job and step, for all its consumers (S1).

S1's counter, and what S1 leaves open beside it: of two consumers of one job only one may requeue
it, and none once it was given up. Counter, attempt and giving up are one key and one script.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrysafe.events import Event, emit
from retrysafe.keys import digest
from retrysafe.stores import Store, open_store
from retrysafe.stores.doors import async_door, door
from retrysafe.units import check_duration, check_integer

__all__ = ["JobBudget", "JobState"]

_LONGEST_NAME = 512
_LARGEST_LIMIT = 10_000  # each retry that is spent leaves its token in the key
_LARGEST_ATTEMPT = 2**53  # counted exactly by the store's scripts

Script = tuple[str, list[str], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class JobState:
    """What is known of one job's step.

    spent: retries used up, never more than the limit. attempt: the one that is under way, or
    waits in the queue; its consumer decides. given_up: it will not be tried again.
    known: False where nothing was recorded yet, or it has expired.
    """

    spent: int
    attempt: int
    given_up: bool
    known: bool = True


class JobBudget:
    """Retries of queued jobs: at most `limit` for each job and step, whoever consumes it.

        if await budget.spend(job_id, step, attempt=n) and await budget.requeue(job_id, step, n):
            ...  # put it into the queue again, as attempt n + 1; only then acknowledge this one
        elif (await budget.state(job_id, step)).given_up:
            ...  # the job has failed: report it
        # else another consumer has it: leave it alone

    job_id: the ID of this very enqueueing, kept by its requeues; not that of an entity which may
        have several jobs: they would use up each other's retries.
    step: the one that really computes. What a preprocessing step spends is its own (S1).
    attempt: from 1; the message carries it.

    store: from `open_store`, or its URL; by default the settings say.
    limit: retries after the first attempt, 1 to 10,000.
    hard_wait: the longest time that may pass between two attempts, seconds: the hard cap of one
        wait. Take the longest, not the usual one.
    ttl: seconds that the budget is known after the last change of it; by default, and at least,
        2 · hard_wait. A shorter one ends between two attempts, and the job is retried for ever
        (S1). A job that was given up stays so as long as this.

    Every method is one round trip and safe to repeat: a lost reply is asked for again and counts
    once. Raises StoreUnavailable where the store can't be asked: there is no yes without it.
    `…_sync` are the forms for threads. Raises ValueError for what can't be used.
    """

    def __init__(
        self,
        store: Store | str | None = None,
        limit: int = 1,
        hard_wait: float = 86400.0,
        *,
        ttl: float | None = None,
    ) -> None:
        self.limit = _whole("JobBudget.limit", limit, _LARGEST_LIMIT)
        self.hard_wait = _seconds("hard_wait", hard_wait)
        self.ttl = 2 * self.hard_wait if ttl is None else _seconds("ttl", ttl)
        if self.ttl < 2 * self.hard_wait:
            raise ValueError(
                f"JobBudget.ttl takes at least twice hard_wait ({2 * self.hard_wait:g} s), not "
                f"{ttl!r}: it would expire between two attempts, and the budget begin anew"
            )
        self.store = open_store(store) if store is None or isinstance(store, str) else store

    # Async

    async def spend(
        self, job_id: str, step: str, *, attempt: int | None = None, token: str | None = None
    ) -> bool:
        """Use up one retry. False: there is none left and the job is now given up, or was before.

        attempt: whose failure it is. It is then spent once however many consumers had that attempt,
            and what comes late, when the job was requeued already, gets False and gives nothing up.
            Without it each call spends one.
        token: names this call; repeated with the same, it spends once.
        """
        return self._spent(job_id, step, await self._aask("spend", job_id, step, attempt, token))

    async def requeue(
        self, job_id: str, step: str, attempt: int, *, token: str | None = None
    ) -> bool:
        """Whether this consumer, of this attempt, may put the job into the queue again, as attempt
        `attempt + 1`: compare-and-set. True for one consumer of an attempt; False for the others,
        for a job that was given up, and without budget. Where `spend` was not asked before, this
        spends too: no job is requeued more often than `limit`.

        token: names who asks; the same one gets its True again. A consumer that may die before it
            has put the job gives what its successor also has, such as the delivery's ID.
        """
        reply = await self._aask("requeue", job_id, step, attempt, token)
        return self._spent(job_id, step, reply)

    async def give_up(self, job_id: str, step: str, *, attempt: int | None = None) -> bool:
        """Record that the job won't be tried again, as where its producer said `retryable: false`.

        attempt: only while that one is still the latest. Returns whether the job is given up.
        """
        return bool((await self._aask("give_up", job_id, step, attempt))[0])

    async def state(self, job_id: str, step: str) -> JobState:
        """What is known of the job; changes nothing."""
        return _state(await self._aask("look", job_id, step))

    # Sync

    def spend_sync(
        self, job_id: str, step: str, *, attempt: int | None = None, token: str | None = None
    ) -> bool:
        """`spend`, for threads."""
        return self._spent(job_id, step, self._ask("spend", job_id, step, attempt, token))

    def requeue_sync(
        self, job_id: str, step: str, attempt: int, *, token: str | None = None
    ) -> bool:
        """`requeue`, for threads."""
        return self._spent(job_id, step, self._ask("requeue", job_id, step, attempt, token))

    def give_up_sync(self, job_id: str, step: str, *, attempt: int | None = None) -> bool:
        """`give_up`, for threads."""
        return bool(self._ask("give_up", job_id, step, attempt)[0])

    def state_sync(self, job_id: str, step: str) -> JobState:
        """`state`, for threads."""
        return _state(self._ask("look", job_id, step))

    # What both ask, and make of the answer

    def _ask(self, *call: Any) -> list[int]:
        reply: list[int] = door(self.store).eval(*self._script(*call))
        return reply

    async def _aask(self, *call: Any) -> list[int]:
        reply: list[int] = await async_door(self.store).eval(*self._script(*call))
        return reply

    def _script(
        self, op: str, job_id: str, step: str, attempt: int | None = None, token: str | None = None
    ) -> Script:
        _name("job_id", job_id)
        _name("step", step)
        if attempt is not None or op == "requeue":
            _whole("attempt", attempt, _LARGEST_ATTEMPT)
        if token is None:
            token = secrets.token_hex(16)
        else:
            _name("token", token)
        # Quoted, so that two names never make the key of two others.
        names = ":".join(each.replace("%", "%25").replace(":", "%3A") for each in (job_id, step))
        args = (op, attempt or 0, token, self.limit, round(self.ttl * 1000))
        return "job_act", [f"{self.store.namespace}:job:{names}"], args

    def _spent(self, job_id: str, step: str, reply: list[int]) -> bool:
        if reply[0] == 2:
            key = digest(self.store.namespace, f"job:{step}", job_id).hex()
            emit(Event("job-given-up", key, outcome="budget exhausted"))
        return reply[0] == 1

    def __repr__(self) -> str:
        return f"JobBudget(limit={self.limit}, hard_wait={self.hard_wait:g}, ttl={self.ttl:g})"


def _state(reply: list[int]) -> JobState:
    known, spent, attempt, given_up = reply
    return JobState(spent, attempt, bool(given_up), bool(known))


def _name(what: str, text: Any) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_NAME:
        raise ValueError(f"{what} takes text of 1-{_LONGEST_NAME} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} takes text that UTF-8 can say") from None


def _whole(what: str, value: Any, most: int) -> int:
    try:
        number = check_integer(value, 1)
    except ValueError as error:
        raise ValueError(f"{what} takes a whole number of 1 or more ({error})") from None
    if number > most:
        raise ValueError(f"{what} takes at most {most}")
    return number


def _seconds(what: str, value: Any) -> float:
    try:
        return check_duration(value)
    except ValueError as error:
        raise ValueError(
            f"JobBudget.{what} takes a finite number of seconds above 0, not {value!r} ({error})"
        ) from None
