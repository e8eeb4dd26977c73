"""Receipts on the primary that real sentinels name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import redis

from retrysafe import errors
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.errors import SettingsError
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores import open_store
from retrysafe.stores.sentinel import SentinelStore
from tests.receipting import CALL, ONE, held, policy
from tests.servers import Replicated
from tests.support import run, until


@pytest.fixture(scope="module")
def replicated() -> Iterator[Replicated]:
    """For tests that break nothing."""
    with Replicated(replicas=1) as started:
        yield started


def test_async_receipts_over_sentinel(replicated: Replicated) -> None:
    async def main() -> None:
        store = open_store(replicated.url, namespace="async")
        receipts = AsyncReceipts(store, policy())
        first = await held(AsyncReceipts(SentinelStore(replicated.url, "async"), policy()))
        waiter = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).listening)
        await first.finish(b"r", 60)
        got = await waiter
        assert isinstance(got, Record)
        assert got.payload == b"r"
        assert await receipts.forget(CALL)

    run(main())


def test_sync_receipts_over_sentinel(replicated: Replicated) -> None:
    store = open_store(replicated.url, namespace="sync")
    receipts = Receipts(store, policy())
    first = Receipts(SentinelStore(replicated.url, "sync"), policy()).begin(CALL)
    assert isinstance(first, Held)

    async def main() -> None:
        waiter = asyncio.create_task(asyncio.to_thread(receipts.begin, CALL))
        await until(lambda: desk_for(store, MAX_WAITERS).listening)
        await asyncio.to_thread(first.finish, b"r", 60)
        got = await waiter
        assert isinstance(got, Record)
        assert got.payload == b"r"

    run(main())
    assert receipts.forget(CALL)


def test_a_database_number_is_the_primarys(replicated: Replicated) -> None:
    async def main() -> None:
        door = SentinelStore(f"{replicated.url}/3", "db").open_async()
        await door.command("SET", "db:a", "1", "PX", 60_000)
        await door.close()

    run(main())
    with redis.Redis(port=replicated.primary().port, db=3) as client:
        assert client.get("db:a") == b"1"


def test_a_dead_sentinel_is_passed_over(replicated: Replicated) -> None:
    hosts = replicated.url.replace("redis+sentinel://", "redis+sentinel://127.0.0.1:1,")

    async def main() -> None:
        receipts = AsyncReceipts(SentinelStore(hosts, "dead"), policy())
        await (await held(receipts)).finish(b"r", 60)

    run(main())
    assert isinstance(Receipts(SentinelStore(hosts, "dead"), policy()).begin(CALL), Record)


@pytest.mark.parametrize(
    "url", ["redis+sentinel://127.0.0.1:1,127.0.0.1:2/payments", "{sentinels}/unknown"]
)
def test_without_a_primary_the_store_is_unavailable_within_the_deadline(
    replicated: Replicated, url: str
) -> None:
    sentinels = replicated.url.rpartition("/")[0]
    store = SentinelStore(url.format(sentinels=sentinels), "none")

    async def main() -> None:
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailable):
            await AsyncReceipts(store, policy()).begin(CALL)
        assert time.monotonic() - began < 4

    run(main())
    with pytest.raises(errors.StoreUnavailable):
        Receipts(store, policy()).begin(CALL)


def test_a_planned_failover_costs_no_call_its_answer_and_writes_to_no_replica() -> None:
    with Replicated(replicas=1, down_after=1000) as own:
        old = own.primary()
        store = SentinelStore(own.url, "planned")
        sync = Receipts(store, policy())

        async def main() -> None:
            receipts = AsyncReceipts(store, policy())
            await (await held(receipts, Call("warm", "s", ONE))).finish(b"r", 60)
            warm = sync.begin(Call("warm sync", "s", ONE))
            assert isinstance(warm, Held)
            warm.finish(b"r", 60)
            (replica,) = own.replicas()
            with own.sentinels[0].client() as client:
                client.execute_command("SENTINEL", "FAILOVER", own.service)
            await until(lambda: own.elected(after=old) is replica, limit=20)

            async def again() -> bool:
                try:
                    mine = await receipts.begin(Call("after", "s", ONE))
                except errors.StoreUnavailable:
                    return False
                if not isinstance(mine, Record):
                    await mine.finish(b"r", 60)
                return True

            await until(again, limit=20)
            got = await asyncio.to_thread(sync.begin, Call("after", "s", ONE))
            assert isinstance(got, Record)
            with replica.client() as client:
                assert client.role()[0] == b"master"
                assert client.keys("planned:r:*")

        run(main(), limit=60)


def test_users_and_passwords_of_sentinels_and_servers_are_told_apart() -> None:
    with Replicated(replicas=0, sentinels=1) as own:
        with own.primary().client() as client:
            client.config_set("requirepass", "server-pw")
        with own.sentinels[0].client() as client:
            client.execute_command(
                *("ACL", "SETUSER", "asker", "on", ">sentinel-pw"),
                "+sentinel|get-master-addr-by-name",
            )
            client.execute_command("SENTINEL", "SET", own.service, "auth-pass", "server-pw")
            client.execute_command("ACL", "SETUSER", "default", "off")
        place = own.url.removeprefix("redis+sentinel://")
        good = (
            f"redis+sentinel://:server-pw@{place}"
            "?sentinel_username=asker&sentinel_password=sentinel-pw&client_name=till"
        )

        async def main() -> None:
            receipts = AsyncReceipts(SentinelStore(good, "users"), policy())
            await (await held(receipts)).finish(b"r", 60)
            for bad in (good.replace("sentinel-pw", "no"), good.replace(":server-pw", ":no")):
                with pytest.raises(errors.StoreUnavailable) as caught:
                    await AsyncReceipts(SentinelStore(bad, "users"), policy()).begin(CALL)
                assert "sentinel-pw" not in str(caught.value)

        run(main())
        assert isinstance(Receipts(SentinelStore(good, "users"), policy()).begin(CALL), Record)
        for bad in (good.replace("sentinel-pw", "no"), good.replace(":server-pw", ":no")):
            with pytest.raises(errors.StoreUnavailable):
                Receipts(SentinelStore(bad, "users"), policy()).begin(CALL)


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://h1,h2",  # no service
        "redis+sentinel:///payments",  # no host
        "redis+sentinel://h1:99999/payments",
        "redis+sentinel://h1:port/payments",
        "redis+sentinel://h1/payments/one",
        "redis+sentinel://h1/payments?unknown=1",
        "redis+sentinel://h1/payments?protocol=2",
        "redis+sentinel://h1/payments?tls=perhaps",
        "redis+cluster://h1/1",
        "redis+cluster://h1?sentinel_password=x",
        "rediss+cluster://",
    ],
)
def test_B059_urls_of_several_hosts_that_cannot_be_used(url: str) -> None:
    with pytest.raises(SettingsError, match="it takes"):
        open_store(url)


def test_an_error_names_no_value_of_a_url() -> None:
    with pytest.raises(SettingsError) as caught:
        open_store("redis+sentinel://u:hunter2@h1/payments?Sec%20ret=hunter3")
    assert "hunter" not in str(caught.value)
    assert "Sec" not in str(caught.value)
    store = SentinelStore("rediss+sentinel://u:hunter2@h1/payments?sentinel_password=hunter3")
    assert "hunter" not in repr(store)
