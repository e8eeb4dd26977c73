"""Finished records at hand: replays that ask nobody, and what ends them."""

from __future__ import annotations

import asyncio
import os

import pytest
import redis

from retrysafe import errors, finished
from retrysafe.desks import async_desk_for
from retrysafe.finished import LARGEST, LIMIT, MAX_AGE, FinishedRecords
from retrysafe.receipts import MAX_WAITERS, AsyncHeld, AsyncReceipts, Call, Receipts
from retrysafe.records import Record
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import SealedStore
from tests.conftest import OwnServer
from tests.receipting import ONE, TWO, held, policy
from tests.support import run, until

CALL = Call("k", "s", ONE)


def record(payload: bytes = b"r") -> Record:
    return Record(ONE, b"t" * 16, 1, "req", payload)


def kept(records: FinishedRecords, digest: bytes, payload: bytes = b"r", ttl: float = 60) -> None:
    records.heard = True
    records.keep(digest, record(payload), 0.0, ttl, records.changes)


def test_a_record_is_at_hand_for_its_ttl_and_never_longer_than_the_bound() -> None:
    records = FinishedRecords()
    kept(records, b"short", ttl=2)
    kept(records, b"long", ttl=86_400)
    assert records.get(b"short", 1.9) is not None
    assert records.get(b"short", 2.0) is None
    assert records.get(b"long", MAX_AGE - 0.1) is not None
    assert records.get(b"long", MAX_AGE) is None
    assert records.get(b"long", 0.0) is None  # dropped, not hidden


def test_nothing_is_kept_while_forgets_are_not_heard() -> None:
    asked: list[bool] = []
    records = FinishedRecords(lambda: asked.append(True))
    records.keep(b"k", record(), 0.0, 60, records.changes)
    assert records.get(b"k", 0.0) is None
    assert asked


@pytest.mark.parametrize("forgotten", [b"k", b"another", None])
def test_an_answer_that_a_forget_may_have_overtaken_is_not_kept(forgotten: bytes | None) -> None:
    records = FinishedRecords()
    records.heard = True
    changes = records.changes
    records.forget(forgotten)
    records.keep(b"k", record(), 0.0, 60, changes)
    assert records.get(b"k", 0.0) is None


def test_a_forget_ends_one_record_and_a_lost_message_ends_all() -> None:
    records = FinishedRecords()
    for digest in (b"a", b"b", b"c"):
        kept(records, digest)
    records.forget(b"a")
    assert [records.get(each, 0.0) is not None for each in (b"a", b"b", b"c")] == [
        False,
        True,
        True,
    ]
    records.forget(None)
    assert [records.get(each, 0.0) for each in (b"b", b"c")] == [None, None]
    assert records._size == 0


def test_the_bytes_at_hand_are_bounded_and_the_least_used_go_first() -> None:
    records = FinishedRecords()
    large = b"x" * (LARGEST - 1000)
    count = LIMIT // (LARGEST - 500)
    for n in range(count):
        kept(records, b"%d" % n, large)
    assert records.get(b"0", 0.0) is not None  # now the one used last
    for n in range(count, count + 10):
        kept(records, b"%d" % n, large)
    assert records.get(b"0", 0.0) is not None
    assert records.get(b"1", 0.0) is None
    assert records._size <= LIMIT
    assert records._size == sum(size for *_, size in records._found.values())


def test_a_large_record_is_fetched_each_time() -> None:
    records = FinishedRecords()
    kept(records, b"k", b"x" * LARGEST)
    assert records.get(b"k", 0.0) is None


# On a real server

Url = str


async def replayed(receipts: AsyncReceipts, call: Call = CALL) -> None:
    """Its record is at hand from here on."""
    assert isinstance(await receipts.begin(call), Record)
    records = async_desk_for(receipts.store, MAX_WAITERS).finished
    await until(lambda: records.heard)
    assert isinstance(await receipts.begin(call), Record)
    assert len(records._found) > 0


async def runs_again(receipts: AsyncReceipts) -> bool:
    """Whether the call is not answered from a record any more."""
    got = await receipts.begin(CALL)
    if isinstance(got, Record):
        return False
    await got.release()
    return True


