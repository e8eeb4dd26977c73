"""Receipts in a real Cluster: slots that move, nodes that die."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from retrysafe import errors, keys
from retrysafe.breaker_remote import breaker_keys
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores import open_store
from retrysafe.stores.cluster import ClusterStore
from retrysafe.stores.doors import async_door, door
from retrysafe.stores.redis import COMMAND_DEADLINE
from retrysafe.stores.topology import Topology, key_of
from tests.receipting import CALL, ONE, held, policy
from tests.servers import Cluster, Server
from tests.stores.test_acl import PASSWORD, rules
from tests.support import run, until, wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """For tests that leave it whole."""
    with Cluster() as started:
        yield started


def name_of(store: ClusterStore, call: Call) -> bytes:
    """The key of a call's receipt."""
    digest = keys.digest(store.namespace, call.scope, call.key)
    return f"{store.namespace}:r:{digest.hex()}".encode()


def calls_at(
    cluster: Cluster, store: ClusterStore, belongs: Callable[[Server], bool], count: int = 1
) -> list[Call]:
    """Calls whose receipts lie on a node that is asked for."""
    found: list[Call] = []
    for n in range(10_000):
        call = Call(f"k{n}", "s", ONE)
        if belongs(cluster.owner(name_of(store, call))):
            found.append(call)
            if len(found) == count:
                return found
    raise AssertionError("no such key")


def test_async_receipts_lie_on_every_node(cluster: Cluster) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(open_store(cluster.url, namespace="async"), policy())
        calls = [Call(f"k{n}", "s", ONE) for n in range(60)]

        async def twice(call: Call) -> None:
            await (await held(receipts, call)).finish(b"r", 60)
            assert isinstance(await receipts.begin(call), Record)

        await asyncio.gather(*map(twice, calls))

    run(main())
    for node in cluster.nodes:
        with node.client() as client:
            names = client.keys("async:r:*")
            assert names
            assert all(client.pttl(name) > 0 for name in names)


def test_sync_receipts_lie_on_every_node(cluster: Cluster) -> None:
    receipts = Receipts(open_store(cluster.url, namespace="sync"), policy())
    for n in range(60):
        call = Call(f"k{n}", "s", ONE)
        first = receipts.begin(call)
        assert isinstance(first, Held)
        first.finish(b"r", 60)
        assert isinstance(receipts.begin(call), Record)
    for node in cluster.nodes:
        with node.client() as client:
            assert client.keys("sync:r:*")


def test_waiters_are_woken_whatever_node_they_listen_at(cluster: Cluster) -> None:
    store = ClusterStore(cluster.url, "waiters")
    other = ClusterStore(cluster.url, "waiters")

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        sync = Receipts(store, policy())
        for node in cluster.nodes:
            for call in calls_at(cluster, store, lambda each, node=node: each is node, 2):  # type: ignore[misc]
                first = await held(AsyncReceipts(other, policy()), call)
                waiters = [
                    asyncio.create_task(receipts.begin(call)),
                    asyncio.create_task(asyncio.to_thread(sync.begin, call)),
                ]
                await until(lambda: async_desk_for(store, MAX_WAITERS).listening)
                await until(lambda: desk_for(store, MAX_WAITERS).listening)
                await first.finish(b"r", 60)
                for waiter in waiters:
                    got = await waiter
                    assert isinstance(got, Record)
                    assert got.payload == b"r"

    run(main(), limit=60)


def test_the_listener_moves_when_its_node_dies() -> None:
    with Cluster() as own:
        store = ClusterStore(own.url, "ears")

        async def main() -> None:
            door = store.open_async()
            sync = store.open()
            news: list[bytes | None] = []
            sync_news: list[bytes | None] = []
            assert await door.subscribe(b"ears:news", news.append, 5.0)
            assert await asyncio.to_thread(sync.subscribe, b"ears:news", sync_news.append, 5.0)

            def hears(node: Server) -> int:
                return int(node.ask("PUBSUB", "NUMSUB", "ears:news")[1])

            (first, *_) = [node for node in own.nodes if hears(node)]
            first.kill()
            left = [node for node in own.nodes if node.running]
            await until(lambda: sum(map(hears, left)) == 2, limit=20)
            left[0].ask("PUBLISH", "ears:news", "hello")
            await until(lambda: b"hello" in news and b"hello" in sync_news, limit=20)
            assert None in news + sync_news  # what was said meanwhile may be lost
            await door.close()
            sync.close()

        run(main(), limit=60)


