"""Receipts: one execution per key. The engine's own door, in both colours.

The middleware and the decorators are built on it; use it directly for anything they don't fit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from retrysafe import commands as c
from retrysafe import flow, keys
from retrysafe.commands import Answer
from retrysafe.context import (
    ReceiptControl,
    RequestContext,
    current_request,
    entered,
    new_request_id,
)
from retrysafe.desks import AsyncDesk, Desk, async_desk_for, desk_for, run
from retrysafe.errors import RecordCorrupt, RecordSealed, Reentered
from retrysafe.policy import ResolvedPolicy
from retrysafe.records import NO_KEYS, AbandonedReceipt, CorruptRecord, Record, Running, decode
from retrysafe.stores.base import Store
from retrysafe.values import Value

T = TypeVar("T")

MAX_WAITERS = 10_000

# Digests being worked on in this process: a call that meets its own would wait for itself.
_at_work: dict[bytes, int] = {}
_at_work_lock = threading.Lock()


def _after_fork() -> None:
    global _at_work_lock
    _at_work_lock = threading.Lock()
    _at_work.clear()


os.register_at_fork(after_in_child=_after_fork)


class Call(Value, frozen=True):
    """What one call asks: its key, whose it is (`scope`), and the payload's fingerprint.

    `fingerprint` is 16 bytes of `retrysafe.keys`. Key and scope may be secrets: no `repr` has them.
    """

    secret: ClassVar[frozenset[str]] = frozenset({"key", "scope"})

    key: str
    scope: str = ""
    fingerprint: bytes = keys.NO_FINGERPRINT
    request_id: str = ""


class _Held:
    """A receipt that is ours: do the work, then call exactly one of the three endings."""

    def __init__(self, desk: Any, taken: flow.Taken, control: ReceiptControl, owner: Any) -> None:
        self._desk = desk
        self._taken = taken
        self._owner = owner
        self.control = control
        self._ending = False
        with _at_work_lock:
            _at_work[taken.claim.digest] = _at_work.get(taken.claim.digest, 0) + 1
        desk.hold(taken)

    @property
    def name(self) -> str:
        """The receipt's digest, hex."""
        return self._taken.claim.name

    @property
    def fence(self) -> int:
        """Grows with each owner of the key; server microseconds."""
        return self._taken.fence

    @property
    def abandoned(self) -> AbandonedReceipt | None:
        """The call whose owner died before us, if there was one."""
        return self._taken.abandoned

    @property
    def ending(self) -> bool:
        """Whether one of the three endings was called."""
        return self._ending

    @property
    def lost(self) -> bool:
        """Whether the lease was lost: somebody else may own the receipt by now."""
        return self._taken.lost

    @property
    def on_lost(self) -> Callable[[], object] | None:
        """Called when the lease is lost: on the event loop, or on the renewing thread."""
        return self._taken.on_lost

    @on_lost.setter
    def on_lost(self, function: Callable[[], object] | None) -> None:
        self._taken.on_lost = function

    def working(self) -> entered:
        """The context in which the keyed work runs: `with held.working(): …`."""
        ask = self._taken.claim
        outer = current_request()
        return entered(
            RequestContext(
                request_id=ask.request_id or (outer.request_id if outer else new_request_id()),
                key=ask.name,
                scope=ask.scope,
                receipt=self.control,
                held=(outer.held if outer else frozenset()) | {ask.digest},
                traceparent=outer.traceparent if outer else None,
                receipts=self._owner,
            )
        )

    def _first(self) -> bool:
        if self._ending:
            return False
        self._ending = True
        return True

    def _done(self) -> None:
        digest = self._taken.claim.digest
        with _at_work_lock:
            left = _at_work.pop(digest, 1) - 1
            if left > 0:
                _at_work[digest] = left
        if self._taken.ended:
            self._desk.drop(self._taken)

    def _release(self) -> flow.Flow[None]:
        ask = self._taken.claim
        return flow.give_back(self._desk, self._taken, c.Release(ask.digest, self._taken.token))

    def _interrupt(self) -> flow.Flow[None]:
        ask = self._taken.claim
        return flow.give_back(self._desk, self._taken, c.Interrupt(ask.digest, self._taken.token))


class AsyncHeld(_Held):
    """A receipt that is ours, on an event loop."""

    async def finish(self, payload: bytes | None, ttl: float) -> Record | None:
        """Record the result (None: done, but not kept) for `ttl` seconds.

        Returns None, or the record of the owner that fenced us out: answer from that one.
        """
        return await self._end(flow.finish(self._desk, self._taken, payload, ttl))

    async def release(self) -> None:
        """Give the receipt up, as if never received: one waiting duplicate takes over."""
        await self._end(self._release())

    async def interrupt(self) -> None:
        """Mark the work abandoned now, instead of at the end of its lease."""
        await self._end(self._interrupt())

    async def _end(self, ending: flow.Flow[T]) -> T | None:
        if not self._first():
            return None
        try:
            return await ending
        finally:
            self._done()


