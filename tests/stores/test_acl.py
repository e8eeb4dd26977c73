"""The rule set of docs/acl.md: enough for everything, and no more than that."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from retrysafe import errors
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.commands import Answer, Look
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.events import listening
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.reservation import Reservation
from retrysafe.saga import Saga
from retrysafe.stores.redis import RedisStore
from tests.conftest import OwnServer
from tests.receipting import CALL, ONE, held, policy
from tests.servers import Server
from tests.support import run, until, wait_until

ROOT = Path(__file__).parents[2]
PASSWORD = "a-long-random-password"
# Of connections and waiting, sent by the store and by redis-py; not in scripts.
CONNECTIONS = {
    "eval",
    "evalsha",
    "ping",
    "select",
    "client|setinfo",
    "subscribe",
    "unsubscribe",
}


def rules() -> list[str]:
    """The words of the documented rule set, after the user's name."""
    document = ROOT / "docs/acl.md"
    (block,) = re.findall(r"^```acl\n(.*?)^```", document.read_text(), re.M | re.S)
    words: list[str] = block.split()
    assert words[:3] == ["ACL", "SETUSER", "payments"]
    return words[3:]


def granted() -> set[str]:
    return {word[1:] for word in rules() if word.startswith("+")}


def granted_besides() -> set[str]:
    """The rights that only some ways to run need: the table below the rule set."""
    text = (ROOT / "docs/acl.md").read_text()
    rows = re.findall(r"^\| `(?:RETRYSAFE_|redis\+|retrysafe ).*$", text, re.M)
    found = re.findall(r"\+([a-z-]+(?:\\\|[a-z-]+)?)[ `]", "\n".join(row for row in rows))
    return {word.replace("\\", "") for word in found} - {"sentinel", "cluster"}


def in_scripts() -> set[str]:
    """The commands that the scripts call."""
    scripts = (ROOT / "retrysafe/stores/lua").glob("*.lua")
    calls = [re.findall(r"redis\.p?call\(\s*'(\w+)'", path.read_text()) for path in scripts]
    return {name.lower() for found in calls for name in found}


SENDING = {"command", "pack", "send_command", "execute_command", "send"}


def sent_alone() -> set[str]:
    """The commands that the library sends without a script: `door.command("GET", …)`."""
    found = set()
    for path in (ROOT / "retrysafe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = []
            for each in node.args:
                if not isinstance(each, ast.Constant) or not isinstance(each.value, str | bytes):
                    break
                text = each.value.decode() if isinstance(each.value, bytes) else each.value
                words.append(text)
            if name in SENDING and words and words[0].isupper():
                found.add("|".join(words).lower() if words[0] == "CLUSTER" else words[0].lower())
    return found


def test_the_rule_set_grants_what_is_used_and_nothing_else() -> None:
    used = in_scripts() | sent_alone() | CONNECTIONS
    besides = granted_besides() - {"sentinel|get-master-addr-by-name"}  # of another server
    assert granted() | besides == used, "docs/acl.md and the commands in use differ"
    assert not granted() & besides


@pytest.fixture
def limited(own_server: OwnServer) -> Iterator[tuple[Server, str]]:
    """A server, and the URL of a user with just the documented rights on it."""
    server = own_server()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "payments", *rules())
        admin.execute_command("ACL", "LOG", "RESET")
        yield server, f"redis://payments:{PASSWORD}@127.0.0.1:{server.port}/0"
        denied = [
            (entry["reason"], entry["object"])
            for entry in admin.acl_log()
            if "retrysafe" in str(entry) or entry["reason"] == "command"
        ]
    assert not denied, f"the server refused {denied}"


def test_the_documented_rights_are_enough_for_async_receipts(limited: tuple[Server, str]) -> None:
    _, url = limited

    async def main() -> None:
        store = RedisStore(url)
        owner = AsyncReceipts(RedisStore(url), policy(lease=0.6))
        receipts = AsyncReceipts(store, policy())
        first = await held(owner)
        waiter = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).listening)
        was = first._taken.lease_until
        await until(lambda: first._taken.lease_until > was)  # renewed
        await first.finish(b"r", 60)
        got = await waiter
        assert isinstance(got, Record)
        assert got.payload == b"r"
        assert await receipts.look(CALL) == got
        assert await receipts.forget(CALL)
        await (await held(receipts)).release()
        await (await held(receipts)).interrupt()
        taken_over = await held(receipts)
        assert taken_over.abandoned is not None
        await taken_over.finish(b"x" * 200_000, 60)  # its own connection
        big = await receipts.begin(CALL)
        assert isinstance(big, Record)

    run(main())


