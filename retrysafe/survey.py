"""What a store on servers holds, for people: receipts, shared breakers, job budgets.

It goes through the keys and changes nothing. What stands there all the while is met once; what
comes or goes meanwhile may be missed. A result is never fetched: it may be large, or a secret.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from retrysafe.commands import Answer, Reply
from retrysafe.errors import RecordCorrupt
from retrysafe.job_budget import JobState
from retrysafe.receipt import Receipt
from retrysafe.records import Running, decode
from retrysafe.stores.base import Store
from retrysafe.stores.doors import async_door

__all__ = ["FoundBreaker", "FoundJob", "FoundReceipt", "breakers", "jobs", "receipts"]

_DIGEST = re.compile("[0-9a-f]{32}")
_COUNTED = ("s", "u", "n", "b", "w")  # state, open until, and the window's three
_STATES = frozenset({b"closed", b"open", b"half-open", b"forced-open", b"disabled"})


@dataclass(frozen=True, slots=True)
class FoundReceipt:
    """A receipt by its digest (32 hex digits).

    receipt: None where what is stored is no receipt of this version. expires_in: seconds, None:
    never. size: bytes, the result included. waiting: processes that asked to be told of the end.
    """

    digest: str
    receipt: Receipt | None
    expires_in: float | None
    size: int
    waiting: int


@dataclass(frozen=True, slots=True)
class FoundBreaker:
    """A shared breaker that has a state of its own: one of which nothing ever failed has none.

    state: as a call would meet it now, or `corrupt`. retry_after: seconds until an open one admits
    a probe. calls, failures, slow: those that a closed one has in its window.
    """

    name: str
    state: str
    retry_after: float
    calls: int
    failures: int
    slow: int


@dataclass(frozen=True, slots=True)
class FoundJob:
    """The retry budget of one job's step. state: None where what is stored is none of ours.
    expires_in: seconds, None: never."""

    job_id: str
    step: str
    state: JobState | None
    expires_in: float | None


async def receipts(store: Store, digest: str = "") -> AsyncGenerator[FoundReceipt, None]:
    """The receipts whose digests begin so. Raises StoreUnavailable."""
    door: Any = async_door(store)
    head = f"{store.namespace}:r:"
    async for page in _names(door, head + digest):
        names = [name for name in page if _DIGEST.fullmatch(name, len(head))]
        answers = await asyncio.gather(*(door.eval("peek", [name], []) for name in names))
        for name, answer in zip(names, answers, strict=True):
            if answer is not None:
                yield _receipt(name[len(head) :], *answer)


def _receipt(
    digest: str, word: int, lease_us: int, ttl_ms: int, size: int, head: bytes
) -> FoundReceipt:
    receipt, waiting = None, 0
    try:
        receipt = Receipt.read(Reply(Answer(word), lease_us, head), digest)
    except RecordCorrupt:
        return FoundReceipt(digest, None, _seconds(ttl_ms), size, 0)
    if word == Answer.RUNNING:
        running = decode(head)
        assert isinstance(running, Running)
        waiting = len(running.inboxes)
    return FoundReceipt(digest, receipt, _seconds(ttl_ms), size, waiting)


async def breakers(store: Store) -> AsyncGenerator[FoundBreaker, None]:
    """The shared breakers. Raises StoreUnavailable."""
    door: Any = async_door(store)
    head, tail = f"{store.namespace}:b:{{", "}"
    async for page in _names(door, head):
        names = [name for name in page if name.endswith(tail)]  # not its permits, nor its window
        held = await asyncio.gather(*(_fields(door, name, *_COUNTED) for name in names))
        seconds, micros = await door.command("TIME")
        now = int(seconds) + int(micros) / 1e6
        for name, fields in zip(names, held, strict=True):
            if fields is not None:
                told = name[len(head) : -len(tail)].replace("%7B", "{").replace("%7D", "}")
                yield _breaker(told, fields, now)


def _breaker(name: str, fields: list[bytes | None], now: float) -> FoundBreaker:
    state, until, *counts = fields
    try:
        calls, failures, slow = (int(each or 0) for each in counts)
        left = int(until or 0) / 1e6 - now if state == b"open" else 0.0
    except ValueError:
        state = None
    if state is None or state not in _STATES:
        return FoundBreaker(name, "corrupt", 0.0, 0, 0, 0)
    met = "half-open" if state == b"open" and left <= 0 else state.decode()
    return FoundBreaker(name, met, max(0.0, left), calls, failures, slow)


async def jobs(store: Store) -> AsyncGenerator[FoundJob, None]:
    """The job budgets from which something was spent. Raises StoreUnavailable."""
    door: Any = async_door(store)
    head = f"{store.namespace}:job:"
    async for page in _names(door, head):
        names = [name for name in page if name.count(":", len(head)) == 1]
        held = await asyncio.gather(*(_fields(door, name, "n", "a", "g") for name in names))
        left = await asyncio.gather(*(door.command("PTTL", name) for name in names))
        for name, fields, ttl in zip(names, held, left, strict=True):
            if fields is not None:
                job_id, step = (
                    each.replace("%3A", ":").replace("%25", "%")
                    for each in name[len(head) :].split(":")
                )
                yield FoundJob(job_id, step, _job(fields), _seconds(ttl))


def _job(fields: list[bytes | None]) -> JobState | None:
    spent, attempt, given_up = fields
    try:
        return None if spent is None else JobState(int(spent), int(attempt or 1), given_up == b"1")
    except ValueError:
        return None


async def _fields(door: Any, name: str, *fields: str) -> list[bytes | None] | None:
    """Fields of a hash, each None where the key is of another kind; None where there is no key."""
    found: list[bytes | None] = [None] * len(fields)
    if await door.command("TYPE", name) == b"hash":
        found = await door.command("HMGET", name, *fields)
    # Looked at last: a key may go in between.
    return found if any(found) or await door.command("EXISTS", name) else None


async def _names(door: Any, prefix: str) -> AsyncIterator[list[str]]:
    """The keys that begin so, each once."""
    met: set[bytes] = set()
    async for page in door.names(prefix):
        new = set(page) - met
        met |= new
        yield sorted(name.decode("utf-8", "replace") for name in new)


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000
