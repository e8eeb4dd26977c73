"""Receipts in a Cluster: one connection (async) or pool (sync) per node, each command where its
key's slot is.

Messages reach every node, so subscriptions stand on any one of them, and on another when it is
gone. A node that is down costs the keys of its slots alone.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff

from retrysafe.errors import StoreUnavailable
from retrysafe.stores.base import OnNews
from retrysafe.stores.hosts import Address, Hosts, read_hosts
from retrysafe.stores.listener import Listener
from retrysafe.stores.multiplexer import Multiplexer, Retired, ServerError, pack
from retrysafe.stores.pool import ThreadPool
from retrysafe.stores.redis import (
    COMMAND_DEADLINE,
    CONNECTION_OPTIONS,
    AsyncRedisBackend,
    RedisBackend,
    thread_pool,
)
from retrysafe.stores.replicas import AsyncReplication, confirm_now
from retrysafe.stores.topology import (
    LOST,
    REDIRECTS,
    Pause,
    Refresh,
    Refusal,
    Send,
    Topology,
    key_of,
    route,
)

# One node's whole answer to "connect", or to "who serves what" (seconds): another may be asked.
_ONE_NODE = 0.5
# The map is not asked for again within (seconds).
_FRESH = 0.1

AsyncSend = Callable[[Address, bool], Awaitable[Any]]


class ClusterStore:
    """A Cluster, by some of its nodes: `redis+cluster://h1,h2:6379`.

    Raises ValueError for a URL that can't be used.
    """

    def __init__(self, url: str, namespace: str = "retrysafe", replicas: int = 0) -> None:
        self.url = url
        self.namespace = namespace
        self.replicas = replicas
        self._hosts = read_hosts(url)

    def open(self) -> ClusterBackend:
        return ClusterBackend(self._hosts, self.namespace, self.replicas)

    def open_async(self) -> AsyncClusterBackend:
        return AsyncClusterBackend(self._hosts, self.namespace, self.replicas)

    def __repr__(self) -> str:
        return f"ClusterStore(namespace={self.namespace!r})"


class _Nodes:
    """What the lanes of one event loop share: the map, and how to reach a node."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._kind = aioredis.SSLConnection if hosts.tls else aioredis.Connection
        self.topology = Topology(hosts.addresses)
        self.trouble = "no node of the cluster answers"
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed = -_FRESH

    async def dial(self, address: Address) -> Any:
        """A connection to one node. Raises OSError, TimeoutError and redis-py's errors."""
        connection: Any = self._kind(
            host=address[0],
            port=address[1],
            protocol=3,
            retry=AsyncRetry(NoBackoff(), 0),
            **CONNECTION_OPTIONS,
            **self._hosts.options,
        )
        try:
            async with asyncio.timeout(_ONE_NODE):
                await connection.connect()
        except BaseException:
            await asyncio.shield(connection.disconnect(nowait=True))
            raise
        return connection

    async def dial_any(self) -> Any:
        """A connection to whichever node answers, not the same one for all processes."""
        await self.refresh()
        masters = [*self.topology.masters]
        random.shuffle(masters)
        for address in masters:
            try:
                return await self.dial(address)
            except (OSError, TimeoutError, redis.RedisError):
                continue
        raise redis.ConnectionError(self.trouble)

    async def refresh(self) -> None:
        """Ask for the map, together with whoever asks at this moment."""
        if self._refreshing is None or self._refreshing.done():
            if time.monotonic() - self._refreshed < _FRESH:
                return
            self._refreshing = asyncio.create_task(self._refresh(), name="retrysafe-cluster")
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        for address in self.topology.nodes():
            connection = None
            try:
                connection = await self.dial(address)
                async with asyncio.timeout(_ONE_NODE):
                    await connection.send_command("CLUSTER", "SLOTS")
                    slots = await connection.read_response()
                if self.topology.learn(slots, address):
                    self._refreshed = time.monotonic()
                    return
            except (OSError, TimeoutError, redis.RedisError) as error:
                self.trouble = _trouble(error)
            finally:
                if connection is not None:
                    await connection.disconnect(nowait=True)
            self.topology.failed(address)

    async def close(self) -> None:
        """End what is asked at this moment."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing])


class _Lanes:
    """One connection per node."""

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._lanes: dict[Address, Multiplexer] = {}

    def lane(self, address: Address) -> Multiplexer:
        found = self._lanes.get(address)
        if found is None:

            async def connect() -> Any:
                try:
                    return await self._nodes.dial(address)
                except (OSError, TimeoutError, redis.RedisError):
                    self._nodes.topology.failed(address)
                    await self._nodes.refresh()
                    if address not in self._nodes.topology.masters:
                        # Another serves its slots: what waits here is sent there.
                        if self._lanes.get(address) is made:
                            del self._lanes[address]
                        made.retire()
                    raise

            made = found = self._lanes[address] = Multiplexer(
                connect, COMMAND_DEADLINE, elsewhere=("LOADING", "MASTERDOWN")
            )
        return found

    async def close(self) -> None:
        for lane in self._lanes.values():
            await lane.close()


class _ClusterLane:
    """Looks like one connection; is one per node, and one for messages."""

    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._lanes = _Lanes(nodes)
        self._ears: Multiplexer | None = None

    async def send(self, *args: bytes | str | int) -> Any:
        """One command's reply. Raises StoreUnavailable past the deadline, ServerError."""
        key = key_of(args)
        if key is None:
            return await self._any_node.send(*args)

        def send(address: Address, asking: bool) -> Awaitable[Any]:
            lane = self._lanes.lane(address)
            if not asking:
                return lane.send(*args)
            lane.enqueue(pack("ASKING")).add_done_callback(_unheeded)
            return lane.enqueue(pack(*args))

        return await routed(self._nodes, key, send)

    def node(self, address: Address) -> Multiplexer:
        """The connection to one node."""
        return self._lanes.lane(address)

    @property
    def _any_node(self) -> Multiplexer:
        if self._ears is None:
            self._ears = Multiplexer(self._nodes.dial_any, COMMAND_DEADLINE)
        return self._ears

    async def subscribe(self, channel: bytes, on_news: OnNews) -> None:
        await self._any_node.subscribe(channel, on_news)

    def unsubscribe(self, channel: bytes) -> None:
        self._any_node.unsubscribe(channel)

    async def close(self) -> None:
        await self._lanes.close()
        if self._ears is not None:
            await self._ears.close()


