"""The receipt protocol at its edges: payloads against each other, lost moments, lost renewals."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from retrysafe import commands as c
from retrysafe import errors, keys
from retrysafe.desks import async_desk_for
from retrysafe.events import listening
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import MAX_WAITERS, AsyncHeld, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.wire import script
from tests.faults.proxy import Proxy
from tests.receipting import CALL, ONE, TWO, held, policy
from tests.servers import port_of
from tests.support import run, until


def die(owner: AsyncHeld) -> None:
    """The owner's process no longer renews, and its duplicates are of other processes."""
    owner._desk.drop(owner._taken)
    owner._desk.flights.leave(owner._taken.place)


def test_O18_the_key_of_a_dead_owner_still_belongs_to_its_payload(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=0.2))
        dead = await held(receipts)
        die(dead)
        waiter = asyncio.create_task(receipts.begin(CALL))
        with pytest.raises(errors.FingerprintMismatch):
            await receipts.begin(Call("k", "s", TWO))
        taken = await waiter
        assert isinstance(taken, AsyncHeld)
        with pytest.raises(errors.FingerprintMismatch):
            await receipts.begin(Call("k", "s", TWO))
        await taken.finish(b"one's", 60)
        await dead.finish(b"late", 60)
        with pytest.raises(errors.FingerprintMismatch):
            await receipts.begin(Call("k", "s", TWO))

    run(main())


def test_O19_B039_of_two_payloads_at_once_one_runs_and_the_other_is_refused(
    store: Store,
) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        ran: dict[str, list[bytes]] = {}

        async def call(key: str, fingerprint: bytes) -> str:
            try:
                got = await receipts.begin(Call(key, "s", fingerprint))
            except errors.FingerprintMismatch:
                return "refused"
            if isinstance(got, Record):
                assert got.fingerprint == fingerprint
                return "replayed"
            ran.setdefault(key, []).append(fingerprint)
            await asyncio.sleep(0)
            await got.finish(fingerprint, 60)
            return "ran"

        calls = [
            call(f"k{n}", fingerprint) for n in range(50) for fingerprint in (ONE, TWO, ONE, TWO)
        ]
        results = await asyncio.gather(*calls)
        assert all(len(each) == 1 for each in ran.values())
        assert len(ran) == 50
        assert results.count("ran") == 50
        assert results.count("replayed") == 50
        assert results.count("refused") == 100

    run(main())


def test_I66_O32_a_finish_between_the_look_and_the_subscription_is_seen(redis_url: str) -> None:
    owner_store = RedisStore(redis_url, "edges")
    owner = Receipts(owner_store, policy())

    class LateSubscription(RedisStore):
        def open_async(self) -> Any:
            door = super().open_async()
            listen = door.listen

            async def late(*args: Any) -> bool:
                await asyncio.to_thread(first.finish, b"r", 60)
                return await listen(*args)

            door.listen = late  # type: ignore[method-assign]
            return door

    async def main() -> None:
        receipts = AsyncReceipts(LateSubscription(redis_url, "edges"), policy(wait=10))
        async with asyncio.timeout(2):
            record = await receipts.begin(CALL)
        assert isinstance(record, Record)
        assert record.payload == b"r"

    first = owner.begin(CALL)
    assert isinstance(first, Held)
    run(main())


def test_I50_O43_one_failed_renewal_is_tried_again_and_the_work_goes_on(redis_url: str) -> None:
    seen: list[str] = []
    failures = 2

    class Flaky(RedisStore):
        def open_async(self) -> Any:
            door = super().open_async()
            many = door.execute_many

            async def flaky(commands: Any) -> Any:
                nonlocal failures
                if failures:
                    failures -= 1
                    return [errors.StoreUnavailable(reason="blip") for _ in commands]
                return await many(commands)

            door.execute_many = flaky  # type: ignore[method-assign]
            return door

    async def main() -> None:
        receipts = AsyncReceipts(Flaky(redis_url, "edges"), policy(lease=1.2, wait=0))
        first = await held(receipts)
        await until(lambda: seen.count("renewal-failed") >= 1)
        before = first._taken.lease_until
        await until(lambda: first._taken.lease_until > before)
        assert not first.lost
        with pytest.raises(errors.InFlight):
            await receipts.begin(CALL)
        await first.finish(b"r", 60)

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "lease-lost" not in seen


