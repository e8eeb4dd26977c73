"""One connection, many callers: commands of one event-loop tick leave in one write.

redis-py opens, authenticates, encrypts and discovers; from then on this class owns the socket.
Replies are matched in order, so a cancelled caller costs nothing: its reply is read and dropped.
A lost connection is opened again and what was out is sent again; every command of ours bears it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import hiredis
import redis.exceptions as redis_errors

from retrysafe.errors import StoreUnavailable
from retrysafe.stores.base import OnNews

Connect = Callable[[], Awaitable[Any]]

_SWEEP = 0.1
_BLOCKED = 0.2  # a look that is so late (seconds) says that the loop was
_PING_AFTER = 10.0
_LIMIT = 20_000
# Replies of a server that can't serve just now: the right one is a reconnect away.
_ELSEWHERE = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")


def pack(*args: bytes | str | int) -> bytes:
    """One command in the protocol's form."""
    # hiredis's own takes 80 times as long for values of MiBs, and crashes on a number where a
    # signal's handler raises.
    parts = [b"*%d" % len(args)]
    for each in args:
        data = each if isinstance(each, bytes) else str(each).encode()
        parts += (b"$%d" % len(data), data)
    parts.append(b"")
    return b"\r\n".join(parts)


def _unheeded(done: asyncio.Future[Any]) -> None:
    """Nobody waits for this reply."""
    if not done.cancelled():
        done.exception()


class ServerError(Exception):
    """An error reply, as the server worded it."""


class Retired(Exception):
    """The connection was given up for good; the command belongs on another one."""


class _Entry:
    __slots__ = ("deadline", "future", "packed", "subscribes")

    def __init__(
        self,
        packed: bytes,
        future: asyncio.Future[Any],
        deadline: float,
        subscribes: bytes | None = None,
    ) -> None:
        self.packed = packed
        self.future = future
        self.deadline = deadline
        self.subscribes = subscribes  # the channel whose subscription this begins or ends


