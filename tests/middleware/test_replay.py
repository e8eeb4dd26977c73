"""What a replay carries, and what it leaves out."""

from __future__ import annotations

import asyncio
from typing import Any

from retrysafe.events import listening
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware
from retrysafe.middleware.response_record import decode, encode
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.asgi import Answer, post
from tests.support import run

Pairs = list[tuple[bytes, bytes]]


def answering(status: int, headers: Pairs, body: bytes = b"") -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


async def twice(app: Any) -> tuple[Answer, Answer]:
    target = IdempotencyMiddleware(app, store=MemoryStore())
    first, again = await post(target), await post(target)
    assert again.replayed
    return first, again


def test_markers_of_a_protected_service_behind_the_app_are_not_replayed_as_ours() -> None:
    behind = [(b"idempotent-replayed", b"true"), (b"idempotent-original-request-id", b"theirs")]

    async def main() -> None:
        first, again = await twice(answering(201, behind))
        assert again.header("idempotent-replayed") == "true"
        assert again.header("idempotent-original-request-id") == first.header("x-request-id")

    run(main())


def test_I27_a_header_that_connection_names_is_hop_by_hop_too() -> None:
    headers = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"x-end", b"2")]

    async def main() -> None:
        first, again = await twice(answering(200, headers))
        assert first.header("x-hop") == "1"
        assert again.header("connection") is again.header("x-hop") is None
        assert again.header("x-end") == "2"

    run(main())


def test_I27_O65_a_replayed_204_has_no_content_length() -> None:
    async def main() -> None:
        _, again = await twice(answering(204, [(b"content-length", b"0")]))
        assert (again.status, again.body) == (204, b"")
        assert again.header("content-length") is None

    run(main())


def test_B049_credentials_in_trailers_are_not_stored() -> None:
    trailers = [(b"set-cookie", b"secret=1"), (b"digest", b"d")]
    stored = decode(encode(200, [], b"", trailers, b"x-request-id"))
    assert stored.trailers == [(b"digest", b"d")]


def test_O92_an_unprotected_run_carries_the_request_id_once() -> None:
    seen: list[str] = []

    async def check(headers: Pairs, expected: str) -> None:
        store = RedisStore("redis://127.0.0.1:1/0", "replay")
        policy = IdempotencyPolicy(on_store_error="run")
        target = IdempotencyMiddleware(answering(200, headers), policy=policy, store=store)
        inbound = [("X-Request-ID", "mine")]
        alone, under = await asyncio.gather(
            post(target, headers=inbound), post(RequestIdMiddleware(target), headers=inbound)
        )
        assert alone.header("x-request-id") == expected
        assert under.header("x-request-id") == "mine"
        assert alone.header("idempotent-unprotected") == "true"

    async def main() -> None:
        await asyncio.gather(check([], "mine"), check([(b"x-request-id", b"own")], "own"))

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert seen.count("unprotected") == 4