def commands(client: redis.Redis) -> int:
    return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


@pytest.mark.parametrize("encrypted", [False, True])
def test_replays_of_one_process_ask_the_store_twice(redis_url: Url, encrypted: bool) -> None:
    store: Store = RedisStore(redis_url)
    if encrypted:
        store = SealedStore(store, os.urandom(32).hex())

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        await (await held(receipts, CALL)).finish(b"result", 60)
        await replayed(receipts)
        with redis.Redis.from_url(redis_url) as client:
            before = commands(client)
            for _ in range(50):
                got = await receipts.begin(CALL)
                assert isinstance(got, Record)
                assert got.payload == b"result"
            assert commands(client) == before

    run(main())


def test_another_payload_is_refused_without_asking(redis_url: Url) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(redis_url), policy())
        await (await held(receipts, CALL)).finish(b"result", 60)
        await replayed(receipts)
        with pytest.raises(errors.FingerprintMismatch):
            await receipts.begin(Call("k", "s", TWO))
        other = await receipts.begin(Call("k", "another scope", ONE))
        assert isinstance(other, AsyncHeld)
        await other.release()

    run(main())


def test_a_forget_of_our_own_is_heeded_by_the_very_next_call(redis_url: Url) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(redis_url), policy())
        for _ in range(20):
            await (await held(receipts, CALL)).finish(b"result", 60)
            await replayed(receipts)
            assert await receipts.forget(CALL)

    run(main())


def test_a_forget_elsewhere_is_heard(redis_url: Url) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(redis_url), policy())
        elsewhere = Receipts(RedisStore(redis_url), policy())
        for _ in range(20):
            await (await held(receipts, CALL)).finish(b"result", 60)
            await replayed(receipts)
            assert await asyncio.to_thread(elsewhere.forget, CALL)
            await until(lambda: runs_again(receipts))

    run(main())


def test_a_forget_while_the_connection_is_cut_is_made_good_by_the_next_one(
    redis_url: Url, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finished, "MAX_AGE", 3600.0)  # the bound alone must not be what helps

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(redis_url), policy())
        elsewhere = Receipts(RedisStore(redis_url), policy())
        await (await held(receipts, CALL)).finish(b"result", 60)
        await replayed(receipts)
        with redis.Redis.from_url(redis_url) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.to_thread(elsewhere.forget, CALL)
        await until(lambda: runs_again(receipts))

    run(main())


def test_a_user_who_may_not_subscribe_asks_each_time(own_server: OwnServer) -> None:
    server = own_server()
    with server.client() as admin:
        admin.execute_command(
            "ACL", "SETUSER", "deaf", "on", ">secret", "~*", "+@all", "resetchannels"
        )
    url = f"redis://deaf:secret@127.0.0.1:{server.port}/0"

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(url), policy())
        await (await held(receipts, CALL)).finish(b"result", 60)
        desk = async_desk_for(receipts.store, MAX_WAITERS)
        for _ in range(5):
            assert isinstance(await receipts.begin(CALL), Record)
            await until(lambda: not desk._tasks)  # the subscription was refused
        assert not desk.finished._found
        with server.client() as client:
            client.execute_command("DEL", *client.keys("*"))
        again = await receipts.begin(CALL)
        assert isinstance(again, AsyncHeld)
        await again.release()

    run(main())


def test_a_process_without_replays_subscribes_to_nothing(redis_url: Url) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(redis_url), policy())
        await (await held(receipts, CALL)).finish(b"result", 60)
        with redis.Redis.from_url(redis_url) as client:
            assert b"retrysafe:i:forgotten" not in client.pubsub_channels()
        assert not async_desk_for(receipts.store, MAX_WAITERS).finished.heard

    run(main())


def test_a_store_in_this_process_is_asked_each_time() -> None:
    async def main() -> None:
        receipts = AsyncReceipts(MemoryStore(), policy())
        await (await held(receipts, CALL)).finish(b"result", 60)
        for _ in range(3):
            assert isinstance(await receipts.begin(CALL), Record)
        assert not async_desk_for(receipts.store, MAX_WAITERS).finished._found

    run(main())
