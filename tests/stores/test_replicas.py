"""Receipts that replicas hold before the work starts (`RETRYSAFE_REPLICAS`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from secrets import token_hex

import pytest

from retrysafe import errors
from retrysafe.commands import Begin, Release, Reply
from retrysafe.events import listening
from retrysafe.flow import new_token
from retrysafe.receipts import AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores.base import Store
from retrysafe.stores.cluster import ClusterStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.replicas import ACK_WITHIN_MS
from retrysafe.stores.sealed import SealedStore
from tests.faults.proxy import Proxy
from tests.receipting import CALL, ONE, held, policy
from tests.servers import Cluster, Replicated
from tests.support import run, until, wait_until

SHORT = r"(\d) of the (\d) replicas"


@pytest.fixture(scope="module")
def replicated() -> Iterator[Replicated]:
    """A primary and two replicas; every test leaves them running."""
    with Replicated(replicas=2, sentinels=0) as started:
        yield started


def begin(key: bytes, inbox: bytes = b"") -> Begin:
    return Begin(key, new_token(), b"-" * 16, 60_000_000, 60_000, inbox, True, "")


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_receipt_is_on_the_replicas_when_its_work_starts(
    replicated: Replicated, replicas: int
) -> None:
    namespace = f"held{replicas}"
    store = RedisStore(replicated.servers[0].url, namespace, replicas)

    def holding(server_names: list[list[bytes]], count: int) -> int:
        return sum(len(names) == count for names in server_names)

    def on_replicas() -> list[list[bytes]]:
        found = []
        for server in replicated.servers[1:]:
            with server.client() as client:
                found.append(client.keys(f"{namespace}:r:*"))
        return found

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        for n in range(1, 31):
            mine = await held(receipts, Call(f"k{n}", "s", ONE))
            assert holding(on_replicas(), n) >= replicas
            await mine.finish(b"r", 60)
        many = [held(receipts, Call(f"m{n}", "s", ONE)) for n in range(100)]
        for each in await asyncio.gather(*many):
            await each.release()

    run(main())
    sync = Receipts(store, policy())
    mine = sync.begin(Call("sync", "s", ONE))
    assert isinstance(mine, Held)
    assert holding(on_replicas(), 31) >= replicas
    mine.finish(b"r", 60)


def test_a_shortfall_is_refused_before_the_work_and_leaves_no_receipt(
    replicated: Replicated,
) -> None:
    primary = replicated.servers[0]
    store: Store = RedisStore(primary.url, "short", 3)

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailable, match=SHORT) as caught:
            await receipts.begin(CALL)
        assert time.monotonic() - began < 5
        assert "2 of the 3" in caught.value.reason
        assert caught.value.key

        # What was taken is given back.
        with primary.client() as client:
            await until(lambda: not client.keys("short:r:*"))
        # Many at once are refused together, not one after another.
        began = time.monotonic()
        calls = [receipts.begin(Call(f"k{n}", "s", ONE)) for n in range(50)]
        refused = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in refused} == {errors.StoreUnavailable}
        assert time.monotonic() - began < 10 * ACK_WITHIN_MS / 1000
        with primary.client() as client:
            await until(lambda: not client.keys("short:r:*"))

    run(main())
    with pytest.raises(errors.StoreUnavailable, match="2 of the 3"):
        Receipts(store, policy()).begin(CALL)
    with primary.client() as client:
        wait_until(lambda: not client.keys("short:r:*"))


def test_other_commands_go_on_while_replicas_are_waited_for(replicated: Replicated) -> None:
    async def main() -> None:
        door = RedisStore(replicated.servers[0].url, "others", 3).open_async()
        waiting = asyncio.create_task(door.execute(begin(b"a" * 16)))
        answered = 0
        while not waiting.done():
            await door.command("PING")
            answered += 1
        assert answered > 20
        with pytest.raises(errors.StoreUnavailable):
            await waiting
        await door.close()

    run(main())


def test_a_result_that_no_replica_holds_is_answered_and_tried_again(
    replicated: Replicated,
) -> None:
    """The work is done, so its caller gets the answer; the record is confirmed when it can be."""
    store = RedisStore(replicated.servers[0].url, "result", 2)
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=30))
        mine = await held(receipts)
        replicated.servers[2].pause()
        assert await mine.finish(b"r", 60) is None
        assert ("result-unrecorded", "retrying") in seen
        replicated.servers[2].resume()
        await until(lambda: ("finished", "kept") in seen, limit=20)

    try:
        with listening(lambda event: seen.append((event.kind, event.outcome))):
            run(main(), limit=60)
    finally:
        replicated.servers[2].resume()


def test_a_begin_that_was_sent_again_is_not_taken_for_replicated(replicated: Replicated) -> None:
    """Given a begin whose write was on a connection that broke, when no replica holds it, then WAIT
    on the next connection, which has written nothing, doesn't say that all is well."""
    with Proxy(replicated.servers[0].port) as proxy:
        store = RedisStore(proxy.url, "again", 2)

        async def main() -> None:
            door = store.open_async()
            command = begin(b"k" * 16)
            assert isinstance(await door.execute(command), Reply)  # the replicas hold it
            for server in replicated.servers[1:]:
                server.pause()
            proxy.cut()
            with pytest.raises(errors.StoreUnavailable, match="0 of the 2"):
                await door.execute(command)
            for server in replicated.servers[1:]:
                server.resume()

            async def confirmed() -> bool:
                try:
                    await door.execute(command)
                except errors.StoreUnavailable:
                    return False
                return True

            await until(confirmed, limit=20)
            await door.execute(Release(command.key, command.token))
            await door.close()

        try:
            run(main(), limit=60)
        finally:
            for server in replicated.servers[1:]:
                server.resume()