def test_the_documented_rights_are_enough_for_sync_receipts(limited: tuple[Server, str]) -> None:
    _, url = limited
    store = RedisStore(url)
    owner = Receipts(RedisStore(url), policy(lease=0.6))
    receipts = Receipts(store, policy())
    first = owner.begin(CALL)
    assert isinstance(first, Held)

    async def main() -> None:
        waiter = asyncio.create_task(asyncio.to_thread(receipts.begin, CALL))
        await until(lambda: desk_for(store, MAX_WAITERS).listening)
        was = first._taken.lease_until
        await until(lambda: first._taken.lease_until > was)
        await asyncio.to_thread(first.finish, b"r", 60)
        got = await waiter
        assert isinstance(got, Record)
        assert got.payload == b"r"

    run(main())
    assert isinstance(receipts.look(CALL), Record)
    assert receipts.forget(CALL)
    for ending in ("release", "interrupt"):
        again = receipts.begin(CALL)
        assert isinstance(again, Held)
        getattr(again, ending)()
    taken_over = receipts.begin(CALL)
    assert isinstance(taken_over, Held)
    assert taken_over.abandoned is not None
    taken_over.release()


@pytest.mark.parametrize("by_time", [False, True])
def test_the_documented_rights_are_enough_for_a_shared_breaker(
    limited: tuple[Server, str], by_time: bool
) -> None:
    _, url = limited
    window = {"window_seconds": 10.0} if by_time else {"window": 2}
    rule = BreakerPolicy(
        failure_rate=0.6,
        min_calls=2,
        open_for=0.05,
        probes=2,
        **window,  # type: ignore[arg-type]
    )
    breaker = CircuitBreaker("ledger", rule, shared=RedisStore(url))
    other = CircuitBreaker("ledger", rule, shared=RedisStore(url))
    for _ in range(2):
        breaker.acquire().failure()
    wait_until(lambda: breaker.state == "open")

    def opened_again() -> bool:
        try:
            return other.acquire().success()
        except errors.BreakerOpen:
            return False

    wait_until(opened_again)
    wait_until(lambda: opened_again() and other.state == "closed")
    other.force_open()
    other.reset()

    async def main() -> None:
        permit = await CircuitBreaker("ledger", rule, shared=RedisStore(url)).aacquire()
        assert permit.success()

    run(main())


def test_with_these_rights_nothing_outside_the_namespace_is_reached(
    limited: tuple[Server, str],
) -> None:
    server, url = limited
    with server.client() as admin, redis.Redis.from_url(url) as client:
        admin.set("other:secret", "x", px=60_000)
        for words in (
            ("GET", "other:secret"),
            ("EVAL", "return redis.call('GET', 'other:secret')", 0),
            ("SET", "retrysafebut-another", "x"),
            ("PUBLISH", "other:i:inbox", "x"),
            ("SUBSCRIBE", "other:i:inbox"),
            ("PSUBSCRIBE", "*"),
            ("KEYS", "*"),
            ("FLUSHDB",),
            ("CONFIG", "GET", "*"),
            ("MONITOR",),
            ("ACL", "LIST"),
        ):
            with pytest.raises(redis.ResponseError, match=r"(?i)permission|access"):
                client.execute_command(*words)
        door = RedisStore(url, "other").open()
        with pytest.raises(errors.StoreUnavailable, match=r"(?i)permission"):
            door.execute(Look(b"k" * 16))
        door.close()
        admin.execute_command("ACL", "LOG", "RESET")


NO_CHANNELS = {
    "no channels": ["resetchannels"],
    "no publishing": ["-publish"],
    "no subscribing": ["-subscribe"],
}


