"""The load: POSTs over raw sockets, as cheap as Python makes them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.apps import ANSWER


@dataclass(slots=True)
class Load:
    """What came back."""

    answers: int = 0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    bodies: list[bytes] = field(default_factory=list)
    last: float = 0.0
    """When the last answer came, on the machine's monotonic clock."""


def post(key: str, path: str = "/orders") -> bytes:
    """One request with a JSON body of 300 bytes."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(ANSWER)}\r\nidempotency-key: {key}\r\n\r\n"
    )
    return head.encode() + ANSWER


class _Connection(asyncio.Protocol):
    """Sends the next request when the last one is answered."""

    def __init__(self, load: Load, following: Callable[[], bytes | None], bodies: bool) -> None:
        self.load = load
        self.following = following
        self.bodies = bodies
        self.buffer = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def start(self) -> None:
        request = self.following()
        if request is None:
            if not self.done.done():
                self.done.set_result(None)
            self.transport.close()
        else:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.buffer = data = self.buffer + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return
        at = data.lower().find(b"content-length:", 0, end)
        if at < 0:
            if not data.endswith(b"0\r\n\r\n"):
                return
        elif len(data) < end + 4 + int(data[at + 15 : data.find(b"\r", at)]):
            return
        self.buffer = b""
        load = self.load
        load.answers += 1
        load.statuses[int(data[9:12])] += 1
        load.last = time.monotonic()
        if self.bodies:
            load.bodies.append(data[end + 4 :])
        self.start()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the app closed the connection"))


async def _run(
    port: int, connections: int, following: Callable[[], bytes | None], bodies: bool, limit: float
) -> Load:
    loop, load = asyncio.get_running_loop(), Load()
    made: list[_Connection] = []
    for _ in range(connections):
        _, connection = await loop.create_connection(
            lambda: _Connection(load, following, bodies), "127.0.0.1", port
        )
        made.append(connection)
    began = time.monotonic()
    for connection in made:
        connection.start()
    async with asyncio.timeout(limit):
        await asyncio.gather(*(connection.done for connection in made))
    load.seconds = time.monotonic() - began
    return load


def run_for(port: int, seconds: float, keys: Iterator[str], connections: int = 64) -> Load:
    """Closed-loop load for some seconds, each request with the next key."""
    end = time.monotonic() + seconds

    def following() -> bytes | None:
        return post(next(keys)) if time.monotonic() < end else None

    return _loop(_run(port, connections, following, False, seconds + 30))


def run_once(
    port: int, keys: list[str], connections: int, path: str = "/orders", bodies: bool = False
) -> Load:
    """Each key once, over so many connections."""
    left = iter(keys)

    def following() -> bytes | None:
        key = next(left, None)
        return None if key is None else post(key, path)

    return _loop(_run(port, connections, following, bodies, 60))


def _loop(main: Coroutine[Any, Any, Load]) -> Load:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
