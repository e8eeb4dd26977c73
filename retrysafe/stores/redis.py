"""Receipts in Redis or Valkey: the async door over one multiplexed connection, the sync one over a
pool of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.utils import get_lib_version

from retrysafe.commands import Begin, Command, Finish, Reply
from retrysafe.errors import StoreUnavailable
from retrysafe.stores.base import OnMessage, OnNews, named
from retrysafe.stores.listener import Listener
from retrysafe.stores.multiplexer import Multiplexer, Retired, ServerError, pack
from retrysafe.stores.pool import ThreadPool
from retrysafe.stores.replicas import AsyncReplication, confirm_now, is_due
from retrysafe.stores.wire import Wire, script

# redis-py and sockets load modules at the first use of these, which is too late: a child that is
# forked while another thread loads one would wait for that thread without end.
_load: Any = get_lib_version  # typed in newer versions of redis-py only
_load()
"".encode("idna")

# "503 within 2 s": one command's whole time, reconnects and resends included.
COMMAND_DEADLINE = 1.5
_CONNECT_TIMEOUT = 1.0
_BULK = 64 * 1024
_PAGE = b"1000"  # keys that a server goes through before it answers a SCAN
CONNECTION_OPTIONS: dict[str, Any] = {
    "socket_connect_timeout": _CONNECT_TIMEOUT,
    "socket_timeout": COMMAND_DEADLINE,
    "decode_responses": False,
}
_RESENT = (redis.ConnectionError, redis.BusyLoadingError, redis.ReadOnlyError)


class RedisStore:
    """One Redis, by URL: `redis://`, `rediss://`, `unix://` as redis-py reads them.

    `replicas`: how many of them must hold a receipt before its work starts.
    """

    def __init__(self, url: str, namespace: str = "retrysafe", replicas: int = 0) -> None:
        self.url = url
        self.namespace = namespace
        self.replicas = replicas
        # A URL that can't be used fails here, not in traffic.
        asked = redis.ConnectionPool.from_url(url).connection_kwargs
        for option in ("protocol", "decode_responses", "encoding"):
            if option in asked:
                raise ValueError(f"the option {option!r} is not the URL's to set")

    def open(self) -> RedisBackend:
        pool = ThreadPool.from_url(self.url, **_pool_options())
        return RedisBackend(pool, self.namespace, self.replicas)

    def open_async(self) -> AsyncRedisBackend:
        # redis-py's own retries are off, here and above: what was out is resent by us.
        pool = aioredis.ConnectionPool.from_url(
            self.url, retry=AsyncRetry(NoBackoff(), 0), protocol=3, **CONNECTION_OPTIONS
        )

        async def connect() -> Any:
            connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
            await connection.connect()
            return connection

        return AsyncRedisBackend(connect, self.namespace, self.replicas)

    def __repr__(self) -> str:
        return f"RedisStore(namespace={self.namespace!r})"  # a URL may hold a password


def _pool_options() -> dict[str, Any]:
    # redis-py's own retries are off: what was out is resent by us.
    return {
        "max_connections": 64,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        **CONNECTION_OPTIONS,
    }


def thread_pool(**options: Any) -> ThreadPool:
    """A pool of connections as the sync door uses them."""
    return ThreadPool(**_pool_options(), **options)


class AsyncRedisBackend:
    """The door of one event loop: a connection for small values and messages, one for big values
    (a large value ahead in the queue would hold up every small one)."""

    def __init__(
        self, connect: Callable[[], Awaitable[Any]], namespace: str, replicas: int = 0
    ) -> None:
        self._wire = Wire(namespace)
        self._connect = connect
        self._replicas = replicas
        self._main = self._lane()
        self._bulk: Multiplexer | None = None
        self._replication: AsyncReplication | None = None

    @property
    def forgotten(self) -> bytes | None:
        return self._wire.forgotten

    def _lane(self) -> Any:
        return Multiplexer(self._connect, COMMAND_DEADLINE)

    async def execute(self, command: Command) -> Reply:
        name, key, args = self._wire.pack(command)
        lane = self._main
        if isinstance(command, Finish) and len(command.value) > _BULK:
            lane = self._bulk = self._bulk or self._lane()
        reply = self._wire.unpack(await self._run(lane, name, (key,), args))
        if self._replicas and isinstance(command, Begin | Finish) and is_due(command, reply):
            try:
                await self._confirm(key, command.token)
            except ServerError as error:
                raise _refused(error) from None
        return reply

    async def _confirm(self, key: bytes, token: bytes) -> None:
        if self._replication is None:
            self._replication = AsyncReplication(self._lane(), self._replicas, COMMAND_DEADLINE)
        await self._replication.confirm(key, token)

    async def execute_many(self, commands: Sequence[Command]) -> list[Reply | Exception]:
        async def one(command: Command) -> Reply | Exception:
            try:
                return await self.execute(command)
            except StoreUnavailable as error:
                return error

        return await asyncio.gather(*map(one, commands))

    async def eval(self, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._run(self._main, name, tuple(keys), tuple(args))

    async def command(self, *args: bytes | str | int) -> Any:
        """Any single command, for the parts that need no script."""
        try:
            return await self._main.send(*args)
        except ServerError as error:
            raise _refused(error) from None

    async def names(self, prefix: str) -> AsyncIterator[list[bytes]]:
        """The keys that begin so, a page at a time, by SCAN: one may come more than once."""
        pattern = prefix.encode() + b"*"
        for lane in await self._primaries():
            cursor = b"0"
            while True:
                try:
                    cursor, found = await lane.send(
                        b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _PAGE
                    )
                except ServerError as error:
                    raise _refused(error) from None
                except Retired:
                    raise StoreUnavailable(reason="a node has left the cluster") from None
                yield found
                if cursor == b"0":
                    break

    async def _primaries(self) -> list[Any]:
        """A connection to each server that has keys of its own."""
        return [self._main]

    async def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        return await self.subscribe(self._wire.inboxes + inbox, named(on_message), limit)

    async def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        try:
            async with asyncio.timeout(limit):
                await self._main.subscribe(channel, on_news)
        except (ServerError, StoreUnavailable, TimeoutError):
            return False
        return True

    def unsubscribe(self, channel: bytes) -> None:
        self._main.unsubscribe(channel)

    async def close(self) -> None:
        await self._main.close()
        if self._bulk is not None:
            await self._bulk.close()
        if self._replication is not None:
            await self._replication.close()

    async def _run(
        self, lane: Multiplexer, name: str, keys: tuple[Any, ...], args: tuple[Any, ...]
    ) -> Any:
        text, sha = script(name)
        try:
            return await lane.send(b"EVALSHA", sha, len(keys), *keys, *args)
        except ServerError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise _refused(error) from None
        try:
            return await lane.send(b"EVAL", text, len(keys), *keys, *args)
        except ServerError as error:
            raise _refused(error) from None


class RedisBackend:
    """The door of one process, for threads: redis-py's connections, our own resends."""

    def __init__(self, pool: ThreadPool, namespace: str, replicas: int = 0) -> None:
        self._pool = pool
        self._replicas = replicas
        self._wire = Wire(namespace)
        self._listening = threading.Lock()
        self._listener: Listener | None = None

    def execute(self, command: Command, end: float | None = None) -> Reply:
        end = _ends_by(end)
        name, key, args = self._wire.pack(command)
        reply = self._wire.unpack(self._run(name, (key,), args, end))
        if self._replicas and isinstance(command, Begin | Finish) and is_due(command, reply):
            self._confirm(key, command.token, end)
        return reply

    def _confirm(self, key: bytes, token: bytes, end: float) -> None:
        self._insist(lambda: confirm_now(self._pool, key, token, self._replicas, end), end)

    def execute_many(self, commands: Sequence[Command]) -> list[Reply | Exception]:
        answers: list[Reply | Exception] = []
        for command in commands:
            try:
                answers.append(self.execute(command))
            except StoreUnavailable as error:
                answers.append(error)
        return answers

    def eval(
        self, name: str, keys: Sequence[str], args: Sequence[Any], end: float | None = None
    ) -> Any:
        return self._run(name, tuple(keys), tuple(args), _ends_by(end))

    def command(self, *args: bytes | str | int) -> Any:
        """Any single command, for the parts that need no script."""
        return self._send(*args, end=_ends_by(None))

    def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        return self.subscribe(self._wire.inboxes + inbox, named(on_message), limit)

    def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        with self._listening:
            if self._listener is None:
                pool = self._pool
                self._listener = Listener(lambda: pool.connection_class(**pool.connection_kwargs))
            listener = self._listener
        return listener.subscribe(channel, on_news, limit)

    def unsubscribe(self, channel: bytes) -> None:
        if self._listener is not None:
            self._listener.unsubscribe(channel)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        self._pool.disconnect()

    def _run(self, name: str, keys: tuple[Any, ...], args: tuple[Any, ...], end: float) -> Any:
        text, sha = script(name)
        try:
            return self._send(b"EVALSHA", sha, len(keys), *keys, *args, end=end)
        except redis.exceptions.NoScriptError:
            return self._send(b"EVAL", text, len(keys), *keys, *args, end=end)

    def _send(self, *args: Any, end: float) -> Any:
        """One command, sent again while the connection is at fault and the time allows."""
        packed = pack(*args)
        return self._insist(lambda: self._pool.exchange(packed, end=end)[0], end)

    def _insist(self, send: Callable[[], Any], end: float) -> Any:
        delay = 0.01
        while True:
            try:
                return send()
            except redis.AuthenticationError as error:
                raise StoreUnavailable(reason=f"{type(error).__name__}: {error}") from error
            except redis.exceptions.NoScriptError:
                raise
            except _RESENT as error:
                if time.monotonic() + delay >= end:
                    raise StoreUnavailable(reason=type(error).__name__) from error
                time.sleep(delay)
                delay *= 2
            except redis.RedisError as error:
                raise StoreUnavailable(reason=f"{type(error).__name__}: {error}") from error


def _ends_by(end: float | None) -> float:
    """When a thread's command ends at the latest; `end` is its caller's word."""
    own = time.monotonic() + COMMAND_DEADLINE
    return own if end is None else min(own, end)


def _refused(error: ServerError) -> StoreUnavailable:
    return StoreUnavailable(reason=str(error)[:200])
