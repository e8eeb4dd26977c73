"""A receipt as its users see it: what happened to a call, without its result."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from enum import StrEnum

from retrysafe import keys
from retrysafe.commands import Answer, Look, Reply
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.errors import RecordCorrupt
from retrysafe.receipts import AsyncReceipts, Call, Receipts
from retrysafe.records import CorruptRecord, Record, decode


class ReceiptState(StrEnum):
    """What is known of a call."""

    RUNNING = "running"
    ABANDONED = "abandoned"
    """Its owner died or was interrupted: nobody knows what it did."""
    DONE = "done"
    NOT_KEPT = "not-kept"
    """The work is done, its result isn't stored; it is not run again."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """One call's receipt, as it was when it was looked at.

    `request_id`: of the request the work ran for. `fence`: grows with each owner of the key.
    `lease_left`: seconds until a silent owner counts as dead, 0 where it does; None once the work
    is done.
    """

    state: ReceiptState
    request_id: str
    fence: int
    lease_left: float | None = None

    @property
    def started(self) -> datetime.datetime:
        """When the work of this owner began, by the store's clock (UTC)."""
        return datetime.datetime.fromtimestamp(self.fence / 1e6, datetime.UTC)

    @classmethod
    def read(cls, reply: Reply, key: str = "") -> Receipt | None:
        """From a store's answer to Look. Raises RecordCorrupt; `key` is the digest it names."""
        if reply.answer is Answer.VANISHED:
            return None
        if reply.answer not in (Answer.DONE, Answer.RUNNING):
            raise RecordCorrupt(key, "no receipt")
        try:
            found = decode(reply.value)
        except CorruptRecord as error:
            raise RecordCorrupt(key, str(error)) from None
        if isinstance(found, Record):
            state = ReceiptState.NOT_KEPT if found.payload is None else ReceiptState.DONE
            return cls(state, found.request_id, found.fence)
        left = 0.0 if found.interrupted else reply.number / 1e6
        state = ReceiptState.RUNNING if left > 0 else ReceiptState.ABANDONED
        return cls(state, found.request_id, found.fence, left)

    @classmethod
    def look(cls, receipts: Receipts, call: Call) -> Receipt | None:
        """The receipt of a call, None where there is none. Raises StoreUnavailable."""
        digest = keys.digest(receipts.store.namespace, call.scope, call.key)
        desk = desk_for(receipts.store, receipts.max_waiters)
        return cls.read(desk.door.execute(Look(digest)), digest.hex())

    @classmethod
    async def alook(cls, receipts: AsyncReceipts, call: Call) -> Receipt | None:
        """The same for coroutines."""
        digest = keys.digest(receipts.store.namespace, call.scope, call.key)
        desk = async_desk_for(receipts.store, receipts.max_waiters)
        return cls.read(await desk.door.execute(Look(digest)), digest.hex())