class Held(_Held):
    """A receipt that is ours, on a thread."""

    def finish(self, payload: bytes | None, ttl: float) -> Record | None:
        """Record the result (None: done, but not kept) for `ttl` seconds.

        Returns None, or the record of the owner that fenced us out: answer from that one.
        """
        return self._end(flow.finish(self._desk, self._taken, payload, ttl))

    def release(self) -> None:
        """Give the receipt up, as if never received: one waiting duplicate takes over."""
        self._end(self._release())

    def interrupt(self) -> None:
        """Mark the work abandoned now, instead of at the end of its lease."""
        self._end(self._interrupt())

    def _end(self, ending: flow.Flow[T]) -> T | None:
        if not self._first():
            return None
        try:
            return run(ending)
        finally:
            self._done()


@dataclass(frozen=True)
class _Receipts:
    store: Store
    policy: ResolvedPolicy
    max_waiters: int = field(default=MAX_WAITERS)

    def _claim(self, call: Call) -> flow.Claim:
        digest = self._digest(call)
        context = current_request()
        if context is not None and digest in context.held and digest in _at_work:
            raise Reentered(digest.hex(), self.policy.lease)
        return flow.Claim(
            digest=digest,
            key=call.key,
            scope=call.scope,
            fingerprint=call.fingerprint,
            request_id=call.request_id or (context.request_id if context else ""),
            policy=self.policy,
        )

    def _digest(self, call: Call) -> bytes:
        return keys.digest(self.store.namespace, call.scope, call.key)

    def _seen(self, call: Call, reply: c.Reply) -> Record | Running | None:
        if reply.answer is Answer.VANISHED:
            return None
        try:
            if reply.answer in (Answer.DONE, Answer.RUNNING):
                found = decode(reply.value)
                if isinstance(found, Record) and found.sealed:
                    raise RecordSealed(self._digest(call).hex(), NO_KEYS)
                return found
        except CorruptRecord as error:
            raise RecordCorrupt(self._digest(call).hex(), str(error)) from None
        raise RecordCorrupt(self._digest(call).hex(), "no receipt")


class AsyncReceipts(_Receipts):
    """Receipts for coroutines. `policy` comes from `IdempotencyPolicy(...).resolve(settings)`."""

    async def begin(
        self, call: Call, on_wait: Callable[[], object] = lambda: None
    ) -> AsyncHeld | Record:
        """Own the receipt (AsyncHeld), or get the record that answers the call.

        Waits up to the policy's `wait` seconds for a call in flight; `on_wait` is called before
        each sleep. Raises InFlight, Reentered, Abandoned, FingerprintMismatch, StoreUnavailable,
        RecordCorrupt.
        """
        ask = self._claim(call)
        desk: AsyncDesk = async_desk_for(self.store, self.max_waiters)
        result = await flow.claim(desk, ask, on_wait)
        if isinstance(result, Record):
            return result
        return AsyncHeld(desk, result, ReceiptControl(), self)

    async def forget(self, call: Call) -> bool:
        """Delete the receipt, whatever its state. Returns whether there was one.

        Processes that keep its record at hand are told: see `retrysafe.finished`.
        """
        desk = async_desk_for(self.store, self.max_waiters)
        digest = self._digest(call)
        reply = await desk.door.execute(c.Forget(digest))
        desk.finished.forget(digest)
        return reply.answer is Answer.OK

    async def look(self, call: Call) -> Record | Running | None:
        """What is stored. Raises RecordCorrupt, StoreUnavailable."""
        desk = async_desk_for(self.store, self.max_waiters)
        return self._seen(call, await desk.door.execute(c.Look(self._digest(call))))


class Receipts(_Receipts):
    """Receipts for threads. `policy` comes from `IdempotencyPolicy(...).resolve(settings)`."""

    def begin(self, call: Call) -> Held | Record:
        """Own the receipt (Held), or get the record that answers the call.

        Waits up to the policy's `wait` seconds for a call in flight. Raises InFlight, Reentered,
        Abandoned, FingerprintMismatch, StoreUnavailable, RecordCorrupt.
        """
        ask = self._claim(call)
        desk: Desk = desk_for(self.store, self.max_waiters)
        result = run(flow.claim(desk, ask))
        if isinstance(result, Record):
            return result
        return Held(desk, result, ReceiptControl(), self)

    def forget(self, call: Call) -> bool:
        """Delete the receipt, whatever its state. Returns whether there was one."""
        desk = desk_for(self.store, self.max_waiters)
        reply = desk.door.execute(c.Forget(self._digest(call)))
        return reply.answer is Answer.OK

    def look(self, call: Call) -> Record | Running | None:
        """What is stored. Raises RecordCorrupt, StoreUnavailable."""
        desk = desk_for(self.store, self.max_waiters)
        return self._seen(call, desk.door.execute(c.Look(self._digest(call))))