def test_a_dead_node_costs_its_own_slots_alone() -> None:
    with Cluster() as own:
        store = ClusterStore(own.url, "dead")
        lost, *_ = own.nodes
        (gone,) = calls_at(own, store, lambda node: node is lost)
        others = calls_at(own, store, lambda node: node is not lost, 20)

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            sync = Receipts(store, policy())
            await (await held(receipts, gone)).release()
            await asyncio.to_thread(lambda: _take(sync, gone).release())
            lost.kill()
            began = time.monotonic()
            refused = asyncio.create_task(receipts.begin(gone))
            for call in others:
                await (await held(receipts, call)).finish(b"r", 60)
                assert isinstance(await asyncio.to_thread(sync.begin, call), Record)
            with pytest.raises(errors.StoreUnavailable):
                await refused
            with pytest.raises(errors.StoreUnavailable):
                await asyncio.to_thread(sync.begin, gone)
            assert time.monotonic() - began < 8
            await asyncio.to_thread(lost.start)

            async def back() -> bool:
                try:
                    await (await held(receipts, gone)).finish(b"r", 60)
                except errors.StoreUnavailable:
                    return False
                return True

            await until(back, limit=20)

        run(main(), limit=60)


def _take(receipts: Receipts, call: Call) -> Held:
    got = receipts.begin(call)
    assert isinstance(got, Held)
    return got


def test_a_failed_nodes_replica_is_found() -> None:
    with Cluster(replicas=1) as own:
        store = ClusterStore(own.url, "failover")
        lost = own.nodes[0]
        (call,) = calls_at(own, store, lambda node: node is lost)

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            sync = Receipts(store, policy())
            await (await held(receipts, call)).release()
            await asyncio.to_thread(lambda: _take(sync, call).release())
            lost.kill()
            replica = own.nodes[3]
            await until(lambda: replica.ask("ROLE")[0] == b"master", limit=20)
            await until(lambda: _serves(replica), limit=20)
            began = time.monotonic()
            first = await held(receipts, call)
            assert time.monotonic() - began < 2
            await first.finish(b"r", 60)
            assert isinstance(await asyncio.to_thread(sync.begin, call), Record)

        run(main(), limit=60)


def _serves(node: Server) -> bool:
    lines: bytes = node.ask("CLUSTER", "INFO")
    return b"cluster_state:ok" in lines


def test_slots_that_move_under_load_cost_no_call_its_answer() -> None:
    """Given calls without a break, when their slots move with their keys: MOVED, ASK, TRYAGAIN."""
    with Cluster() as own:
        store = ClusterStore(own.url, "moving")
        source, target, *_ = own.nodes
        calls = calls_at(own, store, lambda node: node is source, 12)
        slots = sorted({source.ask("CLUSTER", "KEYSLOT", name_of(store, each)) for each in calls})
        counts = {call.key: 0 for call in calls}
        stopping = asyncio.Event()

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            sync = Receipts(store, policy())

            async def work(call: Call) -> None:
                while not stopping.is_set():
                    await (await held(receipts, call)).finish(b"r", 60)
                    got = await asyncio.to_thread(sync.begin, call)
                    assert isinstance(got, Record)
                    assert await receipts.forget(call)
                    counts[call.key] += 1

            working = [asyncio.create_task(work(call)) for call in calls]

            async def further(by: int) -> None:
                until_now = dict(counts)
                await until(
                    lambda: (
                        any(each.done() for each in working)
                        or all(counts[k] >= until_now[k] + by for k in counts)
                    )
                )
                assert not [each.exception() for each in working if each.done()]

            await further(2)
            for slot in slots:
                target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", own.id_of(source))
                source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", own.id_of(target))
            await further(2)  # new receipts are asked for at the target
            for slot in slots:
                while names := source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100):
                    source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 1000, "KEYS", *names)
            await further(2)
            for slot in slots:
                for node in (target, source):
                    node.ask("CLUSTER", "SETSLOT", slot, "NODE", own.id_of(target))
            await further(2)
            assert _errors(source, "ask") >= len(calls)
            # One such answer is enough to ask for the map of all slots again.
            assert _errors(source, "moved") >= 1
            stopping.set()
            await asyncio.gather(*working)

        run(main(), limit=60)
        with target.client() as client:
            assert not client.keys("moving:r:*")  # each was forgotten where it was


def _errors(node: Server, word: str) -> int:
    """How often a node has answered with this error."""
    with node.client() as client:
        found = client.info("errorstats").get(f"errorstat_{word.upper()}", {"count": 0})
    return int(found["count"])


def test_commands_name_their_key() -> None:
    assert key_of((b"EVALSHA", b"sha", 1, b"k", b"a")) == b"k"
    assert key_of((b"EVAL", b"text", "0", b"a")) is None
    assert key_of(("set", "k", "v")) == b"k"
    assert key_of(("PING",)) is None
    assert key_of(("PUBLISH", "channel", "x")) is None


def test_a_map_that_is_none_is_not_learnt() -> None:
    topology = Topology([("h", 1)])
    for reply in (None, b"OK", [], [[0, 1]], [[0, 100, b"x"]], [["a", "b", [b"h", 1]]]):
        assert not topology.learn(reply, ("h", 1))
    assert topology.owner(b"k") is None
    assert topology.learn([[0, 16383, [b"", 7000, b"id", []], [b"r", 7001]]], ("h", 1))
    assert topology.owner(b"k") == ("h", 7000)
    assert topology.nodes() == [("h", 1), ("h", 7000), ("r", 7001)]