@pytest.mark.parametrize("without", NO_CHANNELS)
def test_I52_a_user_without_the_rights_to_tell_or_be_told_records_everything(
    own_server: Callable[..., Server], without: str
) -> None:
    server = own_server()
    with server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "payments", *rules(), *NO_CHANNELS[without])
    url = f"redis://payments:{PASSWORD}@127.0.0.1:{server.port}/0"
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        store = RedisStore(url)
        owner = Receipts(RedisStore(url), policy())
        receipts = AsyncReceipts(store, policy())
        for ending in ("finish", "release", "interrupt", "forget"):
            call = Call(ending, "s", ONE)
            first = await asyncio.to_thread(owner.begin, call)
            assert isinstance(first, Held)
            waiter = asyncio.create_task(receipts.begin(call))
            flights = async_desk_for(store, MAX_WAITERS).flights
            await until(lambda flights=flights: flights.waiting == 1)  # type: ignore[misc]
            if ending == "finish":
                assert await asyncio.to_thread(first.finish, b"r", 60) is None
            elif ending == "forget":
                assert await asyncio.to_thread(owner.forget, call)
            else:
                await asyncio.to_thread(getattr(first, ending))
            async with asyncio.timeout(5):
                got = await waiter
            if isinstance(got, Record):
                assert (ending, got.payload) == ("finish", b"r")
            else:
                await got.release()
                assert ending != "finish"
            if ending == "forget":
                await asyncio.to_thread(first.release)
        reply = await store.open_async().execute(Look(b"k" * 16))
        assert reply.answer is Answer.VANISHED

    with listening(lambda event: seen.append((event.kind, event.outcome))):
        run(main())
    assert ("finished", "kept") in seen
    assert not [kind for kind, _ in seen if kind in ("result-unrecorded", "store-unavailable")]
    if without != "no publishing":
        assert "inbox-lost" in {kind for kind, _ in seen}


def test_a_wrong_password_is_unavailable_at_once_and_in_no_message(
    limited: tuple[Server, str],
) -> None:
    server, _ = limited
    url = f"redis://payments:canary-password@127.0.0.1:{server.port}/0"
    with pytest.raises(errors.StoreUnavailable) as caught:
        Receipts(RedisStore(url), policy()).begin(CALL)
    assert "canary" not in f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"

    async def main() -> None:
        with pytest.raises(errors.StoreUnavailable) as caught:
            await AsyncReceipts(RedisStore(url), policy()).begin(CALL)
        assert "canary" not in f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"

    run(main())
    with server.client() as admin:
        admin.execute_command("ACL", "LOG", "RESET")


def test_the_documented_rights_are_enough_for_sagas_and_reservations(
    limited: tuple[Server, str],
) -> None:
    _, url = limited
    store = RedisStore(url)
    stock = Reservation(store, ttl=30)
    stock.stock("item", 5)
    stock.add("item", 1, "delivery")
    stock.hold("item", 2, "one")
    stock.confirm("item", "one")
    stock.hold("item", 1, "two")
    assert stock.release("item", "two")
    assert stock.stock("item").free == 4
    undone: list[str] = []

    async def main() -> None:
        saga = Saga("order", store)

        async def back(ctx: Any, data: str) -> None:
            undone.append(data)

        @saga.step(undo=back)
        async def reserve(ctx: Any, order: str) -> str:
            return order

        @saga.step
        async def charge(ctx: Any, order: str) -> str:
            if order == "bad":
                raise errors.StepFailed("charge", "bank", "declined", False)
            return "charged"

        await saga.run("order-1", "good")
        with pytest.raises(errors.SagaFailed):
            await saga.run("order-2", "bad")
        assert await saga.unfinished() == []
        assert await saga.recover() == []
        assert await saga.parked() == []
        await saga.look("order-2")

    run(main())
    assert undone == ["bad"]


@pytest.mark.parametrize("allowed", [True, False])
def test_replicas_that_must_hold_a_receipt_need_one_right_more(
    own_server: OwnServer, allowed: bool
) -> None:
    primary = own_server()
    with primary.client() as admin:
        own_server(replicaof=["127.0.0.1", str(primary.port)])
        more = ["+wait"] if allowed else []
        admin.execute_command("ACL", "SETUSER", "payments", *rules(), *more)
        wait_until(lambda: admin.info("replication")["connected_slaves"] == 1)
        wait_until(lambda: admin.execute_command("WAIT", 1, 100) == 1)
    url = f"redis://payments:{PASSWORD}@127.0.0.1:{primary.port}/0"
    receipts = Receipts(RedisStore(url, replicas=1), policy())
    if allowed:
        first = receipts.begin(CALL)
        assert isinstance(first, Held)
        first.finish(b"r", 60)
    else:
        with pytest.raises(errors.StoreUnavailable):
            receipts.begin(CALL)
