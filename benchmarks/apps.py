"""The contenders over HTTP: the same endpoint behind each library, in a process of its own.

`python -m benchmarks.apps NAME URL DESCRIPTOR` serves on a listening socket that it inherits, and
ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

ANSWER = json.dumps({"order": "o-1", "cents": 1000, "note": "x" * 256}).encode()
SLOW = 0.5
"""Seconds that the work behind /slow takes."""

POOL = 500
"""Connections that redis-py may open for a peer: none of them is measured by its pool's limit."""


async def _order(request: Request) -> Response:
    """Reads a JSON body and answers 300 bytes of JSON; /slow works, and says when it was done."""
    await request.json()
    body = await _work(request.scope["path"])
    return Response(body, 201, media_type="application/json")


app = Starlette(
    routes=[Route(path, _order, methods=["POST"]) for path in ("/orders", "/slow")],
)
"""The least that a service does with a request: what is measured is what comes on top of it."""


async def _work(path: str) -> bytes:
    if path != "/slow":
        return ANSWER
    await asyncio.sleep(SLOW)
    return json.dumps({"done": time.monotonic()}).encode()


async def _answer(send: Any, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _redis(url: str) -> Any:
    import redis.asyncio as aioredis

    return aioredis.Redis.from_url(url, max_connections=POOL)


def empty(url: str) -> Any:
    return app


def two_sets(url: str) -> Any:
    client, numbers = _redis(url), itertools.count()

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            name = f"raw-{next(numbers)}"
            await client.set(name, b"running", px=600_000, nx=True)
            await client.set(name, ANSWER, px=600_000)
        await app(scope, receive, send)

    return wrapped


def two_sets_shared(url: str) -> Any:
    """The same over the connection that retrysafe's calls share: what two commands must cost."""
    from retrysafe.stores import open_store
    from retrysafe.stores.doors import async_door

    store, numbers = open_store(url), itertools.count()

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            name = f"raw-{next(numbers)}"
            door: Any = async_door(store)
            await door.command("SET", name, b"running", "PX", 600_000, "NX")
            await door.command("SET", name, ANSWER, "PX", 600_000)
        await app(scope, receive, send)

    return wrapped


def retrysafe(url: str) -> Any:
    from retrysafe.middleware import IdempotencyMiddleware
    from retrysafe.stores import open_store

    return IdempotencyMiddleware(app, store=open_store(url))


def idemkit(url: str) -> Any:
    from idemkit import HttpConfig, IdempotencyMiddleware, RedisBackend

    config = HttpConfig(scope_mode="single_tenant")
    return IdempotencyMiddleware(app, backend=RedisBackend(_redis(url)), config=config)


def fastapi_idempotency_key(url: str) -> Any:
    from fastapi_idempotency_key import IdempotencyMiddleware, RedisBackend

    return IdempotencyMiddleware(app, backend=RedisBackend(_redis(url)), timeout=10.0)


def asgi_idempotency_header(url: str) -> Any:
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import RedisBackend

    return IdempotencyHeaderMiddleware(app, backend=RedisBackend(_redis(url)))


def pyidempotent(url: str) -> Any:
    """It wraps a handler: the least around it that makes an ASGI app of one."""
    from pyidempotent import idempotent
    from pyidempotent.backends.redis import RedisBackend

    @idempotent(backend=RedisBackend(_redis(url)))
    async def handler(request: Request, body: str) -> Any:
        return json.loads(await _work(request.scope["path"]))

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await _lifespan(receive, send)
        if scope["method"] != "POST":
            return await app(scope, receive, send)
        request = Request(scope, receive)
        result = await handler(request, body=(await request.body()).decode())
        await _answer(send, json.dumps(result).encode())

    return wrapped


CONTENDERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    # name: the module it needs, what makes its app
    "empty app": ("uvicorn", empty),
    "two SETs by redis-py": ("redis", two_sets),
    "two SETs by our connection": ("retrysafe", two_sets_shared),
    "retrysafe": ("retrysafe", retrysafe),
    "idemkit": ("idemkit", idemkit),
    "fastapi-idempotency-key": ("fastapi_idempotency_key", fastapi_idempotency_key),
    "pyidempotent": ("pyidempotent", pyidempotent),
    "asgi-idempotency-header": ("idempotency_header_middleware", asgi_idempotency_header),
}
FLOORS = ("empty app", "two SETs by redis-py", "two SETs by our connection")


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _end_with_the_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    import uvicorn

    name, url, descriptor = sys.argv[1:]
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    fast = installed("uvloop") and installed("httptools")
    config = uvicorn.Config(
        CONTENDERS[name][1](url),
        loop="uvloop" if fast else "asyncio",
        http="httptools" if fast else "h11",
        log_level="critical",
        access_log=False,
        timeout_keep_alive=3600,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(descriptor))])


if __name__ == "__main__":
    main()