def test_I30_O44_a_lost_lease_is_told_and_its_late_result_changes_nothing(store: Store) -> None:
    seen: list[str] = []

    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=0.3))
        slow = await held(receipts)
        lost: list[bool] = []
        slow.on_lost = lambda: lost.append(True)
        # Somebody else owns the key by now, as after a pause that was longer than the lease.
        await slow._desk.door.execute(c.Forget(slow._taken.claim.digest))
        other = Receipts(store, policy(lease=5))
        taken = await asyncio.to_thread(other.begin, CALL)
        assert isinstance(taken, Held)
        await until(lambda: bool(lost))
        assert slow.lost
        finishing = asyncio.create_task(slow.finish(b"late", 60))
        await until(lambda: "finish-refused" in seen)
        await asyncio.to_thread(taken.finish, b"won", 60)
        won = await finishing
        assert won is not None
        assert won.payload == b"won"

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "lease-lost" in seen


def test_B007_keys_do_not_wait_for_one_another(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        all_held = [await held(receipts, Call(f"k{n}", "s", ONE)) for n in range(20)]
        for each in all_held:
            await each.finish(b"r", 60)

    run(main())


def test_O38_a_process_hears_only_of_the_keys_it_waits_for(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "edges")
        receipts = AsyncReceipts(store, policy(wait=0.5))
        owner = Receipts(RedisStore(redis_url, "edges"), policy())
        first = await asyncio.to_thread(owner.begin, CALL)
        assert isinstance(first, Held)
        heard: list[bytes] = []
        desk = async_desk_for(store, MAX_WAITERS)
        nudge = desk.flights.nudge

        def counted(digest: bytes, value: bytes) -> None:
            heard.append(digest)
            nudge(digest, value)

        desk.flights.nudge = counted  # type: ignore[method-assign]
        waiter = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: desk.listening)

        def others() -> None:
            for n in range(50):
                got = owner.begin(Call(f"other-{n}", "s", ONE))
                assert isinstance(got, Held)
                got.finish(b"r", 60)
            first.finish(b"r", 60)

        await asyncio.to_thread(others)
        assert isinstance(await waiter, Record)
        assert set(heard) == {desk_digest(store)}

    run(main())


def desk_digest(store: Store) -> bytes:
    return keys.digest(store.namespace, CALL.scope, CALL.key)


def test_B014_the_lease_not_the_ttl_says_how_long_a_dead_owner_blocks(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "edges")
        receipts = AsyncReceipts(store, policy(lease=0.3, ttl=86_400))
        dead = await held(receipts)
        door = store.open_async()
        name = b"edges:r:" + dead.name.encode()
        # The receipt itself stays visible for the whole TTL: it never looks "never received".
        assert await door.command("PTTL", name) > 86_000_000
        die(dead)
        again = await held(receipts)
        assert again.abandoned is not None
        await again.finish(b"r", 7200)
        assert 7_100_000 < await door.command("PTTL", name) <= 7_200_000
        await door.close()

    run(main())


def test_B057_lost_replies_under_load_never_run_a_key_twice(redis_url: str) -> None:
    chance = random.Random(57)
    port = port_of(redis_url)

    async def main(proxy: Proxy) -> None:
        ran: dict[int, int] = {}
        lanes = [AsyncReceipts(RedisStore(proxy.url, "edges"), policy(lease=3)) for _ in range(4)]

        async def call(key: int) -> None:
            while True:
                await asyncio.sleep(chance.random() / 5)
                try:
                    got = await chance.choice(lanes).begin(Call(f"{key}", "s", ONE))
                except (errors.StoreUnavailable, errors.InFlight):
                    continue
                if isinstance(got, AsyncHeld):
                    ran[key] = ran.get(key, 0) + 1
                    await got.finish(b"r", 60)
                return

        async def lose() -> None:
            while True:
                proxy.lose_reply(script(chance.choice(["begin", "finish"]))[1])
                await asyncio.sleep(0.02)

        losing = asyncio.create_task(lose())
        await asyncio.gather(*(call(key) for key in range(60) for _ in range(5)))
        losing.cancel()
        assert set(ran.values()) == {1}
        assert len(ran) == 60
        assert proxy.lost

    with Proxy(port) as proxy:
        run(main(proxy), limit=60)


