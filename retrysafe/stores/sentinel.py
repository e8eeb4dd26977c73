"""Receipts on the primary that Redis Sentinel names: asked at each connection, checked by its role.

A primary that was demoted answers READONLY, one that hangs answers nothing: both end the
connection, and the next one goes where the sentinels say by then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from retrysafe.stores.hosts import Address, Hosts, read_hosts
from retrysafe.stores.redis import (
    CONNECTION_OPTIONS,
    AsyncRedisBackend,
    RedisBackend,
    blocking_pool,
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
        return RedisBackend(
            redis.Redis(connection_pool=_pool(self._hosts)), self.namespace, self.replicas
        )

    def open_async(self) -> AsyncRedisBackend:
        return AsyncRedisBackend(_connector(self._hosts), self.namespace, self.replicas)

    def __repr__(self) -> str:
        return f"SentinelStore(service={self._hosts.service!r}, namespace={self.namespace!r})"


class _Sentinels:
    """Their order: who answered last is asked first."""

    def __init__(self, hosts: Hosts) -> None:
        self._order = list(hosts.addresses)
        self._lock = threading.Lock()

    def in_turn(self) -> list[Address]:
        with self._lock:
            return list(self._order)

    def note(self, address: Address, answered: bool) -> None:
        with self._lock:
            self._order.remove(address)
            self._order.insert(0 if answered else len(self._order), address)


def _connector(hosts: Hosts) -> Callable[[], Awaitable[Any]]:
    sentinels = _Sentinels(hosts)
    kind = aioredis.SSLConnection if hosts.tls else aioredis.Connection
    asking = {**_ASK, **hosts.sentinel_options, "ssl": hosts.sentinel_tls}

    async def primary() -> Address:
        reason = _NO_PRIMARY
        for address in sentinels.in_turn():
            sentinel = aioredis.Sentinel(  # type: ignore[no-untyped-call]
                [address], sentinel_kwargs={**asking, "retry": AsyncRetry(NoBackoff(), 0)}
            )
            try:
                found: Address = await sentinel.discover_master(hosts.service)
            except redis.RedisError as error:
                sentinels.note(address, answered=False)
                reason = _why(error, reason)
            else:
                sentinels.note(address, answered=True)
                return found
            finally:
                await sentinel.sentinels[0].aclose()
        raise redis.ConnectionError(reason)

    async def connect() -> Any:
        host, port = await primary()
        connection: Any = kind(
            host=host,
            port=port,
            protocol=3,
            retry=AsyncRetry(NoBackoff(), 0),
            **CONNECTION_OPTIONS,
            **hosts.options,
        )
        try:
            await connection.connect()
            try:
                await connection.send_command("ROLE")
                _check_role(await connection.read_response())
            except redis.exceptions.NoPermissionError:
                pass  # without the right to ask: a replica's READONLY will tell
        except BaseException:
            await asyncio.shield(connection.disconnect(nowait=True))
            raise
        return connection

    return connect


def _pool(hosts: Hosts) -> redis.BlockingConnectionPool:
    sentinels = _Sentinels(hosts)
    asking = {**_ASK, **hosts.sentinel_options, "ssl": hosts.sentinel_tls}

    def primary() -> Address:
        reason = _NO_PRIMARY
        for address in sentinels.in_turn():
            sentinel = redis.Sentinel(  # type: ignore[no-untyped-call]
                [address], sentinel_kwargs={**asking, "retry": Retry(NoBackoff(), 0)}
            )
            try:
                found: Address = sentinel.discover_master(hosts.service)  # type: ignore[no-untyped-call]
            except redis.RedisError as error:
                sentinels.note(address, answered=False)
                reason = _why(error, reason)
            else:
                sentinels.note(address, answered=True)
                return found
            finally:
                sentinel.sentinels[0].close()
        raise redis.ConnectionError(reason)

    kind = redis.SSLConnection if hosts.tls else redis.Connection

    class PrimaryConnection(kind):  # type: ignore[misc,valid-type]
        """A connection that looks up where it goes, each time it is opened."""

        def connect(self) -> None:
            if self._sock:
                return
            self.host, self.port = primary()
            super().connect()
            try:
                self.send_command("ROLE")
                _check_role(self.read_response())
            except redis.exceptions.NoPermissionError:
                pass  # without the right to ask: a replica's READONLY will tell
            except BaseException:
                self.disconnect()
                raise

    return blocking_pool(connection_class=PrimaryConnection, **hosts.options)


def _check_role(reply: Any) -> None:
    if not isinstance(reply, list) or not reply or reply[0] != b"master":
        raise redis.ConnectionError("the sentinels' primary is none (any more)")


def _why(error: redis.RedisError, known: str) -> str:
    """The sentinels' errors hold addresses, and maybe more: only their kind is told."""
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.ResponseError):
        return f"a sentinel refused to answer: {type(error).__name__}"
    return known
