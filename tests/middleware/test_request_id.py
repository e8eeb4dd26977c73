"""RequestIdMiddleware, on Starlette, FastAPI, bare ASGI, and on a real server."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import anyio.to_thread
import httpx
import pytest
import uvicorn
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from retrysafe.context import (
    SCOPE_KEY,
    RequestContext,
    current_request,
    enter,
    entered,
    request_id,
)
from retrysafe.errors import SettingsError
from retrysafe.logging import RequestIdFilter
from retrysafe.middleware.request_id import RequestIdMiddleware
from tests.support import run, wait_until

UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
ID = "x-request-id"


async def seen(request: Request) -> Response:
    return PlainTextResponse(request_id() or "none")


def seen_sync(request: Request) -> Response:
    return PlainTextResponse(request_id() or "none")


def client_of(app: ASGIApp, **options: Any) -> TestClient:
    return TestClient(app, raise_server_exceptions=False, **options)


def starlette(**options: Any) -> Starlette:
    own = options.pop("own", {})
    return Starlette(
        routes=[Route("/", seen, methods=["GET", "POST"]), Route("/sync", seen_sync)],
        middleware=[Middleware(RequestIdMiddleware, **own)],
        **options,
    )


# --- the ID ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/sync"])
def test_a_request_without_an_id_gets_a_uuid7_in_context_and_response(path: str) -> None:
    answer = client_of(starlette()).get(path)
    assert UUID7.fullmatch(answer.headers[ID])
    assert answer.text == answer.headers[ID]
    assert request_id() is None


@pytest.mark.parametrize("given", ["a", "A-z0.9_", "x" * 128])
def test_a_valid_inbound_id_is_kept(given: str) -> None:
    answer = client_of(starlette()).get("/", headers={ID: given})
    assert answer.text == answer.headers[ID] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a,b", "a/b", "é", "a\tb", "{}", "%41"])
def test_any_other_inbound_id_is_replaced(given: str) -> None:
    answer = client_of(starlette()).get("/", headers={ID.encode(): given.encode()})
    assert UUID7.fullmatch(answer.headers[ID]) and answer.text == answer.headers[ID]


def test_two_inbound_ids_are_replaced_by_one() -> None:
    answer = client_of(starlette()).get("/", headers=[(ID, "a"), (ID, "b")])
    assert len(answer.headers.get_list(ID)) == 1
    assert UUID7.fullmatch(answer.headers[ID])


def test_the_response_never_has_two_ids() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"X-Request-ID", b"theirs"), (b"link", b"1"), (b"link", b"2")]
        await Response(status_code=204)(scope, receive, _with(send, headers))

    def _with(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
        async def sending(message: Message) -> None:
            await send({**message, "headers": headers} if "status" in message else message)

        return sending

    answer = client_of(RequestIdMiddleware(app)).get("/", headers={ID: "mine"})
    assert answer.headers.get_list(ID) == ["mine"]
    assert answer.headers.get_list("link") == ["1", "2"]


def test_untrusted_inbound_ids_are_replaced() -> None:
    assert client_of(starlette(own={"trust": False})).get("/", headers={ID: "a"}).text != "a"


def test_trust_may_depend_on_the_scope() -> None:
    client = client_of(starlette(own={"trust": lambda scope: scope["path"] == "/"}))
    assert client.get("/", headers={ID: "a"}).text == "a"
    assert client.get("/sync", headers={ID: "a"}).text != "a"


def test_a_trust_callable_that_raises_means_no_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = client_of(starlette(own={"trust": lambda scope: 1 / 0}))
    assert UUID7.fullmatch(client.get("/", headers={ID: "a"}).text)
    assert "trust= of RequestIdMiddleware failed" in caplog.text


def test_the_header_comes_from_the_argument_else_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RETRYSAFE_REQUEST_ID_HEADER", "X-Env")
    assert client_of(starlette()).get("/", headers={"x-env": "a"}).headers["x-env"] == "a"
    other = client_of(starlette(own={"header": "X-Arg"})).get("/", headers={"x-arg": "a"})
    assert other.headers["X-ARG"] == "a" and "x-env" not in other.headers


def test_faults_are_told_when_the_middleware_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="header holds 'a b'"):
        RequestIdMiddleware(seen, header="a b")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="trust holds 'yes'"):
        RequestIdMiddleware(seen, trust="yes")  # type: ignore[arg-type]
    monkeypatch.setenv("RETRYSAFE_TTTL", "1h")
    with pytest.raises(SettingsError, match="RETRYSAFE_TTTL"):
        RequestIdMiddleware(seen)  # type: ignore[arg-type]


def test_the_traceparent_is_in_the_context_as_it_came_or_not_at_all() -> None:
    async def traced(request: Request) -> Response:
        context = current_request()
        assert context is not None
        return PlainTextResponse(str(context.traceparent))

    client = client_of(RequestIdMiddleware(Starlette(routes=[Route("/", traced)])))
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert client.get("/", headers={"traceparent": good}).text == good
    for bad in ("", "00-x", good + "x", good.upper()):
        assert client.get("/", headers={"traceparent": bad}).text == "None"
    assert client.get("/", headers=[("traceparent", good), ("traceparent", good)]).text == "None"


# --- where it doesn't belong, and where it is already ------------------------------------------


def test_I14_other_scopes_pass_through_untouched() -> None:
    async def main() -> None:
        calls: list[tuple[Any, ...]] = []

        async def app(*args: Any) -> None:
            calls.append((*args, current_request()))

        scope: Scope = {"type": "lifespan"}
        await RequestIdMiddleware(app)(scope, receive, send)
        await RequestIdMiddleware(app)({"type": "other"}, receive, send)
        assert calls[0] == (scope, receive, send, None) and scope == {"type": "lifespan"}
        assert calls[1][1:] == (receive, send, None)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    run(main())


def test_a_websocket_has_a_context_and_the_id_on_its_accept() -> None:
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept(headers=[(b"x-own", b"1")])
        await websocket.send_text(request_id() or "none")
        await websocket.close()

    app = Starlette(
        routes=[WebSocketRoute("/ws", echo)], middleware=[Middleware(RequestIdMiddleware)]
    )
    with client_of(app).websocket_connect("/ws", headers={ID: "w"}) as session:
        assert session.receive_text() == "w"
        headers: dict[bytes, bytes] = dict(session.extra_headers or [])
        assert headers[b"x-request-id"] == b"w" and headers[b"x-own"] == b"1"


def test_I15_mounted_twice_the_outer_one_decides_and_there_is_one_header() -> None:
    inner = starlette(own={"trust": False})
    app = Starlette(routes=[Mount("/sub", app=inner)], middleware=[Middleware(RequestIdMiddleware)])
    answer = client_of(app).get("/sub/", headers={ID: "a"})
    assert answer.text == "a" and answer.headers.get_list(ID) == ["a"]


def test_a_context_that_another_middleware_made_is_kept() -> None:
    made = RequestContext("outer", key="digest")

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = made
        with entered(made):
            await RequestIdMiddleware(inner)(scope, receive, send)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        assert current_request() is made
        await PlainTextResponse("ok")(scope, receive, send)

    answer = client_of(outer).get("/", headers={ID: "theirs"})
    assert answer.headers.get_list(ID) == ["outer"] and answer.text == "ok"


def test_a_context_left_over_from_another_request_is_not_taken_up() -> None:
    async def leaky(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            enter(RequestContext("stale", key="digest"))
        await app(scope, receive, send)

    async def look(request: Request) -> Response:
        context = current_request()
        assert context is not None and context.key is None
        return PlainTextResponse(context.request_id)

    app = RequestIdMiddleware(Starlette(routes=[Route("/", look)]))
    assert UUID7.fullmatch(client_of(leaky).get("/").text)


# --- errors ------------------------------------------------------------------------------------


class Broken(Exception):
    pass


async def fails(request: Request) -> Response:
    raise Broken(request_id())


async def teapot(request: Request) -> Response:
    raise HTTPException(418)


async def late(request: Request) -> Response:
    async def chunks() -> Any:
        yield b"first"
        raise Broken(request_id())

    return StreamingResponse(chunks())


async def bad_value(request: Request) -> Response:
    raise ValueError("x")


async def handler_that_fails(request: Request, error: Exception) -> Response:
    raise Broken(request_id())


def failing_starlette() -> Starlette:
    return Starlette(
        routes=[
            Route("/ok", seen),
            Route("/fails", fails),
            Route("/teapot", teapot),
            Route("/late", late),
            Route("/value", bad_value),
        ],
        exception_handlers={ValueError: handler_that_fails},
        middleware=[Middleware(RequestIdMiddleware)],
    )


def failing_fastapi() -> FastAPI:
    app = FastAPI(exception_handlers={ValueError: handler_that_fails})
    app.add_middleware(RequestIdMiddleware)

    def broken() -> None:
        raise Broken(request_id())

    @app.get("/ok")
    async def ok(number: int = 0) -> str | None:
        return request_id()

    @app.get("/dependency")
    def dependency(_: None = Depends(broken)) -> str:
        return "never"

    app.add_route("/fails", fails)
    app.add_route("/teapot", teapot)
    app.add_route("/late", late)
    app.add_route("/value", bad_value)
    return app


WAYS = [
    ("/ok", "GET", 200),
    ("/teapot", "GET", 418),
    ("/fails", "GET", 500),
    ("/value", "GET", 500),
    ("/nothing", "GET", 404),
    ("/ok", "DELETE", 405),
]


@pytest.mark.parametrize(("path", "method", "status"), WAYS)
@pytest.mark.parametrize("make", [failing_starlette, failing_fastapi])
@pytest.mark.parametrize("outermost", [False, True])
def test_B147_every_answer_has_the_id(
    make: Any, path: str, method: str, status: int, outermost: bool
) -> None:
    app = RequestIdMiddleware(make()) if outermost else make()
    answer = client_of(app).request(method, path, headers={ID: "a"})
    assert answer.status_code == status
    assert answer.headers.get_list(ID) == ["a"]


@pytest.mark.parametrize(("path", "status"), [("/dependency", 500), ("/ok?number=x", 422)])
def test_B147_a_failed_dependency_and_a_refused_argument_have_the_id(
    path: str, status: int
) -> None:
    answer = client_of(failing_fastapi()).get(path, headers={ID: "a"})
    assert (answer.status_code, answer.headers.get_list(ID)) == (status, ["a"])


@pytest.mark.parametrize("path", ["/fails", "/late"])
def test_B147_the_exception_goes_on_to_the_server_unchanged(path: str) -> None:
    client = TestClient(failing_starlette())
    with pytest.raises(Broken) as caught:
        client.get(path, headers={ID: "a"})
    assert caught.value.args == ("a",) and caught.value.__cause__ is None


def test_B147_a_bare_app_that_raises_is_answered_500_with_the_id_and_raises_on() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise Broken(request_id())

    answer = client_of(RequestIdMiddleware(app)).get("/", headers={ID: "a"})
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert answer.headers.get_list(ID) == ["a"]
    with pytest.raises(Broken):
        TestClient(RequestIdMiddleware(app)).get("/")


@pytest.mark.parametrize("sync", [False, True])
def test_B147_the_apps_own_handler_of_errors_answers_once_in_the_requests_context(
    sync: bool,
) -> None:
    reported: list[str | None] = []

    def report_sync(request: Request, error: Exception) -> Response:
        reported.append(request_id())
        return JSONResponse({"own": True}, 500, headers={"X-Request-ID": "stray"})

    async def report(request: Request, error: Exception) -> Response:
        return report_sync(request, error)

    app = failing_starlette()
    app.add_exception_handler(Exception, report_sync if sync else report)
    client = client_of(app)
    for name in ("a", "b"):
        answer = client.get("/fails", headers={ID: name})
        assert answer.json() == {"own": True}
        assert answer.headers.get_list(ID) == [name]
    assert reported == ["a", "b"]


def test_B147_a_handler_of_errors_that_fails_is_answered_500_with_the_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = failing_starlette()
    app.add_exception_handler(500, handler_that_fails)
    answer = client_of(app).get("/fails", headers={ID: "a"})
    assert (answer.status_code, answer.headers.get_list(ID)) == (500, ["a"])
    with pytest.raises(Broken):
        TestClient(app).get("/fails")
    assert "handler of server errors failed" in caplog.text


def test_B147_the_debug_page_has_the_id_and_stays_the_debug_page() -> None:
    app = failing_starlette()
    app.debug = True
    answer = client_of(app).get("/fails", headers={ID: "a", "accept": "text/html"})
    assert "Traceback" in answer.text and answer.headers.get_list(ID) == ["a"]


def test_error_middleware_between_still_answers_for_itself() -> None:
    async def outer(request: Request, call_next: Any) -> Response:
        try:
            return await call_next(request)  # type: ignore[no-any-return]
        except Broken:
            return JSONResponse({"caught": True}, 503)

    app = Starlette(
        routes=[Route("/fails", fails)],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=outer),
            Middleware(RequestIdMiddleware),
        ],
    )
    answer = client_of(app).get("/fails")
    assert (answer.status_code, answer.json()) == (503, {"caught": True})


def test_an_http_exception_that_passes_through_keeps_its_status() -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(403)

    app = Starlette(routes=[Mount("/", app=RequestIdMiddleware(refusing))])
    assert client_of(app).get("/").status_code == 403


def test_a_failure_in_a_mounted_app_has_the_id_of_the_outer_one() -> None:
    app = Starlette(
        routes=[Mount("/sub", app=failing_starlette())],
        middleware=[Middleware(RequestIdMiddleware)],
    )
    answer = client_of(app).get("/sub/fails", headers={ID: "a"})
    assert (answer.status_code, answer.headers.get_list(ID)) == (500, ["a"])


def test_B153_the_context_is_reset_after_errors_and_cancellation() -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/fails":
                raise Broken
            started.set()
            await asyncio.Event().wait()

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError

        async def watched(path: str) -> None:
            scope = {"type": "http", "path": path, "headers": []}
            try:
                await RequestIdMiddleware(app)(scope, receive, send)
            finally:
                after.append(request_id())

        sent: list[Message] = []
        after: list[str | None] = []
        with pytest.raises(Broken):
            await watched("/fails")
        assert sent[0]["status"] == 500
        task = asyncio.create_task(watched("/hangs"))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert after == [None, None]
        assert len(sent) == 2  # a cancelled request is answered nothing

    run(main())


def test_a_500_that_cannot_be_sent_does_not_hide_the_exception() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise Broken

    async def send(message: Message) -> None:
        raise OSError("gone")

    async def receive() -> Message:
        raise AssertionError

    with pytest.raises(Broken):
        run(_call(RequestIdMiddleware(app), receive, send))


async def _call(app: ASGIApp, receive: Receive, send: Send) -> None:
    await app({"type": "http", "path": "/", "headers": []}, receive, send)


# --- a real server -----------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[str, str, str]] = []
        self.addFilter(RequestIdFilter())

    def emit(self, record: logging.LogRecord) -> None:
        found: str = record.request_id  # type: ignore[attr-defined]
        self.records.append((record.name, found, record.getMessage()))

    def ids(self, logger: str, words: str) -> list[str]:
        return [found for name, found, text in self.records if name == logger and words in text]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    loggers = [logging.getLogger(name) for name in ("uvicorn.access", "uvicorn.error")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


@contextmanager
def serving(app: Any, http: str) -> Iterator[int]:
    config = uvicorn.Config(app, port=0, http=http, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def read_answer(stream: Any) -> tuple[int, dict[str, list[str]], bytes]:
    status = int(stream.readline().split()[1])
    headers: dict[str, list[str]] = {}
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers.setdefault(name.lower(), []).append(value.strip())
    if headers.get("transfer-encoding") == ["chunked"]:
        body = b""
        while size := int(stream.readline() or b"0", 16):
            body += stream.read(size)
            stream.readline()
        return status, headers, body
    return status, headers, stream.read(int(headers.get("content-length", ["0"])[0]))


def ask(port: int, lines: bytes) -> tuple[int, dict[str, list[str]], bytes]:
    with closing(socket.create_connection(("127.0.0.1", port), 10)) as connection:
        connection.sendall(lines)
        return read_answer(connection.makefile("rb"))


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_B155_no_byte_in_an_inbound_id_breaks_the_answer_or_a_call_made_with_it(http: str) -> None:
    async def endpoint(request: Request) -> Response:
        transport = httpx.MockTransport(lambda sent: httpx.Response(200))
        async with httpx.AsyncClient(transport=transport) as client:
            called = await client.get("http://x", headers={ID: request_id() or ""})
        return PlainTextResponse(f"{called.status_code} {request_id()}")

    app = Starlette(routes=[Route("/", endpoint)], middleware=[Middleware(RequestIdMiddleware)])
    with serving(app, http) as port:
        for byte in range(1, 256):
            value = b"a" + bytes((byte,)) + b"b"
            head = b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-ID: " + value + b"\r\n\r\n"
            status, headers, body = ask(port, head)
            assert status in (200, 400), byte
            if status == 200:
                assert len(headers[ID]) == 1
                assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", headers[ID][0])
                assert body.decode() == f"200 {headers[ID][0]}"


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_B153_no_id_survives_into_the_next_request_of_a_connection(http: str) -> None:
    def sync_view(request: Request) -> Response:
        if int(request.query_params["n"]) % 3 == 2:
            raise Broken
        return PlainTextResponse(request_id() or "none")

    async def async_view(request: Request) -> Response:
        return sync_view(request)

    async def one_thread(scope: Scope, receive: Receive, send: Send) -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        await inner(scope, receive, send)

    inner = Starlette(
        routes=[Route("/sync", sync_view), Route("/async", async_view)],
        middleware=[Middleware(RequestIdMiddleware)],
    )
    with serving(one_thread, http) as port:
        for path in (b"/sync", b"/async"):
            ids = []
            # uvicorn ends a connection after an exception: the next request opens another.
            connection = stream = None
            for number in range(100):
                if connection is None:
                    connection = socket.create_connection(("127.0.0.1", port), 10)
                    stream = connection.makefile("rb")
                connection.sendall(b"GET %b?n=%d HTTP/1.1\r\nHost: x\r\n\r\n" % (path, number))
                status, headers, body = read_answer(stream)
                assert status == (500 if number % 3 == 2 else 200)
                ids += headers[ID]
                if status == 200:
                    assert body.decode() == headers[ID][0]
                else:
                    connection.close()
                    connection = None
            if connection is not None:
                connection.close()
            assert len(set(ids)) == 100
    assert request_id() is None


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_B153_pipelined_requests_have_each_their_own_id(http: str) -> None:
    with (
        serving(starlette(), http) as port,
        closing(socket.create_connection(("127.0.0.1", port), 10)) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5)
        stream = connection.makefile("rb")
        answers = [read_answer(stream) for _ in range(5)]
    assert len({body for _, _, body in answers}) == 5
    assert all(headers[ID] == [body.decode()] for _, headers, body in answers)


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_B154_the_access_log_the_error_log_the_hook_and_the_answer_have_one_id(
    http: str, lines: Lines
) -> None:
    hooked: list[str | None] = []

    async def hook(request: Request, error: Exception) -> Response:
        hooked.append(request_id())
        return PlainTextResponse("sorry", 500)

    app = failing_starlette()
    app.add_exception_handler(Exception, hook)
    with serving(app, http) as port:
        status, headers, _ = ask(port, b"GET /fails HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: bool(lines.ids("uvicorn.error", "Exception in ASGI")))
    assert status == 500
    made = headers[ID]
    assert UUID7.fullmatch(made[0])
    assert hooked == made
    assert lines.ids("uvicorn.access", "/fails") == made
    assert lines.ids("uvicorn.error", "Exception in ASGI") == made


@pytest.mark.parametrize("http", ["h11", "httptools"])
def test_B147_a_failure_after_the_response_began_ends_the_connection_and_is_logged_with_the_id(
    http: str, lines: Lines
) -> None:
    with serving(failing_starlette(), http) as port:
        with closing(socket.create_connection(("127.0.0.1", port), 10)) as connection:
            connection.sendall(b"GET /late HTTP/1.1\r\nHost: x\r\nX-Request-ID: a\r\n\r\n")
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        wait_until(lambda: bool(lines.ids("uvicorn.error", "Exception in ASGI")))
    assert data.startswith(b"HTTP/1.1 200") and b"first" in data
    assert not data.endswith(b"0\r\n\r\n")  # cut, and seen to be cut
    assert lines.ids("uvicorn.error", "Exception in ASGI") == ["a"]