@pytest.mark.parametrize("rest", ["", "x", "99999 h:1", "1 h:x", "-1 h:1"])
def test_a_redirect_that_is_none_leads_nowhere(rest: str) -> None:
    assert Topology([("h", 1)]).moved(rest, ("h", 1)) is None


def test_a_server_that_is_no_cluster_is_said_to_be_none(redis_url: str) -> None:
    store = ClusterStore(redis_url.replace("redis://", "redis+cluster://"), "none")

    async def main() -> None:
        with pytest.raises(errors.StoreUnavailable, match="cluster"):
            await AsyncReceipts(store, policy()).begin(CALL)

    run(main())
    with pytest.raises(errors.StoreUnavailable, match="cluster"):
        Receipts(store, policy()).begin(CALL)


def test_the_documented_rights_are_enough_in_a_cluster() -> None:
    with Cluster() as own:
        rights = (*rules(), "+cluster|slots", "+asking", "+wait")
        for node in own.nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", "payments", *rights)
        url = own.url.replace("://", f"://payments:{PASSWORD}@")

        async def main() -> None:
            receipts = AsyncReceipts(ClusterStore(url), policy())
            for n in range(30):
                await (await held(receipts, Call(f"k{n}", "s", ONE))).finish(b"r", 60)
            wrong = url.replace(PASSWORD, "another")
            with pytest.raises(errors.StoreUnavailable, match="refuse") as caught:
                await AsyncReceipts(ClusterStore(wrong), policy()).begin(CALL)
            assert "another" not in str(caught.value)

        run(main())
        sync = Receipts(ClusterStore(url), policy())
        for n in range(30):
            assert isinstance(sync.begin(Call(f"k{n}", "s", ONE)), Record)
        for node in own.nodes:
            with node.client() as client:
                assert [entry for entry in client.acl_log() if entry["reason"] != "auth"] == []


def test_a_node_that_hangs_is_left_for_its_replica() -> None:
    with Cluster(replicas=1) as own:
        store = ClusterStore(own.url, "hung")
        hung, replica = own.nodes[0], own.nodes[3]
        (call,) = calls_at(own, store, lambda node: node is hung)

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            sync = Receipts(store, policy())
            await (await held(receipts, call)).release()
            await asyncio.to_thread(lambda: _take(sync, call).release())
            hung.pause()
            for begin in (receipts.begin(call), asyncio.to_thread(sync.begin, call)):
                began = time.monotonic()
                with pytest.raises(errors.StoreUnavailable):
                    await begin
                # Asking the others for the map is in that time, too.
                assert time.monotonic() - began < COMMAND_DEADLINE + 0.5
            await until(lambda: replica.ask("ROLE")[0] == b"master", limit=20)
            await until(lambda: _serves(replica), limit=20)

            async def recorded() -> bool:
                try:
                    got = await receipts.begin(call)
                except errors.StoreUnavailable:
                    return False
                if not isinstance(got, Record):
                    await got.finish(b"r", 60)
                return True

            async def read() -> bool:
                try:
                    return isinstance(await asyncio.to_thread(sync.begin, call), Record)
                except errors.StoreUnavailable:
                    return False

            await until(recorded, limit=20)
            await until(read, limit=20)

        try:
            run(main(), limit=90)
        finally:
            hung.resume()


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_keys_of_a_slot_that_moves_are_tried_again_until_they_are_together(
    cluster: Cluster, colour: str
) -> None:
    """A script of several keys, some of which are here and some not: TRYAGAIN."""
    name = f"moving-{colour}"
    store = ClusterStore(cluster.url, "try")
    names = breaker_keys("try", name)
    asked: list[Any] = ["forced-open", 60_000]
    assert door(store).eval("breaker_set", names, asked)[0] == 1  # the first key is there, alone
    source = cluster.owner(names[0].encode())
    target = next(node for node in cluster.nodes if node is not source)
    slot = source.ask("CLUSTER", "KEYSLOT", names[0])
    before = _errors(source, "tryagain")
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))
    stopped = threading.Event()

    def settle() -> None:
        wait_until(lambda: _errors(source, "tryagain") > before)
        source.ask("CLUSTER", "SETSLOT", slot, "STABLE")
        stopped.set()

    settling = threading.Thread(target=settle)
    settling.start()
    try:
        if colour == "sync":
            reply = door(store).eval("breaker_set", names, ["closed", 60_000])
        else:
            reply = run(_aeval(store, names))
    finally:
        settling.join(20)
    assert stopped.is_set()
    assert bytes(reply[1]) == b"closed"


async def _aeval(store: ClusterStore, names: list[str]) -> Any:
    return await async_door(store).eval("breaker_set", names, ["closed", 60_000])
