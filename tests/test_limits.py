"""What a client can make grow has an end: SECURITY.md lists each limit, these are its tests.

Those of keys, bodies, responses and waiters that need no more than one request are beside the
parts that have them.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import redis

from retrysafe import commands as c
from retrysafe import errors, keys
from retrysafe.desks import async_desk_for
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.middleware.body import Body
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call
from retrysafe.records import Running, decode
from retrysafe.settings import Settings
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.multiplexer import _LIMIT
from retrysafe.stores.redis import RedisStore
from retrysafe.values import replace
from tests.asgi import http_scope, post
from tests.receipting import CALL, ONE, TWO, held, policy
from tests.support import run, until

ROOT = Path(__file__).resolve().parent.parent
CAP = 1000


async def ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("declared", [None, "999999999"])
def test_a_body_without_an_end_is_read_to_a_bound(declared: str | None) -> None:
    """A client that is told 413 while it sends is read on for a while, then left."""

    async def main() -> None:
        read = 0
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            nonlocal read
            read += 64 * 1024
            return {"type": "http.request", "body": bytes(64 * 1024), "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        rule = IdempotencyPolicy(max_request_body=CAP)
        target = IdempotencyMiddleware(ok, store=MemoryStore(), policy=rule)
        headers = [("Idempotency-Key", "k")]
        if declared:
            headers.append(("Content-Length", declared))
        await target(http_scope(headers=headers), receive, send)
        assert sent[0]["status"] == 413
        assert read <= 4 * CAP + (1 << 20) + 64 * 1024

    run(main())


def test_a_large_body_waits_on_disk_and_not_in_memory() -> None:
    body = Body()
    for _ in range(64):
        body.append(bytes(64 * 1024))
    assert not body._chunks
    assert body._file is not None
    assert len(body.whole()) == body.size == 4 << 20
    file = body._file
    body.close()
    assert file.closed


def test_requests_that_are_refused_leave_nothing_in_the_store() -> None:
    async def main() -> None:
        store = MemoryStore()
        rule = IdempotencyPolicy(max_request_body=CAP, require_key=True)
        target = IdempotencyMiddleware(ok, store=store, policy=rule)
        for n in range(20):
            assert (await post(target, key=f"{n} {n}")).status == 400
            assert (await post(target, key=None)).status == 400
            assert (await post(target, key=str(n), body=bytes(CAP + 1))).status == 413
        assert store.size() == 0
        assert (await post(target, key="k")).status == 200
        for n in range(20):
            assert (await post(target, key="k", body=b"%d" % n)).status == 422
        assert store.size() == 1

    run(main())


def test_a_name_in_the_store_is_as_long_for_every_key_and_caller(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "limits")
        receipts = AsyncReceipts(store, policy())
        for key, scope in (("k", ""), ("x" * 255, "y" * 10_000), ("*?[a]{b}", "\0\n")):
            await (await held(receipts, Call(key, scope, ONE))).finish(b"", 60)
        door: Any = store.open_async()
        names = await door.command("KEYS", "*")
        assert len(names) == 3
        assert all(re.fullmatch(rb"limits:r:[0-9a-f]{32}", name) for name in names)
        await door.close()

    run(main())


def test_duplicates_make_a_receipt_grow_by_one_inbox_for_each_process(store: Store) -> None:
    async def main() -> None:
        first = await held(AsyncReceipts(store, policy()))
        own = await first._desk.door.execute(c.Look(keys.digest("tests", "s", "k")))
        receipts = AsyncReceipts(store, policy(wait=20))
        waiting = [asyncio.create_task(receipts.begin(CALL)) for _ in range(300)]
        other = store.open_async()
        begin = c.Begin(
            keys.digest("tests", "s", "k"), b"t" * 16, ONE, 10**6, 60_000, b"i" * 16, True, ""
        )
        for _ in range(50):  # one more process, which looks again and again
            assert (await other.execute(begin)).answer is c.Answer.RUNNING
        await until(lambda: async_desk_for(store, MAX_WAITERS).flights.waiting == 300)
        grown = await other.execute(c.Look(begin.key))
        record = decode(grown.value)
        assert isinstance(record, Running)
        assert len(record.inboxes) <= 2
        assert len(grown.value) - len(own.value) == 16 * len(record.inboxes)
        await first.finish(b"r", 60)
        await asyncio.gather(*waiting)
        await other.close()

    run(main())


def test_another_payload_waits_for_nothing_and_counts_as_no_waiter(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(wait=20))
        first = await held(receipts)
        for _ in range(50):
            with pytest.raises(errors.FingerprintMismatch):
                await receipts.begin(replace(CALL, fingerprint=TWO))
        assert first._desk.flights.waiting == 0
        await first.release()

    run(main())


def test_B144_duplicates_over_the_limit_are_answered_at_once_and_other_keys_are_served(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_MAX_WAITERS", "50")
    monkeypatch.setenv("RETRYSAFE_WAIT", "20")

    async def main() -> None:
        done = asyncio.Event()
        runs: list[bytes] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            key = next(value for name, value in scope["headers"] if name == b"idempotency-key")
            runs.append(key)
            if key == b"held":
                await done.wait()
            await ok(scope, receive, send)

        keyed = IdempotencyMiddleware(app, store=RedisStore(redis_url))
        first = asyncio.create_task(post(keyed, key="held"))
        await until(lambda: runs == [b"held"])
        duplicates = [asyncio.create_task(post(keyed, key="held")) for _ in range(500)]
        await until(lambda: sum(each.done() for each in duplicates) == 450)
        others = await asyncio.gather(*(post(keyed, key=f"other-{n}") for n in range(50)))
        assert [each.status for each in others] == [200] * 50
        with redis.Redis.from_url(redis_url) as client:
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            await asyncio.sleep(1)  # what they ask in a second is what is counted
            asked = client.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        assert asked <= 20  # for all fifty waiters together: their owner is in this process
        refused = [each.result() for each in duplicates if each.done()]
        assert {each.status for each in refused} == {409}
        assert all(each.header("retry-after") for each in refused)
        done.set()
        answers = await asyncio.gather(first, *duplicates)
        assert sum(each.status == 200 for each in answers) == 51
        assert runs.count(b"held") == 1

    run(main())


def test_commands_that_are_out_at_once_have_a_limit_and_the_rest_wait(redis_url: str) -> None:
    async def main() -> None:
        door: Any = RedisStore(redis_url, "limits").open_async()
        most = 0

        async def echo(n: int) -> bool:
            nonlocal most
            found = await door.command("ECHO", n)
            most = max(most, len(door._main._out) + len(door._main._sent))
            return bool(found == b"%d" % n)

        assert all(await asyncio.gather(*(echo(n) for n in range(_LIMIT + 5_000))))
        assert most <= _LIMIT
        await door.close()

    run(main())


def test_the_limits_that_are_written_down_are_those_in_force() -> None:
    """The defaults in SECURITY.md's table, by the setting's name."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = dict(re.findall(r"\| `(\w+)` = `([^`]+)`", text))
    written = Settings.from_env({f"RETRYSAFE_{name}": value for name, value in rows.items()})
    assert set(rows) >= {"MAX_REQUEST_BODY", "MAX_RESPONSE_BODY", "MAX_WAITERS", "WAIT", "TTL"}
    assert written == Settings()