class Multiplexer(asyncio.Protocol):
    """Belongs to one event loop. `connect` returns a connected redis.asyncio connection;
    `deadline` is how long (seconds) one command may take, reconnects and resends included.
    `elsewhere`: the error replies that end the connection; any other is the caller's."""

    def __init__(
        self, connect: Connect, deadline: float, elsewhere: tuple[str, ...] = _ELSEWHERE
    ) -> None:
        self.generation = 0  # counts the connections
        self._connect = connect
        self._elsewhere = elsewhere
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._connection: Any = None
        self._parser = hiredis.Reader(replyError=ServerError)
        self._out: deque[_Entry] = deque()
        self._sent: deque[_Entry] = deque()
        self._flush_due = False
        self._paused = False
        self._opening: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep_due = 0.0
        self._room: deque[asyncio.Future[None]] = deque()
        self._channels: dict[bytes, OnNews] = {}
        self._last_reply = self._loop.time()
        self._closed = False
        self.retired = False  # `retire` was called
        self._pause = 0.0
        self._trouble = ""  # why there is no connection

    def send(self, *args: bytes | str | int) -> Awaitable[Any]:
        """One command's reply. Raises StoreUnavailable past the deadline, ServerError."""
        packed = pack(*args)
        if len(self._out) + len(self._sent) < _LIMIT:
            return self.enqueue(packed)
        return self._send_later(packed)

    async def _send_later(self, packed: bytes) -> Any:
        while len(self._out) + len(self._sent) >= _LIMIT:
            await self._wait_for_room()
        return await self.enqueue(packed)

    def enqueue(self, packed: bytes, subscribes: bytes | None = None) -> asyncio.Future[Any]:
        """Queue packed bytes of one command; its reply comes in the future."""
        if self.retired:
            raise Retired
        if self._closed:
            raise StoreUnavailable(reason="the store is closed")
        now = self._loop.time()
        entry = _Entry(packed, self._loop.create_future(), now + self._deadline, subscribes)
        self._out.append(entry)
        if self._transport is None:
            self._open()
        elif not self._sent and len(self._out) == 1:
            self._flush()  # an idle connection gains nothing from waiting for the tick's end
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        if self._sweeper is None:
            self._sweep_later()
        return entry.future

    async def subscribe(self, channel: bytes, on_news: OnNews) -> None:
        """Hear a channel until `unsubscribe`, reconnects included.

        `on_news` gets each message, and None after a reconnect: messages may have been lost.
        """
        self._channels[channel] = on_news
        await self.enqueue(pack("SUBSCRIBE", channel), channel)

    def unsubscribe(self, channel: bytes) -> None:
        """Hear a channel no more."""
        if self._channels.pop(channel, None) is not None and self._transport is not None:
            ended = self.enqueue(pack("UNSUBSCRIBE", channel), channel)
            ended.add_done_callback(_unheeded)

    async def close(self) -> None:
        """Close the connection; whatever is still out fails."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        if self._opening is not None:
            self._opening.cancel()
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._fail_all("the store was closed")

    def retire(self) -> None:
        """Give the connection up for good: what is out, and what comes yet, raises Retired."""
        self._closed = self.retired = True
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        for entry in (*self._sent, *self._out):
            if not entry.future.done():
                entry.future.set_exception(Retired())
        self._fail_all("its node has left")

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._last_reply = self._loop.time()
        self._parser.feed(data)
        sent = self._sent
        while (reply := self._parser.gets()) is not False:
            kind = type(reply)
            if kind is hiredis.PushNotification:
                self._push(reply)
                continue
            if not sent:
                self._drop()
                return
            entry = sent.popleft()
            if kind is ServerError:
                word = str(reply).partition(" ")[0]
                if word in self._elsewhere and not entry.future.done():
                    sent.appendleft(entry)
                    self._pause = min(max(self._pause * 2, 0.02), 0.3)
                    self._drop()
                    return
                if not entry.future.done():
                    entry.future.set_exception(reply)
            else:
                self._pause = 0.0
                if not entry.future.done():
                    entry.future.set_result(reply)
        if self._room:
            self._make_room()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._drop()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._flush()

    # Inside

    def _push(self, push: Any) -> None:
        if push[0] == b"message":
            if on_news := self._channels.get(push[1]):
                on_news(push[2])
        elif self._sent and self._sent[0].subscribes == push[1]:
            entry = self._sent.popleft()
            if not entry.future.done():
                entry.future.set_result(None)

    def _flush(self) -> None:
        self._flush_due = False
        if self._transport is None or self._paused or not self._out:
            return
        if len(self._out) == 1:
            entry = self._out.popleft()
            self._sent.append(entry)
            self._transport.write(entry.packed)
            return
        self._transport.write(b"".join([entry.packed for entry in self._out]))
        self._sent.extend(self._out)
        self._out.clear()

    def _drop(self) -> None:
        """Leave the connection; what is out goes first on the next one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        self._paused = False
        self._parser = hiredis.Reader(replyError=ServerError)
        unanswered = [
            entry
            for entry in self._sent
            # A channel that is no longer wanted is not subscribed to on the next connection.
            if not entry.future.done()
            and (entry.subscribes is None or entry.subscribes in self._channels)
        ]
        self._sent.clear()
        self._out.extendleft(reversed(unanswered))
        if not self._closed and (self._out or self._channels):
            self._open()

    def _open(self) -> None:
        if self._opening is None or self._opening.done():
            self._opening = self._loop.create_task(self._reconnect(), name="retrysafe-connect")

    async def _reconnect(self) -> None:
        delay = 0.01
        if self._pause:  # a server that connects but can't serve is not asked without a break
            await asyncio.sleep(self._pause)
        while not self._closed:
            try:
                async with asyncio.timeout(self._deadline):
                    connection = await self._connect()
                break
            except (OSError, redis_errors.RedisError, TimeoutError) as error:
                self._trouble = f"{type(error).__name__}: {error}"
                if isinstance(error, redis_errors.AuthenticationError):
                    self._fail_all(self._trouble)
                if not self._out and not self._channels:
                    return
                await asyncio.sleep(delay)
                delay = min(delay * 2, 0.5)
        if self._closed:
            return
        self._adopt(connection)
        asked = {entry.subscribes for entry in self._out}
        for channel in [channel for channel in self._channels if channel not in asked]:
            future = self.enqueue(pack("SUBSCRIBE", channel), channel)
            future.add_done_callback(partial(self._resubscribed, channel))
        self._last_reply = self._loop.time()
        self._flush()

    def _adopt(self, connection: Any) -> None:
        transport = connection._writer.transport
        transport.set_protocol(self)
        # Kept: stream writers and redis-py's connections close their socket when collected.
        self._connection = connection
        self.generation += 1
        self._transport = transport
        self._trouble = ""

    def _resubscribed(self, channel: bytes, future: asyncio.Future[Any]) -> None:
        confirmed = not future.cancelled() and future.exception() is None
        if confirmed and (on_news := self._channels.get(channel)):
            on_news(None)

    def _sweep_later(self) -> None:
        self._sweep_due = self._loop.time() + _SWEEP
        self._sweeper = self._loop.call_at(self._sweep_due, self._sweep)

    def _sweep(self) -> None:
        """Fail what is past its deadline; a reply that never comes condemns the connection."""
        self._sweeper = None
        now = self._loop.time()
        late = now - self._sweep_due
        if late > _BLOCKED:
            # The loop stood still: commands may be on their way only now, or replies be unread.
            # That time is not the server's.
            for entry in (*self._sent, *self._out):
                entry.deadline = min(entry.deadline + late, now + self._deadline)
            self._sweep_later()
            return
        stuck = bool(self._sent) and self._sent[0].deadline < now
        for queue in (self._sent, self._out):
            for entry in queue:
                if entry.deadline >= now:
                    break
                if not entry.future.done():
                    entry.future.set_exception(StoreUnavailable(reason=self._unanswered()))
        while self._out and self._out[0].future.done():
            self._out.popleft()
        if stuck:
            self._drop()
        elif (
            self._channels
            and self._transport is not None
            and not self._sent
            and now - self._last_reply > _PING_AFTER
        ):
            self.enqueue(pack("PING")).add_done_callback(_unheeded)
        if self._room:
            self._make_room()
        if self._sweeper is None and (self._sent or self._out or self._channels):
            self._sweep_later()

    def _unanswered(self) -> str:
        reason = f"no answer within {self._deadline:g} s"
        return f"{reason}; {self._trouble}" if self._trouble else reason

    def _fail_all(self, reason: str) -> None:
        for entry in (*self._sent, *self._out):
            if not entry.future.done():
                entry.future.set_exception(StoreUnavailable(reason=reason))
        self._sent.clear()
        self._out.clear()
        self._make_room()

    async def _wait_for_room(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._room.append(future)
        await future

    def _make_room(self) -> None:
        free = _LIMIT - len(self._out) - len(self._sent)
        while self._room and free > 0:
            waiting = self._room.popleft()
            if not waiting.done():
                waiting.set_result(None)
                free -= 1
