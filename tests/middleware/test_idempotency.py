"""The middleware by ASGI messages, on both stores."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from retrysafe import errors
from retrysafe.context import current_request
from retrysafe.events import listening
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware, idempotency
from retrysafe.policy import IdempotencyPolicy, Recovered
from retrysafe.stores import Store
from retrysafe.stores.redis import RedisStore
from tests.asgi import Answer, Exchange, http_scope, post
from tests.support import run, until


class App:
    """A raw ASGI app that counts its runs and answers as it is told."""

    def __init__(
        self,
        status: int = 201,
        headers: list[tuple[bytes, bytes]] | None = None,
        chunks: list[bytes] | None = None,
    ) -> None:
        self.runs = 0
        self.status = status
        self.headers = headers or [(b"content-type", b"text/plain")]
        self.chunks = chunks
        self.gate: asyncio.Event | None = None
        self.bodies: list[bytes] = []
        self.most_at_once = self._at_once = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await self._answer(receive, send)
        finally:
            self._at_once -= 1

    async def _answer(self, receive: Any, send: Any) -> None:
        number = self.runs
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        if self.gate is not None:
            await self.gate.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        chunks = self.chunks or [b"run %d" % number]
        for n, chunk in enumerate(chunks):
            last = n == len(chunks) - 1
            await send({"type": "http.response.body", "body": chunk, "more_body": not last})


def wrapped(app: Any, store: Store, **options: Any) -> IdempotencyMiddleware:
    policy = options.pop("policy", None)
    scope = options.pop("scope", None)
    routes = options.pop("routes", None)
    if options:
        policy = IdempotencyPolicy(**options)
    return IdempotencyMiddleware(app, policy=policy, store=store, scope=scope, routes=routes)


def problem(answer: Answer) -> dict[str, Any]:
    assert answer.header("content-type") == "application/problem+json"
    found: dict[str, Any] = json.loads(answer.body)
    assert found["status"] == answer.status
    assert answer.header("should-retry") == ("true" if found["retryable"] else "false")
    assert found["request_id"] == answer.header("x-request-id")
    return found


def test_O28_O61_O63_O64_B048_a_retry_is_replayed_with_the_same_status_body_and_headers(
    store: Store,
) -> None:
    async def main() -> None:
        app = App(headers=[(b"location", b"/o/1"), (b"link", b"<a>"), (b"link", b"<b>")])
        target = wrapped(app, store)
        first = await post(target, body=b"x")
        again = await post(target, body=b"x")
        assert app.runs == 1
        assert (first.status, first.body) == (again.status, again.body) == (201, b"run 1")
        assert not first.replayed
        assert again.replayed
        assert [v for n, v in again.headers if n == "link"] == ["<a>", "<b>"]
        assert again.header("idempotent-original-request-id") == first.header("x-request-id")
        assert again.header("x-request-id") != first.header("x-request-id")
        assert again.header("content-length") == "5"

    run(main())


@pytest.mark.parametrize("key", ['"abc"', " abc ", "abc"])
def test_I1_O1_bare_and_quoted_forms_are_one_key(store: Store, key: str) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        await post(target, key="abc")
        assert (await post(target, key=key)).replayed
        assert app.runs == 1

    run(main())


@pytest.mark.parametrize(
    "key", ["", '""', "x" * 256, "a b", "a\x00b", "a\nb", "é", '"abc', 'abc"', '"abc";v=1', r'"\x"']
)
def test_I3_O4_O5_B046_a_malformed_key_is_400_and_nothing_runs(store: Store, key: str) -> None:
    async def main() -> None:
        app = App()
        answer = await post(wrapped(app, store), key=key)
        assert answer.status == 400
        assert problem(answer)["type"] == "urn:retrysafe:problem:key-invalid"
        assert app.runs == 0

    run(main())


@pytest.mark.parametrize("second", ["a", "b"])
def test_I4_O6_two_key_headers_are_400(store: Store, second: str) -> None:
    async def main() -> None:
        app = App()
        answer = await post(wrapped(app, store), key="a", headers=[("Idempotency-Key", second)])
        assert answer.status == 400
        assert app.runs == 0

    run(main())


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"y"},
        {"query": b"a=1"},
        {"path": "/other"},
        {"method": "PATCH"},
        {"headers": [("Content-Encoding", "gzip")]},
        {"path": "/a/"},
    ],
)
def test_I5_O14_O17_O85_the_same_key_with_another_request_is_422(
    store: Store, other: dict[str, Any]
) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        await post(target, **{"path": "/a", "body": b"x"})
        answer = await post(target, **{"path": "/a", "body": b"x", **other})
        assert answer.status == 422
        assert problem(answer)["retryable"] is False
        assert app.runs == 1

    run(main())


def test_I6_json_in_another_order_is_the_same_request_by_policy_json(store: Store) -> None:
    async def main() -> None:
        kind = [("Content-Type", "application/json")]
        app = App()
        target = wrapped(app, store, fingerprint="json")
        await post(target, body=b'{"a":1,"b":[1,2]}', headers=kind)
        assert (await post(target, body=b'{ "b": [1, 2], "a": 1 }', headers=kind)).replayed
        assert (await post(target, body=b'{"a":1,"b":[2,1]}', headers=kind)).status == 422
        raw = wrapped(app, store)
        await post(raw, key="raw", body=b'{"a":1,"b":2}', headers=kind)
        assert (await post(raw, key="raw", body=b'{"b":2,"a":1}', headers=kind)).status == 422

    run(main())


def test_I7_how_a_body_is_cut_makes_no_difference(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        whole = bytes(range(250)) * 20
        await post(target, body=[whole[n : n + 5] for n in range(0, len(whole), 5)])
        assert (await post(target, body=whole)).replayed
        assert app.bodies == [whole]

    run(main())


@pytest.mark.parametrize("declared", [True, False])
def test_I8_O71_a_body_over_the_cap_is_413_and_nothing_runs(store: Store, declared: bool) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store, max_request_body=100)
        headers = [("Content-Length", "200")] if declared else []
        answer = await post(target, body=[b"x" * 100, b"x" * 100], headers=headers)
        assert answer.status == 413
        assert problem(answer)["type"].endswith("body-too-large")
        assert app.runs == 0
        assert (await post(target, body=b"x" * 100)).status == 201

    run(main())


def test_a_large_body_is_spooled_and_reaches_the_app_whole(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        whole = b"0123456789" * 300_000
        await post(target, body=[whole[: 1 << 20], whole[1 << 20 :]])
        assert app.bodies == [whole]
        assert (await post(target, body=whole)).replayed

    run(main())


def test_I9_a_client_that_leaves_while_sending_leaves_nothing(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]), [])
        exchange.hang_up()
        assert (await exchange.run()).messages == []
        assert app.runs == 0
        assert (await post(target)).status == 201

    run(main())


def test_I11_O11_O12_B034_two_callers_with_one_key_run_twice(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        alice = await post(target, headers=[("Authorization", "alice")])
        bob = await post(target, headers=[("Authorization", "bob")])
        nobody = await post(target)
        assert [alice.body, bob.body, nobody.body] == [b"run 1", b"run 2", b"run 3"]
        assert (await post(target, headers=[("Authorization", "bob")])).body == b"run 2"

    run(main())


def test_the_authenticated_user_is_the_scope(store: Store) -> None:
    class User:
        is_authenticated = True

        def __init__(self, name: str) -> None:
            self.display_name = name

    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        await post(target, user=User("alice"), headers=[("Authorization", "t1")])
        renewed = await post(target, user=User("alice"), headers=[("Authorization", "t2")])
        assert renewed.replayed
        assert not (await post(target, user=User("bob"))).replayed

    run(main())


def test_I12_a_scope_callable_that_raises_is_500_and_nothing_runs(store: Store) -> None:
    def broken(request: Request) -> str:
        raise ValueError("no tenant")

    async def main() -> None:
        app = App()
        answer = await post(wrapped(app, store, scope=broken))
        assert answer.status == 500
        assert app.runs == 0

    run(main())


def test_O9_a_scope_that_is_a_number_is_taken_as_its_text(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, store, scope=lambda request: 17)
        await post(target)
        assert (await post(target)).replayed

    run(main())


@pytest.mark.parametrize(("method", "key"), [("GET", "k"), ("POST", None), ("DELETE", "k")])
def test_I13_I19_what_is_not_keyed_gets_the_servers_own_receive_and_send(
    store: Store, method: str, key: str | None
) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    async def main() -> None:
        headers = [] if key is None else [("Idempotency-Key", key)]
        exchange = Exchange(wrapped(app, store), http_scope(method, headers=headers))
        receive, send = exchange.receive, exchange.send
        await exchange.app(exchange.scope, receive, send)
        assert seen == [(exchange.scope, receive, send)]

    run(main())


def test_I13_a_missing_key_is_400_where_one_is_required(store: Store) -> None:
    async def main() -> None:
        app = App()
        answer = await post(wrapped(app, store, require_key=True), key=None)
        assert answer.status == 400
        assert problem(answer)["type"].endswith("key-missing")
        assert app.runs == 0

    run(main())


@pytest.mark.parametrize("kind", ["websocket", "lifespan", "unheard-of"])
def test_I14_O73_other_scopes_pass_untouched(store: Store, kind: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    scope = {"type": kind}
    run(wrapped(app, store)(scope, None, None))
    assert seen[0] is scope


def test_I15_mounted_twice_there_is_one_receipt(store: Store) -> None:
    async def main() -> None:
        app = App()
        target = wrapped(wrapped(app, store), store)
        await post(target)
        assert (await post(target)).replayed
        assert app.runs == 1

    run(main())


def test_I16_O15_a_mounted_app_is_told_apart_by_its_full_path(store: Store) -> None:
    async def main() -> None:
        async def endpoint(request: Request) -> Response:
            return Response(request.scope["root_path"])

        inner = Starlette(routes=[Route("/x", endpoint, methods=["POST"])])
        inner.add_middleware(IdempotencyMiddleware, store=store)
        outer = Starlette(routes=[Mount("/a", inner), Mount("/b", inner)])
        assert (await post(outer, "/a/x", key="1")).status == 200
        assert (await post(outer, "/b/x", key="1")).status == 422
        assert (await post(outer, "/a/x", key="1")).replayed

    run(main())


def test_I20_I21_O69_the_body_comes_once_and_the_disconnect_only_when_it_happens(
    store: Store,
) -> None:
    async def main() -> None:
        seen: list[Any] = []
        release = asyncio.Event()

        async def endpoint(request: Request) -> Response:
            seen.append(await request.body())
            seen.append(await request.body())
            seen.append(await request.is_disconnected())
            await release.wait()
            seen.append(await request.is_disconnected())
            return Response("ok")

        app = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
        target = wrapped(app, store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]), [b"a", b"b"])
        task = asyncio.create_task(exchange.run())
        await until(lambda: len(seen) == 3)
        exchange.hang_up()
        release.set()
        await task
        assert seen == [b"ab", b"ab", False, True]

    run(main())


def test_I22_a_stream_passes_chunk_by_chunk_and_is_replayed_whole(store: Store) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        runs = 0

        async def endpoint(request: Request) -> Response:
            nonlocal runs
            runs += 1

            async def chunks() -> Any:
                yield b"one "
                await gate.wait()
                yield b"two"

            return StreamingResponse(chunks(), media_type="text/event-stream")

        target = wrapped(Starlette(routes=[Route("/", endpoint, methods=["POST"])]), store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        task = asyncio.create_task(exchange.run())
        await until(lambda: exchange.answer.body == b"one ")
        gate.set()
        assert (await task).body == b"one two"
        again = await post(target)
        assert (again.body, again.replayed, runs) == (b"one two", True, 1)
        assert again.header("content-length") == "7"

    run(main())


def test_I22_O70_O75_B050_a_response_over_the_cap_is_sent_and_not_run_again(store: Store) -> None:
    seen: list[str] = []

    async def main() -> None:
        app = App(chunks=[b"x" * 100] * 16)
        target = wrapped(app, store, max_response_body=1000)
        assert (await post(target)).body == b"x" * 1600
        again = await post(target)
        assert again.status == 409
        assert problem(again)["type"].endswith("result-not-kept")
        assert app.runs == 1

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "result-not-kept" in seen


def test_I43_O58_the_record_stands_before_the_last_byte_is_sent(store: Store) -> None:
    async def main() -> None:
        app = App(chunks=[b"a", b"b"])
        target = wrapped(app, store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        send = exchange.send
        replays: list[Answer] = []

        async def checked(message: Any) -> None:
            if message.get("body") == b"b":
                replays.append(await post(target))
            await send(message)

        await target(exchange.scope, exchange.receive, checked)
        assert replays[0].replayed
        assert replays[0].body == b"ab"

    run(main())


@pytest.mark.parametrize("after_start", [False, True])
def test_I23_a_handler_that_raises_releases_its_key(store: Store, after_start: bool) -> None:
    async def main() -> None:
        runs = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1
            if after_start:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"a", "more_body": True})
            raise LookupError("broken")

        target = wrapped(app, store)
        for _ in range(2):
            with pytest.raises(LookupError, match="broken"):
                await post(target)
        assert runs == 2

    run(main())


def test_I24_O57_the_work_goes_on_when_the_server_cancels_the_request(store: Store) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        target = wrapped(app, store)
        task = asyncio.create_task(post(target))
        await until(lambda: app.runs == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        app.gate.set()
        again = await post(target)
        assert again.replayed
        assert app.runs == 1

    run(main())


def test_I24_O46_at_shutdown_the_receipt_is_abandoned_at_once(redis_url: str) -> None:
    app = App()

    async def serve() -> None:
        app.gate = asyncio.Event()
        target = wrapped(app, RedisStore(redis_url, "middleware"))
        asyncio.create_task(post(target))  # noqa: RUF006  # left running on purpose
        await until(lambda: app.runs == 1)

    async def retry() -> None:
        app.gate = None
        target = wrapped(app, RedisStore(redis_url, "middleware"))
        async with asyncio.timeout(5):
            assert (await post(target)).status == 201

    run(serve())  # the loop ends with the work in flight
    run(retry())
    assert app.runs == 2


def test_I25_I33_O54_O55_background_tasks_run_once_and_nobody_waits_for_them(store: Store) -> None:
    async def main() -> None:
        gate = asyncio.Event()
        ran = 0

        async def later() -> None:
            nonlocal ran
            ran += 1
            await gate.wait()
            raise RuntimeError("a background failure")

        async def endpoint(request: Request) -> Response:
            return JSONResponse({"ok": True}, background=BackgroundTask(later))

        target = wrapped(Starlette(routes=[Route("/", endpoint, methods=["POST"])]), store)
        task = asyncio.create_task(post(target))
        await until(lambda: ran == 1)
        assert (await post(target)).replayed
        gate.set()
        with pytest.raises(RuntimeError, match="background"):
            await task
        assert (await post(target)).replayed
        assert ran == 1

    run(main())


def test_an_answer_is_recorded_and_sent_before_the_app_goes_on(store: Store) -> None:
    """What an app does after its answer may block its loop beyond the lease, or end its process."""

    async def main() -> None:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})
            seen.append(exchange.answer.body)
            seen.append((await post(target)).replayed)

        target = wrapped(app, store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        await exchange.run()
        assert seen == [b"done", True]

    run(main())


def test_I26_O62_B049_credentials_are_neither_stored_nor_replayed(redis_url: str) -> None:
    async def main() -> None:
        secret = [
            (b"set-cookie", b"session=secret-1"),
            (b"set-cookie", b"other=secret-2"),
            (b"www-authenticate", b"secret-3"),
            (b"authorization", b"secret-4"),
            (b"location", b"/x"),
        ]
        app = App(headers=secret)
        target = wrapped(app, RedisStore(redis_url, "middleware"))
        first = await post(target)
        assert len([n for n, _ in first.headers if n == "set-cookie"]) == 2
        again = await post(target)
        assert again.header("location") == "/x"
        assert "secret" not in str(again.headers)
        door = RedisStore(redis_url, "middleware").open_async()
        for name in await door.command("KEYS", "*"):
            assert b"secret" not in await door.command("GET", name)
        await door.close()

    run(main())


@pytest.mark.parametrize("status", [204, 304])
def test_I27_O65_a_bodiless_response_is_replayed_bodiless(store: Store, status: int) -> None:
    async def main() -> None:
        app = App(status=status, chunks=[b""])
        target = wrapped(app, store)
        await post(target)
        again = await post(target)
        assert (again.status, again.body, again.replayed) == (status, b"", True)
        assert again.header("content-length") is None

    run(main())


def test_I27_O76_trailers_and_early_hints_pass_and_trailers_are_replayed(store: Store) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.early_hint", "links": [b"<a>"]})
        await send({"type": "http.response.start", "status": 200, "headers": [], "trailers": True})
        await send({"type": "http.response.body", "body": b"x"})
        await send({"type": "http.response.trailers", "headers": [(b"digest", b"1")]})

    async def main() -> None:
        target = wrapped(app, store)
        extensions = {"http.response.trailers": {}}
        first = await post(target, extensions=extensions)
        kinds = [m["type"].rpartition(".")[2] for m in first.messages]
        assert kinds == ["early_hint", "start", "body", "trailers"]
        again = await post(target, extensions=extensions)
        assert again.messages[-1]["headers"] == [(b"digest", b"1")]
        assert again.replayed
        assert (await post(target)).messages[-1]["type"] == "http.response.body"

    run(main())


@pytest.mark.parametrize("extensions", [{}, {"http.response.pathsend": {}}])
def test_I34_O72_a_file_is_sent_as_it_was_and_recorded(
    store: Store, tmp_path: Any, extensions: dict[str, Any]
) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(b"the file")

    async def main() -> None:
        async def endpoint(request: Request) -> Response:
            return FileResponse(path)

        target = wrapped(Starlette(routes=[Route("/", endpoint, methods=["POST"])]), store)
        first = await post(target, extensions=extensions)
        if extensions:
            assert first.messages[-1]["type"] == "http.response.pathsend"
        path.write_bytes(b"another!")
        again = await post(target, extensions=extensions)
        assert (again.body, again.replayed) == (b"the file", True)

    run(main())


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_I32_O56_a_send_that_fails_never_releases_the_work(
    store: Store, error: type[Exception]
) -> None:
    async def main() -> None:
        app = App(chunks=[b"a", b"b"])
        target = wrapped(app, store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        exchange.send_fails = error
        if error is OSError:
            await exchange.run()
        else:
            with pytest.raises(error):
                await exchange.run()
        again = await post(target)
        assert (again.body, again.replayed, app.runs) == (b"ab", True, 1)

    run(main())


def test_I36_I68_O30_after_a_500_one_waiter_runs_not_fifty(store: Store) -> None:
    async def main() -> None:
        app = App(status=500)
        app.gate = asyncio.Event()
        target = wrapped(app, store)
        first = asyncio.create_task(post(target))
        await until(lambda: app.runs == 1)
        others = [asyncio.create_task(post(target)) for _ in range(50)]
        await until(lambda: waiting(store) == 50)
        app.gate.set()
        assert (await first).status == 500
        results = await asyncio.gather(*others)
        # Every 500 hands the key on to exactly one waiter: they run one after another.
        assert {each.status for each in results} == {500}
        assert app.runs == 51
        assert app.most_at_once == 1

    run(main())


def waiting(store: Store) -> int:
    from retrysafe.desks import async_desk_for

    return async_desk_for(store, 10_000).flights.waiting


@pytest.mark.parametrize(
    ("status", "kept"),
    [(200, True), (204, True), (303, True), (402, True), (410, True)]
    + [(each, False) for each in (400, 401, 403, 404, 405, 408, 409, 413, 415, 421)]
    + [(each, False) for each in (422, 423, 425, 429, 500, 502, 503)],
)
def test_B029_the_kept_statuses_are_the_documented_ones(
    store: Store, status: int, kept: bool
) -> None:
    async def main() -> None:
        app = App(status=status)
        target = wrapped(app, store, wait=0)
        assert (await post(target)).status == status
        assert (await post(target)).replayed is kept
        assert app.runs == (1 if kept else 2)

    run(main())


def test_the_policy_and_then_the_handler_decide_what_is_kept(store: Store) -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            context = current_request()
            assert context is not None
            if scope["path"] == "/discard":
                context.receipt.discard()
            if scope["path"] == "/keep":
                context.receipt.keep()
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        plain = wrapped(app, store)
        await post(plain, "/keep", key="1")
        assert (await post(plain, "/keep", key="1")).replayed
        keeping = wrapped(app, store, keep=lambda status, headers: True)
        await post(keeping, "/", key="2")
        assert (await post(keeping, "/", key="2")).replayed
        await post(keeping, "/discard", key="3")
        assert not (await post(keeping, "/discard", key="3")).replayed

    run(main())


def test_I63_O29_B145_a_duplicate_waits_and_then_is_told_409(store: Store) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        target = wrapped(app, store, wait=0.1)
        first = asyncio.create_task(post(target))
        await until(lambda: app.runs == 1)
        answer = await post(target)
        assert answer.status == 409
        assert problem(answer)["type"].endswith("in-flight")
        assert problem(answer)["retryable"] is True
        assert int(answer.header("retry-after") or 0) >= 1
        app.gate.set()
        assert (await first).status == 201
        assert (await post(target)).replayed

    run(main())


def test_I60_O34_200_duplicates_get_one_execution_and_one_answer(store: Store) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        target = wrapped(app, store)
        calls = [asyncio.create_task(post(target)) for _ in range(200)]
        await until(lambda: waiting(store) == 199)
        app.gate.set()
        answers = await asyncio.gather(*calls)
        assert app.runs == 1
        assert {(each.status, each.body) for each in answers} == {(201, b"run 1")}
        assert sum(not each.replayed for each in answers) == 1

    run(main())


def test_I64_O39_a_waiting_client_that_hangs_up_ends_its_wait_and_nothing_else(
    store: Store,
) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        target = wrapped(app, store)
        first = asyncio.create_task(post(target))
        await until(lambda: app.runs == 1)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        waiter = asyncio.create_task(exchange.run())
        await until(lambda: waiting(store) == 1)
        exchange.hang_up()
        assert (await waiter).messages == []
        assert waiting(store) == 0
        app.gate.set()
        assert (await first).status == 201

    run(main())


def test_B035_another_users_key_is_neither_blocked_nor_shared(store: Store) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        target = wrapped(app, store, scope=lambda request: request.headers["x-user"])
        first = asyncio.create_task(post(target, headers=[("X-User", "a")]))
        await until(lambda: app.runs == 1)
        other = asyncio.create_task(post(target, body=b"other", headers=[("X-User", "b")]))
        await until(lambda: app.runs == 2)
        app.gate.set()
        assert (await first).status == (await other).status == 201

    run(main())


def test_an_abandoned_key_under_refuse_is_told_so(store: Store) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        target = wrapped(app, store, on_abandoned="refuse")
        exchange = asyncio.create_task(post(target))
        await until(lambda: app.runs == 1)
        from retrysafe.middleware.responder import _works

        for work in list(_works):
            work.cancel()  # the shutdown of the server
        with pytest.raises(asyncio.CancelledError):
            await exchange
        answer = await post(target)
        assert answer.status == 409
        assert problem(answer)["type"].endswith("abandoned")
        assert app.runs == 1

    run(main())


@pytest.mark.parametrize("happened", [True, False])
def test_B030_a_recovery_function_decides_about_an_abandoned_call(
    store: Store, happened: bool
) -> None:
    async def main() -> None:
        app = App()
        app.gate = asyncio.Event()
        asked: list[Any] = []

        def recover(receipt: Any) -> Any:
            asked.append(receipt)
            return Recovered(JSONResponse({"found": True}, 201)) if happened else None

        target = wrapped(app, store, on_abandoned=recover)
        exchange = asyncio.create_task(post(target))
        await until(lambda: app.runs == 1)
        from retrysafe.middleware.responder import _works

        for work in list(_works):
            work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange
        app.gate = None
        answer = await post(target)
        assert answer.status == 201
        assert asked[0].key == "k"
        assert app.runs == (1 if happened else 2)
        assert (await post(target)).replayed

    run(main())


def test_O92_the_store_out_of_reach_is_503_and_nothing_runs() -> None:
    async def main() -> None:
        app = App()
        target = wrapped(app, RedisStore("redis://127.0.0.1:1/0", "middleware"))
        async with asyncio.timeout(3):
            answer = await post(target)
        assert answer.status == 503
        assert problem(answer)["type"].endswith("store-unavailable")
        assert answer.header("retry-after") is not None
        assert app.runs == 0

    run(main())


def test_the_store_out_of_reach_runs_unprotected_where_the_user_chose_it() -> None:
    seen: list[str] = []

    async def main() -> None:
        app = App()
        store = RedisStore("redis://127.0.0.1:1/0", "middleware")
        answer = await post(wrapped(app, store, on_store_error="run"), body=b"x")
        assert answer.status == 201
        assert answer.header("idempotent-unprotected") == "true"
        assert app.bodies == [b"x"]

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "unprotected" in seen


def test_I45_O53_a_foreign_value_under_our_key_is_503_and_stays(redis_url: str) -> None:
    from retrysafe import keys

    async def main() -> None:
        app = App()
        store = RedisStore(redis_url, "middleware")
        door = store.open_async()
        name = b"middleware:r:" + keys.digest("middleware", "", "k").hex().encode()
        await door.command(b"SET", name, b"not ours", b"PX", 60_000)
        answer = await post(wrapped(app, store, on_store_error="run"))
        assert answer.status == 503
        assert app.runs == 0
        assert await door.command(b"GET", name) == b"not ours"
        await door.close()

    run(main())


def test_B056_routes_and_applies_and_marks_choose_what_is_keyed(store: Store) -> None:
    async def main() -> None:
        app = App()
        some = wrapped(app, store, routes=["/orders/{id}"])
        await post(some, "/orders/1", key="1")
        assert (await post(some, "/orders/1", key="1")).replayed
        await post(some, "/other", key="2")
        assert not (await post(some, "/other", key="2")).replayed
        never = wrapped(app, store, applies=lambda scope: False)
        await post(never, key="3")
        assert not (await post(never, key="3")).replayed

        @idempotency(IdempotencyPolicy(require_key=True))
        async def strict(request: Request) -> Response:
            return Response("strict")

        async def loose(request: Request) -> Response:
            return Response("loose")

        marked = Starlette(
            routes=[
                Route("/strict", strict, methods=["POST"]),
                Route("/loose", loose, methods=["POST"]),
                Mount("/deep", routes=[Route("/strict", strict, methods=["POST"])]),
            ]
        )
        marked.add_middleware(IdempotencyMiddleware, store=store)
        assert (await post(marked, "/strict", key=None)).status == 400
        assert (await post(marked, "/deep/strict", key=None)).status == 400
        assert (await post(marked, "/loose", key=None)).status == 200

    run(main())


def test_bad_arguments_are_refused_at_start(store: Store) -> None:
    for options in (
        {"policy": {}},
        {"scope": "user"},
        {"routes": "/orders"},
        {"routes": ["orders"]},
    ):
        with pytest.raises(errors.SettingsError):
            IdempotencyMiddleware(App(), store=store, **options)
    with pytest.raises(errors.SettingsError, match="lease"):
        IdempotencyPolicy(lease=-1)


def test_disabled_passes_everything_with_one_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RETRYSAFE_DISABLED", "true")

    async def main() -> None:
        app = App()
        target = wrapped(app, store)
        await post(target)
        assert not (await post(target)).replayed

    run(main())
    assert caplog.text.count("RETRYSAFE_DISABLED") == 1


def test_O60_a_settings_error_at_start_names_the_variable(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_LEASE", "soon")
    monkeypatch.setenv("RETRYSAFE_TLL", "1h")
    with pytest.raises(errors.SettingsError) as caught:
        wrapped(App(), store)
    assert "RETRYSAFE_LEASE" in str(caught.value)
    assert "RETRYSAFE_TTL" in str(caught.value)


def test_an_error_of_ours_from_inside_the_handler_propagates_unchanged(store: Store) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise errors.InFlight("another-key")

    async def main() -> None:
        with pytest.raises(errors.InFlight):
            await post(wrapped(app, store))

    run(main())


def test_I15_inside_and_outside_of_the_request_id_middleware_there_is_one_id(
    store: Store,
) -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append(current_request())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        for n, target in enumerate(
            (
                RequestIdMiddleware(wrapped(app, store)),
                wrapped(RequestIdMiddleware(app), store),
            )
        ):
            answer = await post(target, key=f"{n}", headers=[("X-Request-ID", f"mine-{n}")])
            assert answer.header("x-request-id") == f"mine-{n}" == seen[n].request_id
            assert seen[n].key is not None

    run(main())
