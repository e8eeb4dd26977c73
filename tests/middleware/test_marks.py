"""Endpoints marked with `@idempotency`: found wherever they are, or refused at start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.endpoints import HTTPEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Host, Mount, Route

from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware, idempotency
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores.memory import MemoryStore
from tests.asgi import post
from tests.support import run

STRICT = IdempotencyPolicy(require_key=True)


@idempotency(STRICT)
async def strict(request: Request) -> Response:
    return PlainTextResponse("strict")


async def loose(request: Request) -> Response:
    return PlainTextResponse("loose")


def around(app: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, store=MemoryStore())


def routed(*routes: Any) -> Starlette:
    return Starlette(routes=list(routes))


def test_B056_a_mark_is_found_through_middleware_between_us_and_the_app() -> None:
    async def main() -> None:
        app = routed(Route("/", strict, methods=["POST"]))
        for target in (
            around(GZipMiddleware(app)),
            around(RequestIdMiddleware(GZipMiddleware(app))),
        ):
            assert (await post(target, key=None)).status == 400
            assert (await post(target)).status == 200

    run(main())


def test_B056_a_mark_is_found_in_a_mounted_app_behind_middleware_of_its_own() -> None:
    async def main() -> None:
        inner = GZipMiddleware(routed(Route("/x", strict, methods=["POST"])))
        target = around(routed(Mount("/m", app=inner)))
        assert (await post(target, "/m/x", key=None)).status == 400
        hosted = around(routed(Host("shop.example", app=inner)))
        host = [("Host", "shop.example")]
        assert (await post(hosted, "/x", key=None, headers=host)).status == 400

    run(main())


def test_a_route_that_takes_the_request_first_takes_it_from_a_marked_one() -> None:
    async def main() -> None:
        target = around(
            routed(
                Route("/o/special", loose, methods=["POST"]),
                Mount("/o/deep", routes=[Route("/y", loose, methods=["POST"])]),
                Route("/o/{id}", loose, methods=["GET"]),
                Route("/o/{rest:path}", strict, methods=["POST"]),
            )
        )
        assert (await post(target, "/o/special", key=None)).body == b"loose"
        assert (await post(target, "/o/deep/y", key=None)).body == b"loose"
        assert (await post(target, "/o/17", key=None)).status == 400

    run(main())


async def start(app: Any) -> list[dict[str, Any]]:
    """What a server hears at its start."""
    heard: list[dict[str, Any]] = []
    messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for kind in ("startup", "shutdown"):
        messages.put_nowait({"type": f"lifespan.{kind}"})

    async def send(message: dict[str, Any]) -> None:
        heard.append(message)

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, messages.get, send)
    return heard


class OnlyPut(HTTPEndpoint):
    @idempotency(STRICT)
    async def put(self, request: Request) -> Response:
        return PlainTextResponse("put")

    async def post(self, request: Request) -> Response:
        return PlainTextResponse("post")


@pytest.mark.parametrize(
    "route",
    [
        Route("/thing", strict, methods=["PUT"]),
        Route("/thing", OnlyPut),
        Mount("/deep", routes=[Route("/thing", strict, methods=["DELETE"])]),
    ],
)
def test_B056_a_mark_that_can_have_no_effect_stops_the_start(route: Any) -> None:
    async def main() -> None:
        app = routed(route)
        app.add_middleware(IdempotencyMiddleware, store=MemoryStore())
        (heard,) = await start(app)
        assert heard["type"] == "lifespan.startup.failed"
        assert "/thing has no effect" in heard["message"]
        assert "METHODS" in heard["message"]

    run(main())


def test_B056_a_mark_on_a_keyed_method_starts_and_so_does_one_that_is_made_keyed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main(*methods: str) -> None:
        app = routed(Route("/", strict, methods=list(methods)))
        app.add_middleware(IdempotencyMiddleware, store=MemoryStore())
        kinds = [each["type"] for each in await start(app)]
        assert kinds == ["lifespan.startup.complete", "lifespan.shutdown.complete"]

    run(main("POST", "GET"))
    monkeypatch.setenv("RETRYSAFE_METHODS", "POST,PUT")
    run(main("PUT"))


def test_disabled_nothing_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRYSAFE_DISABLED", "true")

    async def main() -> None:
        app = routed(Route("/", strict, methods=["PUT"]))
        app.add_middleware(IdempotencyMiddleware, store=MemoryStore())
        assert (await start(app))[0]["type"] == "lifespan.startup.complete"

    run(main())
