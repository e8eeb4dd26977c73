"""The middleware at the edges that users have met in the field."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from starlette.requests import Request

from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.asgi import Exchange, http_scope, post
from tests.support import run, until


@pytest.fixture
def store() -> Store:
    return MemoryStore("edges")


class Scripted:
    """Answers each run with the next status; None raises."""

    def __init__(self, *statuses: int | None) -> None:
        self.statuses = list(statuses)
        self.runs = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        status = self.statuses.pop(0)
        if status is None:
            raise RuntimeError("scripted")
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.runs})


def mounted(app: Any, store: Store, **fields: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, policy=IdempotencyPolicy(**fields), store=store)


def test_B027_O59_a_transient_failure_is_never_pinned_to_the_key(store: Store) -> None:
    async def main() -> None:
        app = Scripted(503, 500, None, 201)
        target = mounted(app, store)
        assert (await post(target)).status == 503
        assert (await post(target)).status == 500
        with pytest.raises(RuntimeError):
            await post(target)
        assert (await post(target)).status == 201
        again = await post(target)
        assert (again.status, again.body, again.replayed) == (201, b"4", True)

    run(main())


@pytest.mark.parametrize("kind", ["one", "chunks", "none", "raises"])
def test_B012_every_way_to_answer_completes_or_frees_the_key(store: Store, kind: str) -> None:
    async def main() -> None:
        runs = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1
            status = 204 if kind == "none" else 200
            await send({"type": "http.response.start", "status": status, "headers": []})
            if kind == "raises":
                raise RuntimeError("after the start")
            if kind == "chunks":
                for chunk in (b"a", b"", b"b"):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})

        target = mounted(app, store, wait=0)
        for n in range(2):
            if kind == "raises":
                with pytest.raises(RuntimeError):
                    await post(target)
            else:
                assert (await post(target)).replayed is (n == 1)
        assert runs == (2 if kind == "raises" else 1)

    run(main())


def test_an_app_that_ends_without_an_answer_frees_the_key(store: Store) -> None:
    async def main() -> None:
        runs = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1

        target = mounted(app, store, wait=0)
        await post(target)
        await post(target)
        assert runs == 2

    run(main())


def test_O26_a_fingerprint_of_ones_own_tells_requests_apart(store: Store) -> None:
    def by_order(request: Request, body: bytes) -> str:
        return body.partition(b"|")[0].decode()

    async def main() -> None:
        target = mounted(Scripted(200, 200), store, fingerprint=by_order)
        await post(target, body=b"order-1|boundary-a")
        assert (await post(target, body=b"order-1|boundary-b")).replayed
        assert (await post(target, body=b"order-2|boundary-a")).status == 422

    run(main())


def test_O74_the_key_is_taken_only_when_the_body_is_whole(store: Store) -> None:
    async def main() -> None:
        target = mounted(Scripted(200, 200), store, wait=0)
        slow = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]), [])
        slow._chunks = []
        uploading = asyncio.create_task(slow.run())
        await asyncio.sleep(0)
        assert store.size() == 0  # type: ignore[attr-defined]
        assert (await post(target)).status == 200
        slow.hang_up()
        await uploading

    run(main())


def test_B037_the_anonymous_share_a_scope_but_never_another_payloads_answer(
    store: Store,
) -> None:
    async def main() -> None:
        app = Scripted(200, 200)
        target = IdempotencyMiddleware(app, store=store, scope=lambda request: None)
        await post(target, body=b"1")
        assert (await post(target, body=b"2")).status == 422
        assert (await post(target, body=b"1")).replayed
        assert app.runs == 1

    run(main())


def test_B051_the_record_lies_under_the_documented_name(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_REDIS_URL", redis_url)
    monkeypatch.setenv("RETRYSAFE_NAMESPACE", "shop")

    async def main() -> None:
        target = IdempotencyMiddleware(Scripted(201))
        await post(target)
        assert (await post(target)).replayed
        door = RedisStore(redis_url).open_async()
        names = await door.command("KEYS", "*")
        await door.close()
        assert len(names) == 1
        prefix, kind, digest = names[0].split(b":")
        assert (prefix, kind, len(digest)) == (b"shop", b"r", 32)

    run(main())


def test_the_ttl_may_follow_the_status(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "edges")
        target = mounted(Scripted(200, 402), store, ttl=lambda status: 60 if status == 402 else 600)
        door = store.open_async()
        await post(target, key="a")
        (name,) = await door.command("KEYS", "*")
        assert 500_000 < await door.command("PTTL", name) <= 600_000
        await door.command("DEL", name)
        await post(target, key="b")
        (name,) = await door.command("KEYS", "*")
        assert 50_000 < await door.command("PTTL", name) <= 60_000
        await door.close()

    run(main())


def test_a_keep_that_raises_never_loses_the_answer(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(status: int, headers: Any) -> bool:
        raise ValueError("no")

    async def main() -> None:
        target = mounted(Scripted(201), store, keep=broken)
        assert (await post(target)).status == 201
        assert (await post(target)).replayed

    run(main())
    assert "policy.keep failed" in caplog.text


def test_a_lost_lease_cancels_the_work_where_the_policy_says_so(store: Store) -> None:
    async def main() -> None:
        ended: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        from retrysafe import commands as c
        from retrysafe import keys
        from retrysafe.receipts import Call, Held, Receipts

        target = mounted(app, store, lease=0.3, on_lease_lost="cancel")
        task = asyncio.create_task(post(target))
        digest = keys.digest("edges", "", "k")
        await until(lambda: store.size() == 1)  # type: ignore[attr-defined]
        store.open().execute(c.Forget(digest))
        other = Receipts(store, IdempotencyPolicy().resolve(target.settings))
        taken = other.begin(Call("k", "", keys.NO_FINGERPRINT))
        assert isinstance(taken, Held)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled"]
        taken.release()

    run(main())


def test_nothing_of_a_request_or_a_result_goes_into_logs(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"x-answer", b"secret-header")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"secret-answer"})

    async def main() -> None:
        target = mounted(app, store)
        for body in (b"secret-body", b"secret-body", b"secret-other"):
            await post(
                target,
                "/secret-path",
                body,
                key="secret-key",
                headers=[("Authorization", "secret-token")],
            )

    run(main())
    assert "retrysafe" in caplog.text
    assert "secret" not in caplog.text


def test_work_that_listens_for_the_disconnect_survives_the_servers_cancellation(
    store: Store,
) -> None:
    async def main() -> None:
        heard: list[str] = []
        release = asyncio.Event()
        statuses = [500, 201]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            status = statuses.pop(0)
            await receive()
            if status == 201:
                heard.append((await receive())["type"])
            await release.wait()
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

        target = mounted(app, store)
        first = asyncio.create_task(post(target))
        await until(lambda: len(statuses) == 1)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        waiter = asyncio.create_task(exchange.run())
        await until(lambda: exchange.watched)
        release.set()
        assert (await first).status == 500
        release.clear()
        await until(lambda: not statuses)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await until(lambda: heard == ["http.disconnect"])
        release.set()
        again = await post(target)
        assert (again.status, again.replayed) == (201, True)

    run(main())


@pytest.mark.parametrize("ends", [True, False])
def test_I24_at_the_lifespans_shutdown_work_ends_or_is_abandoned_at_once(
    store: Store, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[IdempotencyMiddleware.__module__]
    monkeypatch.setattr(module, "GRACE", 5.0 if ends else 0.05)

    async def main() -> None:
        runs = 0
        gate = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            if scope["type"] == "lifespan":
                assert (await receive())["type"] == "lifespan.shutdown"
                return
            runs += 1
            await gate.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

        target = mounted(app, store)
        request = asyncio.create_task(post(target))
        await until(lambda: runs == 1)
        request.cancel()  # the server has let go of it

        async def receive() -> dict[str, str]:
            return {"type": "lifespan.shutdown"}

        if ends:
            asyncio.get_running_loop().call_soon(gate.set)
        await target({"type": "lifespan"}, receive, None)
        gate.set()
        async with asyncio.timeout(5):
            again = await post(target)
        assert again.replayed is ends
        assert runs == (1 if ends else 2)

    run(main())


def test_I32_a_starlette_stream_whose_client_leaves_runs_to_its_end_and_is_replayed(
    store: Store,
) -> None:
    from starlette.responses import StreamingResponse

    async def main() -> None:
        runs = 0
        gate = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1
            await receive()

            async def chunks() -> Any:
                yield b"one "
                await gate.wait()
                yield b"two"

            await StreamingResponse(chunks())(scope, receive, send)

        target = mounted(app, store)
        exchange = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]))
        assert exchange.scope["asgi"]["spec_version"] == "2.3"  # what most servers say
        task = asyncio.create_task(exchange.run())
        await until(lambda: exchange.answer.body == b"one ")
        exchange.send_fails = OSError
        exchange.hang_up()
        for _ in range(20):  # turns in which a stream that listens would end
            await asyncio.sleep(0)
        gate.set()
        await task
        again = await post(target)
        assert (again.body, again.replayed, runs) == (b"one two", True, 1)

    run(main())


def test_a_won_record_that_cannot_be_read_leaves_the_true_answer(store: Store) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await gate.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})
            await send({"type": "http.response.body", "body": b"true"})

        from retrysafe import commands as c
        from retrysafe import keys
        from retrysafe.records import Record, encode_done

        target = mounted(app, store)
        task = asyncio.create_task(post(target))
        digest = keys.digest("edges", "", "k")
        await until(lambda: store.size() == 1)  # type: ignore[attr-defined]
        door = store.open()
        door.execute(c.Forget(digest))
        other = Record(keys.NO_FINGERPRINT, b"another-owner-00", 1, "", b"\xc1 no response")
        door.execute(c.Finish(digest, other.token, encode_done(other), 60_000))
        gate.set()
        answer = await task
        assert (answer.status, answer.body) == (201, b"true")

    run(main())