def test_O48_a_host_clock_that_steps_changes_nothing(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    real = time.time

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(redis_url, "edges"), policy(wait=0))
        first = await held(receipts)
        for step in (86_400.0, -86_400.0):
            monkeypatch.setattr(time, "time", lambda step=step: real() + step)
            with pytest.raises(errors.InFlight):
                await receipts.begin(CALL)
        await first.finish(b"r", 60)
        assert isinstance(await receipts.begin(CALL), Record)

    run(main())


def test_O33_I49_a_result_that_ends_before_the_wait_for_it_is_refused() -> None:
    with pytest.raises(errors.SettingsError, match="ttl"):
        IdempotencyPolicy(ttl=1, wait=10)


def test_O86_a_threads_work_keeps_its_receipt_when_its_caller_is_cancelled(store: Store) -> None:
    import threading

    async def main() -> None:
        gate = threading.Event()
        receipts = Receipts(store, policy(wait=0))

        def work() -> None:
            got = receipts.begin(CALL)
            assert isinstance(got, Held)
            gate.wait(10)
            got.finish(b"r", 60)

        task = asyncio.create_task(asyncio.to_thread(work))
        others = AsyncReceipts(store, policy(wait=0))

        async def taken() -> bool:
            return await others.look(CALL) is not None

        await until(taken)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with pytest.raises(errors.InFlight):
            await others.begin(CALL)
        gate.set()

        async def recorded() -> bool:
            return isinstance(await others.look(CALL), Record)

        await until(recorded)

    run(main())


def test_B018_a_claim_is_one_atomic_write_with_its_expiry(redis_url: str) -> None:
    """Whatever is cut, every key has a TTL (the fixture checks it) and the retry runs in time."""
    port = port_of(redis_url)

    async def main(proxy: Proxy) -> None:
        for name in ("begin", "finish", "renew"):
            store = RedisStore(proxy.url, "edges")
            receipts = AsyncReceipts(store, policy(lease=0.3))
            call = Call(name, "s", ONE)
            proxy.lose_reply(script(name)[1])
            first = await held(receipts, call)
            if name == "renew":
                await until(lambda: proxy.lost == 3)
            await first.finish(b"r", 60)
            assert isinstance(await receipts.begin(call), Record)

    with Proxy(port) as proxy:
        run(main(proxy))


def test_the_memory_store_grows_with_what_it_stores_only() -> None:
    store = MemoryStore("edges")
    receipts = Receipts(store, policy())
    for n in range(5000):
        got = receipts.begin(Call(f"{n}", "s", ONE))
        assert isinstance(got, Held)
        got.release()
    assert store.size() == 0
    assert len(store._expiries) < 1100


def test_duplicates_of_a_lost_owner_are_answered_by_the_one_that_won(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=0.3, wait=10))
        slow = await held(receipts)
        follower = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: slow._desk.flights.waiting == 1)
        await slow._desk.door.execute(c.Forget(slow._taken.claim.digest))
        other = Receipts(store, policy(lease=5))
        taken = await asyncio.to_thread(other.begin, CALL)
        assert isinstance(taken, Held)
        await until(lambda: slow.lost)
        await asyncio.to_thread(taken.finish, b"won", 60)
        async with asyncio.timeout(4):
            record = await follower  # while the owner that lost is still at work
        assert isinstance(record, Record)
        assert record.payload == b"won"
        await slow.finish(b"late", 60)

    run(main())
