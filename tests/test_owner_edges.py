"""Owners at their edges: leases of different lengths, endings that are cancelled, late replies,
and what one call's trouble may do to the others."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from retrysafe import commands as c
from retrysafe import errors, keys
from retrysafe.commands import Answer, Reply
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.events import listening
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import MAX_WAITERS, AsyncHeld, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.receipting import CALL, ONE, TWO, held, policy
from tests.servers import Server
from tests.support import run, until, wait_until


def renewed_since(owner: Any, before: float) -> Callable[[], bool]:
    """Whether a lease's end has moved on."""
    return lambda: owner._taken.lease_until > before


class Faulty(MemoryStore):
    """A memory store whose async door answers `before(command)` first, where that is not None."""

    def __init__(self, before: Callable[[c.Command], Any]) -> None:
        super().__init__("faulty")
        self.before = before

    def open_async(self) -> Any:
        door = super().open_async()
        execute = door.execute

        async def checked(command: c.Command) -> Reply:
            answer = self.before(command)
            if isinstance(answer, BaseException):
                raise answer
            if asyncio.iscoroutine(answer):
                answer = await answer
            return answer if answer is not None else await execute(command)

        async def many(commands: Any) -> Any:
            return [await checked(command) for command in commands]

        door.execute = checked  # type: ignore[method-assign]
        door.execute_many = many  # type: ignore[method-assign]
        return door


def test_a_short_lease_is_renewed_in_time_beside_a_long_one(store: Store) -> None:
    async def main() -> None:
        long = await held(AsyncReceipts(store, policy(lease=30)), Call("long", "s", ONE))
        receipts = AsyncReceipts(store, policy(lease=0.4, wait=0))
        short = await held(receipts)
        before = short._taken.lease_until
        for _ in range(3):
            await until(renewed_since(short, before), limit=2)
            before = short._taken.lease_until
            with pytest.raises(errors.InFlight):
                await receipts.begin(CALL)
        await short.finish(b"r", 60)
        await long.finish(b"r", 60)
        assert not short.lost

    run(main())


def test_a_short_lease_is_renewed_in_time_beside_a_long_one_on_threads(store: Store) -> None:
    long = Receipts(store, policy(lease=30)).begin(Call("long", "s", ONE))
    receipts = Receipts(store, policy(lease=0.4, wait=0))
    short = receipts.begin(CALL)
    assert isinstance(long, Held)
    assert isinstance(short, Held)
    before = short._taken.lease_until
    for _ in range(3):
        wait_until(renewed_since(short, before), limit=2)
        before = short._taken.lease_until
        with pytest.raises(errors.InFlight):
            receipts.begin(CALL)
    short.finish(b"r", 60)
    long.finish(b"r", 60)


def test_a_finish_that_is_cancelled_between_two_tries_is_still_recorded() -> None:
    down = False
    tries = 0

    def before(command: c.Command) -> Any:
        nonlocal tries
        if down and isinstance(command, c.Finish):
            tries += 1
            return errors.StoreUnavailable(reason="down")
        return None

    async def main() -> None:
        nonlocal down
        receipts = AsyncReceipts(Faulty(before), policy(lease=5))
        first = await held(receipts)
        down = True
        finishing = asyncio.create_task(first.finish(b"r", 60))
        await until(lambda: tries >= 2)
        await asyncio.sleep(0)  # it sleeps until its next try
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        down = False
        await until(lambda: len(first._desk.flights) == 0)
        assert isinstance(await receipts.begin(CALL), Record)
        assert first._taken.ended

    run(main())


def test_our_own_finish_is_no_lost_lease_to_a_renewal_that_comes_after_it() -> None:
    gate = asyncio.Event()
    seen: list[str] = []

    async def recorded_but_late(door: Any, command: c.Finish) -> Reply:
        reply: Reply = door.execute(command)
        await gate.wait()  # the reply takes its time
        return reply

    async def main() -> None:
        def before(command: c.Command) -> Any:
            if isinstance(command, c.Finish):
                return recorded_but_late(store.open(), command)
            return None

        store = Faulty(before)
        receipts = AsyncReceipts(store, policy(lease=0.3))
        first = await held(receipts)
        lost: list[bool] = []
        first.on_lost = lambda: lost.append(True)
        finishing = asyncio.create_task(first.finish(b"r", 60))
        asked = 0

        def counted(command: c.Command) -> Any:
            nonlocal asked
            asked += isinstance(command, c.Renew)
            return None

        await asyncio.sleep(0)
        store.before = counted
        await until(lambda: asked >= 2)
        gate.set()
        assert await finishing is None
        assert not lost
        assert not first.lost

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "lease-lost" not in seen
    assert "finish-refused" not in seen


def test_a_follower_is_never_given_the_record_of_another_payload(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        leader = await held(receipts, Call("k", "s", keys.NO_FINGERPRINT))
        desk = leader._desk
        first = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: desk.flights.waiting == 1)
        other = asyncio.create_task(receipts.begin(Call("k", "s", TWO)))
        await until(lambda: desk.flights.waiting == 2)
        await leader.release()
        taken = await first
        assert isinstance(taken, AsyncHeld)
        await taken.finish(b"one's", 60)
        with pytest.raises(errors.FingerprintMismatch):
            await other

    run(main())