def test_the_connection_may_break_while_replicas_are_waited_for(replicated: Replicated) -> None:
    with Proxy(replicated.servers[0].port) as proxy:
        store = RedisStore(proxy.url, "cut", 1)

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            for n in range(40):
                working = [
                    asyncio.create_task(held(receipts, Call(f"{n}-{m}", "s", ONE)))
                    for m in range(5)
                ]
                for _ in range(n % 4):
                    await asyncio.sleep(0)
                proxy.cut()
                for each in await asyncio.gather(*working):
                    await each.finish(b"r", 60)

        run(main(), limit=60)


def test_a_cancelled_caller_leaves_nothing_behind(replicated: Replicated) -> None:
    primary = replicated.servers[0]

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(primary.url, "gone", 3), policy())
        call = asyncio.create_task(receipts.begin(CALL))
        with primary.client() as client:
            await until(lambda: bool(client.keys("gone:r:*")))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: not client.keys("gone:r:*"))

    run(main())


def test_a_store_may_run_unprotected_where_that_is_wanted(replicated: Replicated) -> None:
    from retrysafe.decorators import idempotent

    store = RedisStore(replicated.servers[0].url, "run", 3)
    done: list[str] = []

    @idempotent(key="order", store=store, on_store_error="run")
    async def charge(order: str) -> str:
        done.append(order)
        return order

    assert run(charge("o-1")) == "o-1"
    assert done == ["o-1"]


def test_results_may_be_sealed_as_well(replicated: Replicated) -> None:
    store = SealedStore(RedisStore(replicated.servers[0].url, "sealed", 2), token_hex(32))

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        await (await held(receipts)).finish(b"r", 60)
        got = await receipts.begin(CALL)
        assert isinstance(got, Record)
        assert got.payload == b"r"

    run(main())


def test_replicas_of_a_cluster_hold_receipts() -> None:
    with Cluster(replicas=1) as cluster:
        store = ClusterStore(cluster.url, "held", 1)

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            calls = [Call(f"k{n}", "s", ONE) for n in range(30)]
            for each in await asyncio.gather(*(held(receipts, call) for call in calls)):
                await each.finish(b"r", 60)
            short = AsyncReceipts(ClusterStore(cluster.url, "short", 2), policy())
            with pytest.raises(errors.StoreUnavailable, match="1 of the 2"):
                await short.begin(CALL)

        run(main())
        found = 0
        for node in cluster.nodes[3:]:
            with node.client() as client:
                found += len(client.keys("held:r:*"))
        assert found == 30
        mine = Receipts(store, policy()).begin(CALL)
        assert isinstance(mine, Held)
        mine.finish(b"r", 60)
        with pytest.raises(errors.StoreUnavailable, match="1 of the 2"):
            Receipts(ClusterStore(cluster.url, "short sync", 2), policy()).begin(CALL)
