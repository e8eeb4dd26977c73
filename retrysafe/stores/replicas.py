"""Receipts that replicas hold (`RETRYSAFE_REPLICAS`): after a receipt was taken or finished, a
write on it and `WAIT`, on one connection.

The connection is one of its own: WAIT holds up whatever comes after it on the same one. Receipts
of one moment share a WAIT, which covers every write before it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

from retrysafe.commands import Answer, Begin, Command, Finish, Reply
from retrysafe.errors import StoreUnavailable
from retrysafe.stores.multiplexer import Multiplexer, ServerError, pack
from retrysafe.stores.pool import ThreadPool
from retrysafe.stores.wire import script

# How long (milliseconds) replicas may take: a round trip when all is well.
ACK_WITHIN_MS = 500


def is_due(command: Command, reply: Reply) -> bool:
    """Whether a reply says that something was written which replicas are to hold."""
    if isinstance(command, Begin):
        return reply.answer is Answer.OK
    return isinstance(command, Finish) and reply.answer in (Answer.OK, Answer.VANISHED)


def confirmation(key: bytes, token: bytes) -> tuple[bytes | int, ...]:
    """The write that comes before WAIT."""
    return b"EVAL", script("confirm")[0], 1, key, token


def check(ours: Any, holding: Any, replicas: int) -> None:
    """Read the two replies. Raises StoreUnavailable."""
    if type(holding) is not int or holding < replicas:
        raise StoreUnavailable(
            reason=f"{holding if type(holding) is int else 0} of the {replicas} replicas that "
            f"RETRYSAFE_REPLICAS asks for hold the receipt after {ACK_WITHIN_MS} ms"
        )
    if ours != 1:
        raise StoreUnavailable(reason="the receipt was gone before replicas held it")


class _Asked(NamedTuple):
    key: bytes
    token: bytes
    asking: bool
    answered: asyncio.Future[None]


class AsyncReplication:
    """One server's WAITs, on a connection of its own. `lane` belongs to this object."""

    def __init__(self, lane: Multiplexer, replicas: int, deadline: float) -> None:
        self._lane = lane
        self._replicas = replicas
        self._deadline = deadline
        self._next: list[_Asked] = []
        self._rounds: asyncio.Task[None] | None = None

    async def confirm(self, key: bytes, token: bytes, *, asking: bool = False) -> None:
        """Return when the replicas hold the receipt. Raises StoreUnavailable, ServerError.

        `asking`: the slot is on its way to this node (Cluster).
        """
        answered = asyncio.get_running_loop().create_future()
        self._next.append(_Asked(key, token, asking, answered))
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run(), name="retrysafe-replicas")
        await answered

    async def close(self) -> None:
        """Close the connection; who waits for replicas is told so."""
        await self._lane.close()

    async def _run(self) -> None:
        while self._next:
            group, self._next = self._next, []
            try:
                await self._round(group)
            finally:
                for each in group:
                    if not each.answered.done():
                        each.answered.set_exception(StoreUnavailable(reason="the store was closed"))

    async def _round(self, group: list[_Asked]) -> None:
        end = time.monotonic() + self._deadline
        connection = 0
        while True:
            sent: list[asyncio.Future[Any]] = []
            try:
                if not self._lane.generation:
                    await self._lane.send("PING")
                connection = self._lane.generation
                for each in group:
                    if each.asking:
                        self._lane.enqueue(pack("ASKING")).add_done_callback(_unheeded)
                    sent.append(self._lane.enqueue(pack(*confirmation(each.key, each.token))))
                sent.append(self._lane.enqueue(pack("WAIT", self._replicas, ACK_WITHIN_MS)))
                *replies, holding = await asyncio.gather(*sent, return_exceptions=True)
            except Exception as error:  # closed, or its node left the cluster
                for future in sent:
                    future.add_done_callback(_unheeded)
                replies, holding = [error] * len(group), error
            # A write and a WAIT on two connections would be told that all is well.
            if self._lane.generation == connection or time.monotonic() > end:
                break
        if self._lane.generation != connection:
            holding = StoreUnavailable(reason="the connection was lost while replicas were asked")
        for each, ours in zip(group, replies, strict=True):
            if each.answered.done():
                continue
            try:
                for reply in (ours, holding):
                    if isinstance(reply, BaseException):
                        raise reply
                check(ours, holding, self._replicas)
                each.answered.set_result(None)
            except (StoreUnavailable, ServerError) as error:
                each.answered.set_exception(_own(error))
            except Exception as error:
                each.answered.set_exception(error)


def confirm_now(
    pool: ThreadPool, key: bytes, token: bytes, replicas: int, end: float, *, asking: bool = False
) -> None:
    """The same for a thread. Raises StoreUnavailable and redis-py's errors."""
    ours, holding = pool.exchange(
        *((pack("ASKING"),) if asking else ()),
        pack(*confirmation(key, token)),
        pack("WAIT", replicas, ACK_WITHIN_MS),
        end=end,
    )[-2:]
    check(ours, holding, replicas)


def _own(error: Exception) -> Exception:
    """Each caller gets an error of its own: they note their key on it."""
    if isinstance(error, StoreUnavailable):
        return StoreUnavailable(reason=error.reason)
    return type(error)(*error.args)


def _unheeded(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
