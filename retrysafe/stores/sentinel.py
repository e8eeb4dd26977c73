"""Receipts on the primary that Redis Sentinel names: asked at each connection, checked by its role.

A primary that was demoted answers READONLY, one that hangs answers nothing: both end the
connection, and the next one goes where the sentinels say by then.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from retrysafe.stores.hosts import Address, Hosts, read_hosts
from retrysafe.stores.pool import ThreadPool, timely
from retrysafe.stores.redis import (
    CONNECTION_OPTIONS,
    AsyncRedisBackend,
    RedisBackend,
    thread_pool,
)

# A sentinel that doesn't answer must leave time for the next one (seconds).
_ASK = {"socket_connect_timeout": 0.3, "socket_timeout": 0.4}
_NO_PRIMARY = "the sentinels name no primary that is up"


class SentinelStore:
    """The primary of one service: `redis+sentinel://h1,h2:26379/service/0`.

    Raises ValueError for a URL that can't be used.
    """

    def __init__(self, url: str, namespace: str = "retrysafe", replicas: int = 0) -> None:
        self.url = url
        self.namespace = namespace
        self.replicas = replicas
        self._hosts = read_hosts(url)

    def open(self) -> RedisBackend:
        return RedisBackend(_pool(self._hosts), self.namespace, self.replicas)

    def open_async(self) -> AsyncRedisBackend:
        return AsyncRedisBackend(_connector(self._hosts), self.namespace, self.replicas)

    def __repr__(self) -> str:
        return f"SentinelStore(service={self._hosts.service!r}, namespace={self.namespace!r})"


class _Search:
    """One search for the primary: each sentinel's word is tried, who was right last time first.

    In a failover some know the new primary before others do, and one that is cut off may name an
    old one for ever: an address is as good as its role.
    """

    def __init__(self, order: list[Address], lock: threading.Lock) -> None:
        self._order = order
        self._lock = lock
        self._tried: set[Address] = set()
        self._reason = _NO_PRIMARY
        with lock:
            self.sentinels = list(order)

    def named(self, reply: Any) -> Address:
        """The address in a sentinel's reply. Raises redis.ConnectionError."""
        if not isinstance(reply, list) or len(reply) != 2:
            raise redis.ConnectionError("a sentinel knows no such service")
        address = (_text(reply[0]), int(reply[1]))
        if address in self._tried:
            raise redis.ConnectionError("the other sentinel's word was tried")
        self._tried.add(address)
        return address

    def found(self, sentinel: Address) -> None:
        with self._lock:
            self._order.remove(sentinel)
            self._order.insert(0, sentinel)

    def failed(self, error: Exception) -> None:
        """The next one's turn. What a server says may hold addresses: only its kind is told."""
        if isinstance(error, redis.AuthenticationError | redis.ResponseError):
            self._reason = f"no primary: a server refused: {type(error).__name__}"

    def error(self) -> redis.ConnectionError:
        """In the end. What a wrong password causes is final, all else may heal in a moment."""
        if self._reason == _NO_PRIMARY:
            return redis.ConnectionError(self._reason)
        return redis.AuthenticationError(self._reason)


def _question(service: str) -> tuple[str, str, str]:
    return "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_role(reply: Any) -> None:
    if not isinstance(reply, list) or not reply or reply[0] != b"master":
        raise redis.ConnectionError("what the sentinels name is no primary (any more)")


def _connector(hosts: Hosts) -> Callable[[], Awaitable[Any]]:
    order, lock = list(hosts.addresses), threading.Lock()

    async def opened(address: Address, tls: bool, options: dict[str, Any], *words: str) -> Any:
        """A connection, and the reply to its first command."""
        kind = aioredis.SSLConnection if tls else aioredis.Connection
        connection: Any = kind(
            host=address[0],
            port=address[1],
            protocol=3,
            retry=AsyncRetry(NoBackoff(), 0),
            **{**CONNECTION_OPTIONS, **options},
        )
        try:
            await connection.connect()
            await connection.send_command(*words)
            try:
                return connection, await connection.read_response()
            except redis.exceptions.NoPermissionError as refused:
                return connection, refused
        except BaseException:
            await asyncio.shield(connection.disconnect(nowait=True))
            raise

    async def connect() -> Any:
        search = _Search(order, lock)
        for sentinel in search.sentinels:
            connection = None
            try:
                asked, reply = await opened(
                    sentinel,
                    hosts.sentinel_tls,
                    {**_ASK, **hosts.sentinel_options},
                    *_question(hosts.service),
                )
                await asked.disconnect(nowait=True)
                primary = search.named(reply)
                connection, role = await opened(primary, hosts.tls, hosts.options, "ROLE")
                # Without the right to ask, a replica's READONLY will tell.
                if not isinstance(role, redis.exceptions.NoPermissionError):
                    _check_role(role)
            except (OSError, redis.RedisError) as error:
                if connection is not None:
                    await connection.disconnect(nowait=True)
                search.failed(error)
            else:
                search.found(sentinel)
                return connection
        raise search.error()

    return connect


def _pool(hosts: Hosts) -> ThreadPool:
    order, lock = list(hosts.addresses), threading.Lock()
    kind = redis.SSLConnection if hosts.tls else redis.Connection
    asking = timely(redis.SSLConnection if hosts.sentinel_tls else redis.Connection)

    def ask(sentinel: Address, end: float | None) -> Any:
        connection: Any = asking(
            host=sentinel[0],
            port=sentinel[1],
            retry=Retry(NoBackoff(), 0),
            **{**CONNECTION_OPTIONS, **_ASK, **hosts.sentinel_options},
        )
        connection.end = end
        try:
            connection.connect()
            connection.send_command(*_question(hosts.service))
            return connection.read_response()
        finally:
            connection.disconnect()

    class PrimaryConnection(kind):  # type: ignore[misc,valid-type]
        """A connection that looks up where it goes, each time it is opened."""

        end: float | None

        def connect(self) -> None:
            if self._sock:
                return
            search = _Search(order, lock)
            for sentinel in search.sentinels:
                if self.end is not None and time.monotonic() >= self.end:
                    break
                try:
                    self.host, self.port = search.named(ask(sentinel, self.end))
                    super().connect()
                    try:
                        self.send_command("ROLE")
                        _check_role(self.read_response())
                    except redis.exceptions.NoPermissionError:
                        pass  # without the right to ask: a replica's READONLY will tell
                except (OSError, redis.RedisError) as error:
                    self.disconnect()
                    search.failed(error)
                else:
                    search.found(sentinel)
                    return
            raise search.error()

    return thread_pool(connection_class=PrimaryConnection, **hosts.options)