async def routed(nodes: _Nodes, key: bytes, send: AsyncSend) -> Any:
    """Drive `route` on an event loop. Raises StoreUnavailable past the deadline, ServerError."""
    way = route(nodes.topology, key)
    reason = ""
    answer: Any = None
    try:
        async with asyncio.timeout(COMMAND_DEADLINE):
            while True:
                try:
                    step = way.send(answer)
                except StopIteration as reached:
                    return reached.value
                answer = None
                if isinstance(step, Send):
                    try:
                        answer = await send(step.address, step.asking)
                    except Retired:
                        answer = Refusal(LOST, "the node has left")
                    except ServerError as error:
                        word, _, rest = str(error).partition(" ")
                        if word not in REDIRECTS:
                            raise
                        answer = Refusal(word, rest)
                elif isinstance(step, Pause):
                    reason = step.reason
                    await asyncio.sleep(step.seconds)
                else:
                    await nodes.refresh()
    except TimeoutError:
        if not nodes.topology.masters:
            reason = nodes.trouble
        raise StoreUnavailable(
            reason=reason or f"no answer within {COMMAND_DEADLINE:g} s"
        ) from None


class AsyncClusterBackend(AsyncRedisBackend):
    """The door of one event loop."""

    def __init__(self, hosts: Hosts, namespace: str, replicas: int) -> None:
        self._nodes = _Nodes(hosts)
        self._waiting = _Lanes(self._nodes)  # for replicas: WAIT holds a connection up
        self._replications: dict[Multiplexer, AsyncReplication] = {}
        super().__init__(self._nodes.dial_any, namespace, replicas)

    def _lane(self) -> Any:
        return _ClusterLane(self._nodes)

    async def _primaries(self) -> list[Any]:
        await self._nodes.refresh()
        if not self._nodes.topology.masters:
            raise StoreUnavailable(reason=self._nodes.trouble)
        return [self._main.node(each) for each in sorted(self._nodes.topology.masters)]

    async def _confirm(self, key: bytes, token: bytes) -> None:
        def send(address: Address, asking: bool) -> Awaitable[None]:
            lane = self._waiting.lane(address)
            found = self._replications.get(lane)
            if found is None:
                found = AsyncReplication(lane, self._replicas, COMMAND_DEADLINE)
                self._replications = {
                    each: kept for each, kept in self._replications.items() if not each.retired
                }
                self._replications[lane] = found
            return found.confirm(key, token, asking=asking)

        await routed(self._nodes, key, send)

    async def close(self) -> None:
        await super().close()
        await self._waiting.close()
        await self._nodes.close()