def test_with_the_store_down_duplicates_are_told_together() -> None:
    asked = 0

    async def slow() -> Reply:
        await asyncio.sleep(0.2)
        raise errors.StoreUnavailable(reason="down")

    def before(command: c.Command) -> Any:
        nonlocal asked
        if isinstance(command, c.Begin):
            asked += 1
            return slow()
        return None

    async def main() -> None:
        receipts = AsyncReceipts(Faulty(before), policy())
        results = await asyncio.gather(
            *(receipts.begin(CALL) for _ in range(20)), return_exceptions=True
        )
        assert {type(each) for each in results} == {errors.StoreUnavailable}
        assert asked == 1
        desk = async_desk_for(receipts.store, MAX_WAITERS)
        assert len(desk.flights) == desk.flights.waiting == 0

    run(main())


def test_a_corrupt_record_that_won_leaves_the_true_answer_and_no_flight() -> None:
    def before(command: c.Command) -> Any:
        return Reply(Answer.DONE, 0, b"r9") if isinstance(command, c.Finish) else None

    seen: list[str] = []

    async def main() -> None:
        receipts = AsyncReceipts(Faulty(before), policy())
        first = await held(receipts)
        assert await first.finish(b"r", 60) is None
        assert len(first._desk.flights) == 0

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "record-corrupt" in seen


def test_an_owner_whose_on_lost_fails_costs_no_other_its_lease(store: Store) -> None:
    receipts = Receipts(store, policy(lease=0.4, wait=0))
    unlucky = receipts.begin(Call("unlucky", "s", ONE))
    lucky = receipts.begin(CALL)
    assert isinstance(unlucky, Held)
    assert isinstance(lucky, Held)

    def fails() -> None:
        raise ValueError("what a user wrote")

    unlucky.on_lost = fails
    digest = unlucky._taken.claim.digest
    door = desk_for(store, MAX_WAITERS).door
    door.execute(c.Forget(digest))
    stolen = c.Begin(digest, b"another-owner-00", ONE, 60_000_000, 60_000, b"", True, "")
    assert door.execute(stolen).answer is Answer.OK
    wait_until(lambda: unlucky.lost)
    for _ in range(3):
        before = lucky._taken.lease_until
        wait_until(renewed_since(lucky, before), limit=3)
    with pytest.raises(errors.InFlight):
        receipts.begin(CALL)
    lucky.finish(b"r", 60)
    unlucky.release()


def test_loops_that_ended_are_let_go(redis_url: str) -> None:
    store = RedisStore(redis_url, "owners")
    loops: list[weakref.ref[Any]] = []

    async def once(n: int) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        receipts = AsyncReceipts(store, policy())
        await (await held(receipts, Call(f"{n}", "s", ONE))).finish(b"r", 60)

    for n in range(20):
        run(once(n))
    gc.collect()
    assert sum(each() is not None for each in loops) <= 2


def test_I52_a_refused_subscription_is_one_thread_not_one_each_time(
    own_server: Callable[..., Server],
) -> None:
    server = own_server()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "resetchannels", "~*", "+@all")
    door = RedisStore(f"redis://app:pw@127.0.0.1:{server.port}/0", "owners").open()
    before = set(threading.enumerate())
    for _ in range(4):
        assert door.listen(b"inbox-0123456789", lambda name, value: None, 0.05) is False
    assert len(set(threading.enumerate()) - before) == 1
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "allchannels")
    wait_until(lambda: door.listen(b"inbox-0123456789", lambda name, value: None, 0.05))
    door.close()


def test_a_replica_that_cannot_write_is_not_stormed_with_connections(
    own_server: Callable[..., Server],
) -> None:
    primary = own_server()
    replica = own_server(replicaof=["127.0.0.1", str(primary.port)])

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(replica.url, "owners"), policy(lease=5))
        with pytest.raises(errors.StoreUnavailable):
            await receipts.begin(CALL)

    with replica.client() as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", limit=20)
        count = client.info("stats")["total_connections_received"]
        run(main())
        assert client.info("stats")["total_connections_received"] - count < 40


@pytest.mark.parametrize("option", ["protocol=2", "decode_responses=true"])
def test_options_of_the_url_that_would_change_the_protocol_are_refused(option: str) -> None:
    from retrysafe.stores import open_store

    with pytest.raises(errors.SettingsError, match=option.partition("=")[0]):
        open_store(f"redis://127.0.0.1:1/0?{option}")


def test_an_answer_that_cannot_be_recorded_frees_the_key() -> None:
    from retrysafe.middleware import IdempotencyMiddleware
    from tests.asgi import post

    async def main() -> None:
        runs = 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1
            await send({"type": "http.response.start", "status": "200", "headers": []})
            await send({"type": "http.response.body", "body": b"x"})

        target = IdempotencyMiddleware(app, store=MemoryStore(), policy=IdempotencyPolicy(wait=0))
        for _ in range(2):
            with pytest.raises(TypeError):
                await post(target)
        assert runs == 2

    run(main())
