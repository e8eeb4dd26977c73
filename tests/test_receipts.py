"""The receipt protocol through its public door, both colours, both stores."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from retrysafe import commands as c
from retrysafe import errors, keys
from retrysafe.context import current_request
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.events import Event, listening
from retrysafe.receipts import MAX_WAITERS, AsyncHeld, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.testing_clock import FakeClock
from tests.receipting import CALL, ONE, TWO, held, policy
from tests.support import run, until, wait_until


def test_a_retried_call_is_answered_from_the_record_of_the_first(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE, "req-1")
        first = await held(receipts, call)
        assert await first.finish(b"result", 60) is None
        again = await receipts.begin(call)
        assert isinstance(again, Record)
        assert (again.payload, again.request_id) == (b"result", "req-1")

    run(main())


def test_a_retried_sync_call_is_answered_from_the_record_of_the_first(store: Store) -> None:
    receipts = Receipts(store, policy())
    call = Call("k", "s", ONE)
    first = receipts.begin(call)
    assert isinstance(first, Held)
    first.finish(None, 60)
    again = receipts.begin(call)
    assert isinstance(again, Record)
    assert again.payload is None


def test_I11_two_scopes_never_share_a_receipt(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        await (await held(receipts, Call("k", "alice", ONE))).finish(b"a", 60)
        await (await held(receipts, Call("k", "bob", ONE))).finish(b"b", 60)

    run(main())


def test_I60_duplicates_in_one_process_wait_and_get_one_answer(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        others = [asyncio.create_task(receipts.begin(call)) for _ in range(200)]
        desk = first._desk
        await until(lambda: desk.flights.waiting == 200)
        await first.finish(b"result", 60)
        records = await asyncio.gather(*others)
        assert {record.payload for record in records} == {b"result"}  # type: ignore[union-attr]
        assert len(desk.flights) == 0
        assert desk.flights.waiting == 0

    run(main())


def test_I67_a_duplicate_with_another_payload_is_refused_at_once(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(wait=10))
        first = await held(receipts, Call("k", "s", ONE))
        async with asyncio.timeout(2):
            with pytest.raises(errors.FingerprintMismatch):
                await receipts.begin(Call("k", "s", TWO))
        await first.finish(b"r", 60)
        with pytest.raises(errors.FingerprintMismatch):
            await receipts.begin(Call("k", "s", TWO))

    run(main())


def test_O27_another_fingerprint_scheme_is_answered_by_its_key(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        await (await held(receipts, Call("k", "s", ONE))).finish(b"r", 60)
        got = await receipts.begin(Call("k", "s", keys.fingerprint("j", b"one")))
        assert isinstance(got, Record)

    run(main())


def test_I63_the_wait_runs_out_and_the_receipt_stays(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(wait=0.1))
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        with pytest.raises(errors.InFlight) as caught:
            await receipts.begin(call)
        assert caught.value.retry_after > 0
        await first.finish(b"r", 60)
        assert isinstance(await receipts.begin(call), Record)

    run(main())


def test_I62_a_released_receipt_is_taken_over_by_exactly_one_waiter(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        runs = 0

        async def duplicate() -> bytes | None:
            nonlocal runs
            got = await receipts.begin(call)
            if isinstance(got, AsyncHeld):
                runs += 1
                await got.finish(b"second", 60)
                return b"second"
            return got.payload

        others = [asyncio.create_task(duplicate()) for _ in range(50)]
        await until(lambda: first._desk.flights.waiting == 50)
        await first.release()
        assert set(await asyncio.gather(*others)) == {b"second"}
        assert runs == 1

    run(main())


def test_B122_cancelled_waiters_leave_nothing_behind(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        desk = first._desk
        others = [asyncio.create_task(receipts.begin(call)) for _ in range(100)]
        await until(lambda: desk.flights.waiting > 0)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert desk.flights.waiting == 0
        await first.finish(b"r", 60)
        assert len(desk.flights) == 0
        assert isinstance(await receipts.begin(call), Record)

    run(main())


def test_the_lead_is_handed_on_when_a_waiting_leader_is_cancelled(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        sync = Receipts(store, policy())
        owner = await asyncio.to_thread(sync.begin, call)  # another desk: not of this loop
        assert isinstance(owner, Held)
        leader = asyncio.create_task(receipts.begin(call))
        desk = async_desk_for(store, MAX_WAITERS)
        await until(lambda: desk.flights.waiting == 1)
        follower = asyncio.create_task(receipts.begin(call))
        await until(lambda: desk.flights.waiting == 2)
        leader.cancel()
        await asyncio.gather(leader, return_exceptions=True)
        await asyncio.to_thread(owner.finish, b"r", 60)
        record = await follower
        assert isinstance(record, Record)
        assert record.payload == b"r"

    run(main())


def test_I65_O41_a_waiter_over_the_limit_is_told_at_once(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(wait=20), max_waiters=3)
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        others = [asyncio.create_task(receipts.begin(call)) for _ in range(3)]
        await until(lambda: first._desk.flights.waiting == 3)
        async with asyncio.timeout(2):
            with pytest.raises(errors.InFlight):
                await receipts.begin(call)
        await first.finish(b"r", 60)
        await asyncio.gather(*others)

    run(main())


def test_I69_O31_O45_B009_B019_the_lease_of_a_dead_owner_ends_and_one_waiter_takes_over(
    store: Store,
) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=0.3, wait=10))
        call = Call("k", "s", ONE, "dead")
        dead = await held(receipts, call)
        dead._desk.drop(dead._taken)  # its process no longer renews
        dead._desk.flights.leave(dead._taken.place)
        results = await asyncio.gather(*(receipts.begin(call) for _ in range(1)))
        (got,) = results
        assert isinstance(got, AsyncHeld)
        assert got.abandoned is not None
        assert (got.abandoned.request_id, got.abandoned.key) == ("dead", "k")
        assert got.fence > dead.fence
        await got.finish(b"second", 60)
        won = await dead.finish(b"late", 60)
        assert won is not None
        assert won.payload == b"second"

    run(main())


def test_with_refuse_an_abandoned_receipt_is_told_so(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=0.2, wait=10, on_abandoned="refuse"))
        call = Call("k", "s", ONE)
        dead = await held(receipts, call)
        dead._desk.drop(dead._taken)
        dead._desk.flights.leave(dead._taken.place)
        with pytest.raises(errors.Abandoned):
            await receipts.begin(call)
        await dead.interrupt()
        assert await receipts.forget(call)
        await (await held(receipts, call)).release()

    run(main())


def test_an_interrupted_receipt_is_abandoned_at_once(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=30))
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        waiter = asyncio.create_task(receipts.begin(call))
        await until(lambda: first._desk.flights.waiting == 1)
        await first.interrupt()
        async with asyncio.timeout(3):
            second = await waiter
        assert isinstance(second, AsyncHeld)
        assert second.abandoned is not None
        await second.release()

    run(main())


def test_I29_O42_a_lease_is_renewed_while_the_work_runs(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(lease=0.3, wait=0))
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            with pytest.raises(errors.InFlight):
                await receipts.begin(call)
            await asyncio.sleep(0.05)
        await first.finish(b"r", 60)
        assert not first.lost

    run(main())


def test_I29_a_lease_is_renewed_while_sync_work_runs(store: Store) -> None:
    receipts = Receipts(store, policy(lease=0.3, wait=0))
    call = Call("k", "s", ONE)
    first = receipts.begin(call)
    assert isinstance(first, Held)
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        with pytest.raises(errors.InFlight):
            receipts.begin(call)
        time.sleep(0.05)
    first.finish(b"r", 60)
    assert not first.lost


def test_B024_no_thread_task_or_held_receipt_is_left(store: Store) -> None:
    before = set(threading.enumerate())  # other tests' threads are not ours to judge
    receipts = Receipts(store, policy(lease=0.3))
    for n in range(200):
        got = receipts.begin(Call(f"k{n}", "s", ONE))
        assert isinstance(got, Held)
        got.finish(b"r", 60)

    def left() -> set[str]:
        new = set(threading.enumerate()) - before
        return {thread.name for thread in new if thread.name.startswith("retrysafe")}

    wait_until(lambda: not left() - {"retrysafe-inbox"})

    async def main() -> None:
        others = AsyncReceipts(store, policy(lease=0.3))
        for n in range(200):
            await (await held(others, Call(f"a{n}", "s", ONE))).finish(b"r", 60)
        assert len(asyncio.all_tasks()) == 1

    run(main())


def test_I86_O40_a_call_from_inside_its_own_work_is_a_conflict_at_once(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy(wait=10))
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        with first.working() as context:
            assert current_request() is context
            async with asyncio.timeout(2):
                with pytest.raises(errors.Reentered):
                    await receipts.begin(call)
        await first.finish(b"r", 60)
        with first.working():
            assert isinstance(await receipts.begin(call), Record)

    run(main())


def test_threads_wait_for_one_execution_and_get_its_answer(store: Store) -> None:
    receipts = Receipts(store, policy())
    call = Call("k", "s", ONE)
    runs: list[int] = []

    def duplicate(n: int) -> bytes | None:
        got = receipts.begin(call)
        if isinstance(got, Held):
            runs.append(n)
            wait_until(lambda: desk_for(store, MAX_WAITERS).flights.waiting == 19)
            got.finish(b"result", 60)
            return b"result"
        return got.payload

    with ThreadPoolExecutor(20) as threads:
        assert set(threads.map(duplicate, range(20))) == {b"result"}
    assert len(runs) == 1


def test_a_sync_waiter_is_woken_by_an_async_owner(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        waiting = asyncio.get_running_loop().run_in_executor(
            None, Receipts(store, policy()).begin, call
        )
        await until(lambda: desk_for(store, MAX_WAITERS).flights.waiting == 1)
        await first.finish(b"result", 60)
        record = await waiting
        assert isinstance(record, Record)
        assert record.payload == b"result"

    run(main())


def test_I90_O89_two_loops_one_after_the_other(store: Store) -> None:
    async def once(name: str) -> None:
        receipts = AsyncReceipts(store, policy())
        await (await held(receipts, Call(name, "s", ONE))).finish(b"r", 60)
        assert isinstance(await receipts.begin(Call(name, "s", ONE)), Record)

    run(once("a"))
    run(once("b"))


def test_events_tell_digests_and_durations_only(store: Store) -> None:
    seen: list[Event] = []

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("secret-key", "secret-scope", ONE, "req")
        await (await held(receipts, call)).finish(b"secret-result", 60)
        await receipts.begin(call)

    with listening(seen.append):
        run(main())
    assert [event.kind for event in seen] == ["acquired", "finished", "replayed"]
    assert "secret" not in repr(seen)
    assert all(event.request_id == "req" for event in seen)


def test_I45_a_foreign_value_is_refused_with_an_event(redis_url: str) -> None:
    store = RedisStore(redis_url, "receipts")
    seen: list[str] = []

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        digest = keys.digest("receipts", "s", "k")
        door = store.open_async()
        name = b"receipts:r:" + digest.hex().encode()
        await door.command(b"SET", name, b"not ours", b"PX", 60_000)
        with pytest.raises(errors.RecordCorrupt):
            await receipts.begin(call)
        with pytest.raises(errors.RecordCorrupt):
            await receipts.look(call)
        assert await door.command(b"GET", name) == b"not ours"
        await door.close()

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "record-corrupt" in seen


def test_at_most_two_round_trips_fresh_one_for_a_replay_none_for_a_waiter(redis_url: str) -> None:
    class Counting(RedisStore):
        def open_async(self) -> Any:
            door = super().open_async()
            execute = door.execute

            async def counted(command: c.Command) -> c.Reply:
                commands.append(type(command).__name__)
                return await execute(command)

            door.execute = counted  # type: ignore[method-assign]
            return door

    commands: list[str] = []

    async def main() -> None:
        receipts = AsyncReceipts(Counting(redis_url, "receipts"), policy())
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        others = [asyncio.create_task(receipts.begin(call)) for _ in range(100)]
        await until(lambda: first._desk.flights.waiting == 100)
        await first.finish(b"r", 60)
        await asyncio.gather(*others)
        assert commands == ["Begin", "Finish"]
        await receipts.begin(call)
        assert commands == ["Begin", "Finish", "Begin"]

    run(main())


def test_I51_O49_a_vanished_receipt_is_recorded_all_the_same(store: Store) -> None:
    seen: list[str] = []

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        first = await held(receipts, call)
        await receipts.forget(call)
        await first.finish(b"r", 60)
        assert isinstance(await receipts.begin(call), Record)

    with listening(lambda event: seen.append(event.kind)):
        run(main())
    assert "receipt-vanished" in seen


def test_B005_B006_a_cancelled_owner_leaves_one_successor(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        call = Call("k", "s", ONE)
        gate = asyncio.Event()
        runs = 0

        async def work() -> bytes | None:
            nonlocal runs
            got = await receipts.begin(call)
            if isinstance(got, Record):
                return got.payload
            runs += 1
            try:
                await gate.wait()
            except BaseException:
                await asyncio.shield(got.interrupt())
                raise
            await got.finish(b"value", 60)
            return b"value"

        leader = asyncio.create_task(work())
        await until(lambda: runs == 1)
        followers = [asyncio.create_task(work()) for _ in range(10)]
        desk = async_desk_for(store, MAX_WAITERS)
        await until(lambda: desk.flights.waiting == 10)
        leader.cancel()
        await until(lambda: runs == 2)
        gate.set()
        assert await asyncio.gather(*followers) == [b"value"] * 10
        assert runs == 2
        assert await work() == b"value"
        assert runs == 2

    run(main())


def test_a_clock_that_begins_at_0_names_predecessors_too() -> None:
    """In tests, by hand: a fence of 0 is nobody's."""
    receipts = Receipts(MemoryStore("tests", clock=FakeClock(0)), policy())
    first = receipts.begin(CALL)
    assert isinstance(first, Held)
    first.interrupt()
    second = receipts.begin(CALL)
    assert isinstance(second, Held)
    assert second.abandoned is not None
    second.release()