class ClusterBackend(RedisBackend):
    """The door of one process, for threads."""

    def __init__(self, hosts: Hosts, namespace: str, replicas: int) -> None:
        self._hosts = hosts
        self._topology = Topology(hosts.addresses)
        self._pools: dict[Address, ThreadPool] = {}
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._refreshed = -_FRESH
        self._doubted = False
        self._trouble = "no node of the cluster answers"
        super().__init__(self._at(hosts.addresses[0]), namespace, replicas)

    def _at(self, address: Address) -> ThreadPool:
        with self._lock:
            found = self._pools.get(address)
            if found is None:
                options = dict(self._hosts.options)
                if self._hosts.tls:
                    options["connection_class"] = redis.SSLConnection
                found = thread_pool(host=address[0], port=address[1], **options)
                self._pools[address] = found
            return found

    def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        with self._listening:
            if self._listener is None:
                self._listener = Listener(self._ears)
            listener = self._listener
        return listener.subscribe(channel, on_news, limit)

    def close(self) -> None:
        super().close()
        for pool in list(self._pools.values()):
            pool.disconnect()

    def _ears(self) -> Any:
        """A connection to whichever node answers."""
        self._refresh(time.monotonic() + COMMAND_DEADLINE)
        masters = [*self._topology.masters]
        random.shuffle(masters)
        for address in masters:
            pool = self._at(address)
            connection = pool.connection_class(**pool.connection_kwargs)
            try:
                connection.connect()
            except (OSError, redis.RedisError):
                continue
            return connection
        raise redis.ConnectionError(self._trouble)

    def _send(self, *args: Any, end: float) -> Any:
        key, packed = key_of(args), pack(*args)
        if key is None:
            self._refresh(end)
            return self._insist(
                lambda: self._at(self._topology.nodes()[0]).exchange(packed, end=end)[0], end
            )

        def send(pool: ThreadPool, asking: bool) -> Any:
            return pool.exchange(*((pack("ASKING"),) if asking else ()), packed, end=end)[-1]

        return self._routed(key, send, end)

    def _confirm(self, key: bytes, token: bytes, end: float) -> None:
        def confirm(pool: ThreadPool, asking: bool) -> None:
            confirm_now(pool, key, token, self._replicas, end, asking=asking)

        self._routed(key, confirm, end)

    def _routed(self, key: bytes, send: Callable[[ThreadPool, bool], Any], end: float) -> Any:
        """Drive `route` on a thread."""
        if self._doubted:
            self._refresh(end)
        way = route(self._topology, key)
        answer: Any = None
        while True:
            try:
                step = way.send(answer)
            except StopIteration as reached:
                return reached.value
            answer = None
            if isinstance(step, Send):
                try:
                    answer = send(self._at(step.address), step.asking)
                except redis.exceptions.NoScriptError:
                    raise
                except (redis.AuthenticationError, redis.TimeoutError) as error:
                    if isinstance(error, redis.TimeoutError):
                        # It hangs: another may serve its slots by the next call, which asks.
                        self._topology.failed(step.address)
                        self._doubted = True
                    raise StoreUnavailable(reason=f"{type(error).__name__}: {error}") from error
                except redis.RedisError as error:
                    answer = _refusal(error)
                    if answer is None:
                        raise StoreUnavailable(reason=f"{type(error).__name__}: {error}") from error
            elif isinstance(step, Pause):
                if time.monotonic() + step.seconds >= end:
                    known = self._topology.masters
                    raise StoreUnavailable(reason=step.reason if known else self._trouble)
                time.sleep(step.seconds)
            elif isinstance(step, Refresh):
                self._refresh(end)

    def _refresh(self, end: float) -> None:
        asked = time.monotonic()
        if not self._refreshing.acquire(timeout=max(0.0, end - asked)):
            return
        try:
            # Whoever waited finds it done, or finds that it can't be at the moment.
            if self._refreshed > asked or time.monotonic() - self._refreshed < _FRESH:
                return
            for address in self._topology.nodes():
                if time.monotonic() >= end:
                    return
                if self._learn(address, end):
                    self._doubted = False
                    return
                self._topology.failed(address)
        finally:
            self._refreshed = time.monotonic()
            self._refreshing.release()

    def _learn(self, address: Address, end: float) -> bool:
        """Ask one node for the map, on a connection that waits less than the others."""
        pool = self._at(address)
        connection = pool.connection_class(**pool.connection_kwargs)
        connection.end = min(end, time.monotonic() + _ONE_NODE)
        try:
            connection.connect()
            connection.send_command("CLUSTER", "SLOTS")
            if not self._topology.learn(connection.read_response(), address):
                return False
        except (OSError, redis.RedisError) as error:
            self._trouble = _trouble(error)
            return False
        finally:
            connection.disconnect()
        return True


def _refusal(error: redis.RedisError) -> Refusal | None:
    """redis-py's error as the server worded it; None: the caller's."""
    e = redis.exceptions
    if isinstance(error, e.AskError):  # MovedError is one
        word = "MOVED" if isinstance(error, e.MovedError) else "ASK"
        return Refusal(word, f"{error.slot_id} {error.host}:{error.port}")
    if isinstance(error, e.TryAgainError):
        return Refusal("TRYAGAIN")
    if isinstance(error, e.ClusterDownError):
        return Refusal("CLUSTERDOWN")
    if isinstance(error, e.ReadOnlyError):
        return Refusal("READONLY")
    if isinstance(error, redis.BusyLoadingError):
        return Refusal("LOADING")
    if isinstance(error, redis.ConnectionError):
        return Refusal(LOST, type(error).__name__)
    word, _, rest = str(error).partition(" ")  # redis-py 5 has no names for some of them here
    return Refusal(word, rest) if word in ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN") else None


def _trouble(error: Exception) -> str:
    """Of the servers' errors those are told that waiting doesn't heal."""
    if isinstance(error, redis.AuthenticationError | redis.ResponseError):
        return f"the cluster's nodes refuse: {type(error).__name__}: {error}"[:200]
    return "no node of the cluster answers"


def _unheeded(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
