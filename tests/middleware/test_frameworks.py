"""The same requests through the frameworks that people mount it in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from retrysafe.context import current_request
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware, idempotency
from retrysafe.middleware.openapi import document
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.asgi import Exchange, http_scope, post
from tests.support import run

JSON = [("Content-Type", "application/json")]


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore("frameworks")
    return RedisStore(request.getfixturevalue("redis_url"), "frameworks")


def mounted(app: Any, store: Store | None = None) -> RequestIdMiddleware:
    store = store or MemoryStore("frameworks")
    return RequestIdMiddleware(IdempotencyMiddleware(app, store=store))


def fastapi_app(runs: list[Any]) -> Any:
    from fastapi import Depends, FastAPI
    from pydantic import BaseModel

    class Order(BaseModel):
        cents: int

    def caller() -> str:
        context = current_request()  # a sync dependency runs in a thread
        assert context is not None
        return context.request_id

    app = FastAPI()

    async def pay(order: Any, who: Any) -> dict[str, int]:
        runs.append(who)
        return {"paid": order.cents}

    pay.__annotations__ = {"order": Order, "return": dict[str, int]}
    pay.__defaults__ = (Depends(caller),)
    app.post("/pay")(pay)
    return app


def starlette_app(runs: list[Any]) -> Any:
    async def pay(request: Request) -> Response:
        context = current_request()
        assert context is not None
        runs.append(context.request_id)
        return JSONResponse({"paid": (await request.json())["cents"]})

    return Starlette(routes=[Route("/pay", pay, methods=["POST"])])


def starlette_sync_app(runs: list[Any]) -> Any:
    def pay(request: Request) -> Response:  # runs in a thread
        context = current_request()
        assert context is not None
        runs.append(context.request_id)
        return JSONResponse({"paid": 5})

    return Starlette(routes=[Route("/pay", pay, methods=["POST"])])


def litestar_app(runs: list[Any]) -> Any:
    from litestar import Litestar
    from litestar import post as litestar_post

    async def pay(data: Any) -> dict[str, int]:
        context = current_request()
        assert context is not None
        runs.append(context.request_id)
        return {"paid": data["cents"]}

    from litestar.params import JSONBody

    pay.__annotations__ = {"data": JSONBody[dict[str, int]], "return": dict[str, int]}
    return Litestar([litestar_post("/pay", status_code=200)(pay)])


def quart_app(runs: list[Any]) -> Any:
    from quart import Quart, jsonify, request

    app = Quart("tests")

    @app.post("/pay")
    async def pay() -> Any:
        context = current_request()
        assert context is not None
        runs.append(context.request_id)
        return jsonify(paid=(await request.get_json())["cents"])

    return app


def django_app(runs: list[Any]) -> Any:
    import django
    from django.conf import settings
    from django.core.asgi import get_asgi_application
    from django.http import HttpRequest, JsonResponse
    from django.urls import path

    def pay(request: HttpRequest) -> JsonResponse:  # a sync view: through asgiref, in a thread
        context = current_request()
        assert context is not None
        runs.append(context.request_id)
        return JsonResponse({"paid": json.loads(request.body)["cents"]})

    if not settings.configured:
        settings.configure(
            SECRET_KEY="tests", ROOT_URLCONF="tests.middleware.django_urls", ALLOWED_HOSTS=["*"]
        )
        django.setup()
    from tests.middleware import django_urls

    django_urls.urlpatterns[:] = [path("pay", pay)]
    return get_asgi_application()


@pytest.mark.parametrize(
    "make",
    [fastapi_app, starlette_app, starlette_sync_app, litestar_app, quart_app, django_app],
)
def test_a_keyed_request_runs_once_and_is_replayed(
    make: Callable[[list[Any]], Any], store: Store
) -> None:
    runs: list[Any] = []

    async def main() -> None:
        target = mounted(make(runs), store)
        headers = [*JSON, ("Host", "testserver"), ("X-Request-ID", "mine")]
        first = await post(target, "/pay", b'{"cents": 5}', headers=headers)
        again = await post(target, "/pay", b'{"cents": 5}', headers=headers)
        assert first.status == again.status
        assert first.status in (200, 201), first.body
        assert json.loads(first.body) == {"paid": 5}
        assert again.body == first.body
        assert again.replayed
        assert again.header("content-type") == first.header("content-type")
        assert (await post(target, "/pay", b'{"cents": 6}', headers=headers)).status == 422

    run(main())
    assert runs == ["mine"]


@pytest.mark.parametrize("how", ["json", "form", "stream", "unread"])
def test_B054_every_way_to_read_a_body_sees_the_bytes_that_were_sent(how: str) -> None:
    boundary = b"boundary"
    whole = json.dumps({"a": "x" * 300}).encode()
    headers = JSON
    if how == "form":
        whole = (
            b'--%b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n'
            b"%b\r\n--%b--\r\n" % (boundary, b"y" * (1 << 20), boundary)
        )
        headers = [("Content-Type", "multipart/form-data; boundary=boundary")]
    sizes: list[int] = []

    async def endpoint(request: Request) -> Response:
        if how == "json":
            sizes.append(len((await request.json())["a"]))
        elif how == "stream":
            sizes.append(sum([len(chunk) async for chunk in request.stream()]))
        elif how == "form":
            async with request.form() as form:
                sizes.append(len(await form["f"].read()))  # type: ignore[union-attr]
        else:
            sizes.append(0)
        return PlainTextResponse("ok")

    async def main() -> None:
        target = mounted(Starlette(routes=[Route("/", endpoint, methods=["POST"])]))
        third = len(whole) // 3
        chunks = [whole[:third], whole[third : 2 * third], whole[2 * third :]]
        async with asyncio.timeout(5):
            assert (await post(target, body=chunks, headers=headers)).body == b"ok"
            assert (await post(target, body=whole, headers=headers)).replayed

    run(main())
    assert sizes == [{"json": 300, "form": 1 << 20, "stream": len(whole), "unread": 0}[how]]


def test_B054_fastapis_own_upload_and_form_see_what_was_sent() -> None:
    from fastapi import FastAPI, File, Form, UploadFile

    seen: list[tuple[int, str, str | None]] = []
    app = FastAPI()

    async def upload(file: Any, note: Any) -> dict[str, int]:
        content = await file.read()
        seen.append((len(content), note, file.filename))
        return {"size": len(content)}

    # By hand: the names of this function are out of reach of annotations that are text.
    upload.__annotations__ = {"file": UploadFile, "note": str, "return": dict[str, int]}
    upload.__defaults__ = (File(), Form())
    app.post("/upload")(upload)

    whole = (
        b'--b\r\nContent-Disposition: form-data; name="note"\r\n\r\nhello\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f.bin"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%b\r\n--b--\r\n" % (b"y" * (1 << 20))
    )
    headers = [("Content-Type", "multipart/form-data; boundary=b")]

    async def main() -> None:
        target = mounted(app)
        first = await post(
            target, "/upload", [whole[:500], whole[500:9000], whole[9000:]], headers=headers
        )
        again = await post(target, "/upload", whole, headers=headers)
        assert first.status == again.status == 200, first.body
        assert first.body == again.body == b'{"size":1048576}'
        assert again.replayed

    run(main())
    assert seen == [(1 << 20, "hello", "f.bin")]


def test_B054_an_app_without_a_framework_gets_the_bytes_and_no_early_disconnect() -> None:
    received: list[bytes] = []

    async def raw(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message["body"], message["more_body"]
        received.append(body)
        # Nobody has left, so the next message doesn't come.
        leaving = asyncio.ensure_future(receive())
        assert not (await asyncio.wait([leaving], timeout=0.05))[0]
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        target = mounted(raw)
        assert (await post(target, body=[b"a", b"", b"bc"])).body == b"ok"
        assert (await post(target, body=b"abc")).replayed

    run(main())
    assert received == [b"abc"]


def test_I31_O67_an_inner_base_http_middleware_makes_no_difference() -> None:
    runs = 0

    async def endpoint(request: Request) -> Response:
        nonlocal runs
        runs += 1
        return JSONResponse({"n": runs})

    async def passing(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        return response

    async def main() -> None:
        inner = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        target = mounted(BaseHTTPMiddleware(inner, dispatch=passing))
        assert (await post(target)).body == b'{"n":1}'
        assert (await post(target)).body == b'{"n":1}'

    run(main())
    assert runs == 1


def test_I28_O66_a_compressed_answer_is_replayed_with_its_encoding() -> None:
    import gzip

    async def endpoint(request: Request) -> Response:
        return PlainTextResponse("x" * 5000)

    async def main() -> None:
        inner = GZipMiddleware(Starlette(routes=[Route("/", endpoint, methods=["POST"])]))
        accept = [("Accept-Encoding", "gzip")]
        target = mounted(inner)
        for n in range(2):
            answer = await post(target, headers=accept)
            assert answer.header("content-encoding") == "gzip"
            assert answer.header("vary") == "Accept-Encoding"
            assert answer.header("content-length") == str(len(answer.body))
            assert gzip.decompress(answer.body) == b"x" * 5000
            assert answer.replayed is (n == 1)
        outer = GZipMiddleware(mounted(Starlette(routes=[Route("/", endpoint, methods=["POST"])])))
        for n in range(2):
            answer = await post(outer, headers=accept)
            assert gzip.decompress(answer.body) == b"x" * 5000
            assert answer.replayed is (n == 1)

    run(main())


def test_I35_cors_headers_of_the_inner_app_are_on_the_replay_too() -> None:
    async def endpoint(request: Request) -> Response:
        return PlainTextResponse("ok", headers={"X-Frame-Options": "DENY"})

    async def main() -> None:
        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        target = mounted(CORSMiddleware(app, allow_origins=["https://shop.example"]))
        for _ in range(2):
            answer = await post(target, headers=[("Origin", "https://shop.example")])
            assert answer.header("access-control-allow-origin") == "https://shop.example"
            assert answer.header("x-frame-options") == "DENY"
        assert answer.replayed

    run(main())


def test_I19_O68_an_unkeyed_stream_is_untouched() -> None:
    async def endpoint(request: Request) -> Response:
        async def events() -> Any:
            for n in range(100):
                yield f"data: {n}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def main() -> None:
        app = Starlette(routes=[Route("/", endpoint)])
        for headers in ([], [("Idempotency-Key", "k")]):
            bare = await Exchange(app, http_scope("GET", headers=headers)).run()
            target = IdempotencyMiddleware(app, store=MemoryStore())
            through = await Exchange(target, http_scope("GET", headers=headers)).run()
            assert through.messages == bare.messages

    run(main())


def test_B056_a_fastapi_endpoint_is_marked_with_a_policy_of_its_own() -> None:
    from fastapi import APIRouter, FastAPI

    async def main() -> None:
        app, router = FastAPI(), APIRouter(prefix="/v1")

        @router.post("/strict")
        @idempotency(IdempotencyPolicy(require_key=True))
        async def strict() -> str:
            return "strict"

        @router.post("/loose")
        async def loose() -> str:
            return "loose"

        app.include_router(router)
        app.add_middleware(IdempotencyMiddleware, store=MemoryStore())
        assert (await post(app, "/v1/strict", key=None)).status == 400
        assert (await post(app, "/v1/strict")).status == 200
        assert (await post(app, "/v1/loose", key=None)).status == 200

    run(main())


def test_the_key_and_the_problems_are_documented_in_a_fastapi_schema() -> None:
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/orders")
    async def order() -> str:
        return "ok"

    @app.get("/orders")
    async def orders() -> str:
        return "ok"

    schema = document(app.openapi())
    keyed, plain = schema["paths"]["/orders"]["post"], schema["paths"]["/orders"]["get"]
    assert [each["name"] for each in keyed["parameters"]] == ["Idempotency-Key"]
    assert {"400", "409", "413", "422", "503"} <= set(keyed["responses"])
    assert "parameters" not in plain
    assert document(schema)["paths"]["/orders"]["post"] == keyed  # once is enough
    content = keyed["responses"]["409"]["content"]["application/problem+json"]
    assert content["schema"]["$ref"].endswith("/IdempotencyProblem")
    assert "IdempotencyProblem" in schema["components"]["schemas"]
