"""The receipt protocol while the store fails, on real servers and through a real proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from retrysafe import errors
from retrysafe.commands import Command, Reply
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.events import listening
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.stores import open_store
from retrysafe.stores.redis import COMMAND_DEADLINE, RedisStore
from retrysafe.stores.wire import script
from tests.conftest import OwnServer
from tests.faults.proxy import Proxy
from tests.receipting import CALL, ONE, held, policy
from tests.servers import Server, port_of, server_binaries
from tests.support import run, until, wait_until


def sha(name: str) -> bytes:
    return script(name)[1]


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(port_of(redis_url)) as started:
        yield started


def test_I41_B061_a_begin_whose_reply_was_lost_is_not_in_flight_by_itself(proxy: Proxy) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(proxy.url, "faults"), policy())
        await (await held(receipts, Call("warm", "s", ONE))).finish(b"x", 60)
        proxy.lose_reply(sha("begin"))
        first = await held(receipts)
        assert proxy.lost == 1
        await first.finish(b"r", 60)
        assert isinstance(await receipts.begin(CALL), Record)

    run(main())


def test_I42_B063_a_finish_whose_reply_was_lost_is_recorded_once(proxy: Proxy) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(proxy.url, "faults"), policy())
        await (await held(receipts, Call("warm", "s", ONE))).finish(b"x", 60)
        first = await held(receipts)
        proxy.lose_reply(sha("finish"))
        assert await first.finish(b"r", 60) is None
        assert proxy.lost == 1
        again = await receipts.begin(CALL)
        assert isinstance(again, Record)
        assert again.payload == b"r"

    run(main())


def test_B063_a_release_whose_reply_was_lost_releases(proxy: Proxy) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(proxy.url, "faults"), policy())
        await (await held(receipts, Call("warm", "s", ONE))).release()
        first = await held(receipts)
        proxy.lose_reply(sha("release"))
        await first.release()
        await (await held(receipts)).release()

    run(main())


def test_sync_commands_survive_lost_replies(proxy: Proxy) -> None:
    receipts = Receipts(RedisStore(proxy.url, "faults"), policy())
    warm = receipts.begin(Call("warm", "s", ONE))
    assert isinstance(warm, Held)
    warm.finish(b"x", 60)
    proxy.lose_reply(sha("begin"))
    first = receipts.begin(CALL)
    assert isinstance(first, Held)
    proxy.lose_reply(sha("finish"))
    assert first.finish(b"r", 60) is None
    assert proxy.lost == 2
    assert isinstance(receipts.begin(CALL), Record)


def test_a_cut_connection_costs_no_caller_its_answer(proxy: Proxy) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(proxy.url, "faults"), policy())
        for round_number in range(5):
            calls = [
                asyncio.create_task(held(receipts, Call(f"{round_number}-{n}", "s", ONE)))
                for n in range(100)
            ]
            await asyncio.sleep(0)
            proxy.cut()
            for each in await asyncio.gather(*calls):
                await each.finish(b"r", 60)

    run(main())


def test_I47_O52_a_flushed_script_cache_is_loaded_again(redis_url: str) -> None:
    store = RedisStore(redis_url, "faults")
    sync = Receipts(store, policy())

    async def main() -> None:
        receipts = AsyncReceipts(store, policy())
        door = store.open_async()
        first = await held(receipts)
        await door.command("SCRIPT", "FLUSH")
        await first.finish(b"r", 60)
        await door.command("SCRIPT", "FLUSH")
        assert isinstance(await receipts.begin(CALL), Record)
        await door.command("SCRIPT", "FLUSH")
        await door.close()

    run(main())
    assert isinstance(sync.begin(CALL), Record)


def test_I40_O50_O94_B060_B065_a_store_that_comes_back_gets_the_record(
    own_server: Callable[..., Server],
) -> None:
    server = own_server(appendonly="yes", appendfsync="always")
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(server.url, "faults"), policy(lease=20))
        first = await held(receipts)
        server.kill()
        began = time.monotonic()
        assert await first.finish(b"r", 60) is None  # the caller is not kept for ever
        assert time.monotonic() - began < 10
        assert ("result-unrecorded", "retrying") in seen
        await asyncio.to_thread(server.restart)
        await until(lambda: ("finished", "kept") in seen)
        again = await receipts.begin(CALL)
        assert isinstance(again, Record)
        assert again.payload == b"r"

    with listening(lambda event: seen.append((event.kind, event.outcome))):
        run(main(), limit=60)


def test_I40_a_store_that_stays_away_is_given_up_at_the_leases_end(
    own_server: Callable[..., Server],
) -> None:
    server = own_server()
    seen: list[tuple[str, str]] = []

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(server.url, "faults"), policy(lease=1))
        first = await held(receipts)
        server.kill()
        await first.finish(b"r", 60)
        await until(lambda: ("result-unrecorded", "given-up") in seen)
        assert len(first._desk.flights) == 0

    with listening(lambda event: seen.append((event.kind, event.outcome))):
        run(main(), limit=60)


def test_O93_a_store_that_hangs_is_unavailable_in_bounded_time(
    own_server: Callable[..., Server],
) -> None:
    server = own_server()

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(server.url, "faults"), policy(lease=5))
        await (await held(receipts, Call("warm", "s", ONE))).finish(b"x", 60)
        server.pause()
        try:
            async with asyncio.timeout(3):
                with pytest.raises(errors.StoreUnavailable):
                    await receipts.begin(CALL)
        finally:
            server.resume()
        # The begin that was given up may have run: at most a lease, then the key is free.
        async with asyncio.timeout(10):
            await (await held(receipts)).finish(b"r", 60)

    run(main(), limit=60)


def test_O93_sync_a_store_that_hangs_is_unavailable_in_bounded_time(
    own_server: Callable[..., Server],
) -> None:
    server = own_server()
    receipts = Receipts(RedisStore(server.url, "faults"), policy(lease=5))
    warm = receipts.begin(Call("warm", "s", ONE))
    assert isinstance(warm, Held)
    warm.finish(b"x", 60)
    server.pause()
    try:
        with pytest.raises(errors.StoreUnavailable):
            receipts.begin(CALL)
    finally:
        server.resume()


def test_I48_a_full_store_is_unavailable_and_nothing_runs(
    own_server: Callable[..., Server],
) -> None:
    server = own_server(maxmemory="3mb", maxmemory_policy="noeviction")

    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(server.url, "faults"), policy())
        first = await held(receipts)
        done = Call("done", "s", ONE)
        await (await held(receipts, done)).finish(b"d", 60)
        door = RedisStore(server.url, "faults").open_async()
        filled = 0
        for size in (50_000, 500, 1):
            with pytest.raises(errors.StoreUnavailable, match="OOM"):
                while filled < 50_000:
                    await door.command("SET", f"fill-{filled}", "x" * size, "PX", 600_000)
                    filled += 1
        with pytest.raises(errors.StoreUnavailable):
            await receipts.begin(Call("other", "s", ONE))
        assert isinstance(await receipts.begin(done), Record)  # that takes no room
        finishing = asyncio.create_task(first.finish(b"r", 60))
        for n in range(filled):
            await door.command("DEL", f"fill-{n}")
        await finishing
        await until(lambda: len(first._desk.flights) == 0)
        assert isinstance(await receipts.begin(CALL), Record)
        await door.close()

    run(main(), limit=60)


def test_I52_O36_O37_a_user_without_channels_records_and_its_waiters_poll(
    own_server: Callable[..., Server],
) -> None:
    server = own_server()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "resetchannels", "~*", "+@all")
    url = f"redis://app:pw@127.0.0.1:{server.port}/0"
    seen: list[str] = []

    async def main() -> None:
        store = RedisStore(url, "faults")
        sync = Receipts(store, policy())
        first = await asyncio.to_thread(sync.begin, CALL)  # another inbox than the waiter's
        assert isinstance(first, Held)
        receipts = AsyncReceipts(store, policy())
        waiter = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).flights.waiting == 1)
        await until(lambda: "inbox-lost" in seen)
        await asyncio.to_thread(first.finish, b"r", 60)
        async with asyncio.timeout(3):
            record = await waiter
        assert isinstance(record, Record)
        assert record.payload == b"r"

    with listening(lambda event: seen.append(event.kind)):
        run(main())


def test_I61_B135_a_killed_subscription_costs_no_waiter_its_answer(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "faults")
        sync = Receipts(RedisStore(redis_url, "faults"), policy())
        first = await asyncio.to_thread(sync.begin, CALL)
        assert isinstance(first, Held)
        receipts = AsyncReceipts(store, policy())
        waiters = [asyncio.create_task(receipts.begin(CALL)) for _ in range(20)]
        desk = async_desk_for(store, MAX_WAITERS)
        await until(lambda: desk.listening and desk.flights.waiting == 20)
        door = store.open_async()
        for _ in range(3):
            await door.command("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.to_thread(first.finish, b"r", 60)
        async with asyncio.timeout(5):
            records = await asyncio.gather(*waiters)
        assert {record.payload for record in records} == {b"r"}  # type: ignore[union-attr]

        async def subscribed() -> bool:
            found = await door.command("PUBSUB", "NUMSUB", b"faults:i:" + desk.inbox)
            return bool(found[1] == 1)

        await until(subscribed)
        await door.close()

    run(main())


def test_B136_a_held_connection_ends_the_wait_in_time(proxy: Proxy, redis_url: str) -> None:
    async def main() -> None:
        first = await held(AsyncReceipts(RedisStore(redis_url, "faults"), policy()))
        store = RedisStore(proxy.url, "faults")
        receipts = AsyncReceipts(store, policy(wait=1.0))
        waiter = asyncio.create_task(receipts.begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).listening)
        proxy.hold()
        async with asyncio.timeout(5):
            with pytest.raises((errors.StoreUnavailable, errors.InFlight)):
                await waiter
        proxy.resume()
        await first.finish(b"r", 60)

    run(main())


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_a_waiter_whose_last_look_hangs_ends_within_a_second_of_its_wait(
    own_server: OwnServer, colour: str
) -> None:
    """Given a wait of 2 s whose last look, at its end, is never answered."""
    server = own_server()
    waited = policy(wait=2.0)

    async def main() -> float:
        first = await held(AsyncReceipts(RedisStore(server.url, "faults"), policy()))
        store = RedisStore(server.url, "faults")
        began = time.monotonic()
        if colour == "async":
            waiter = asyncio.create_task(AsyncReceipts(store, waited).begin(CALL))
        else:
            waiter = asyncio.create_task(asyncio.to_thread(Receipts(store, waited).begin, CALL))
        await asyncio.sleep(began + 1.75 - time.monotonic())  # the look before was at 1.5 s
        assert not waiter.done()
        server.pause()
        try:
            with pytest.raises((errors.StoreUnavailable, errors.InFlight)):
                await waiter
            return time.monotonic() - began
        finally:
            server.resume()
            await first.finish(b"r", 60)

    assert run(main(), limit=30) < 2.0 + 1.0  # its wait, and what it may take beyond


def test_a_thread_waits_for_a_connection_and_for_its_answer_as_long_as_one_command_may_take(
    own_server: OwnServer,
) -> None:
    """Given a server that hangs and twice as many threads as connections."""
    server = own_server()
    receipts = Receipts(RedisStore(server.url, "faults"), policy())
    warm = receipts.begin(CALL)
    assert isinstance(warm, Held)
    warm.finish(b"r", 60)
    took: list[float] = []

    def begin(n: int) -> None:
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailable):
            receipts.begin(Call(f"k{n}", "s", ONE))
        took.append(time.monotonic() - began)

    server.pause()
    try:
        threads = [threading.Thread(target=begin, args=(n,)) for n in range(130)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        server.resume()
    assert len(took) == 130
    assert max(took) < 2 * COMMAND_DEADLINE - 0.5  # not one wait after the other


def test_a_follower_outlives_a_leader_whose_time_is_over(proxy: Proxy, redis_url: str) -> None:
    """Given a leader whose last look is late, and a follower that has waited for a moment."""

    async def main() -> None:
        first = await held(AsyncReceipts(RedisStore(redis_url, "faults"), policy()))
        store = RedisStore(proxy.url, "faults")
        leader = asyncio.create_task(AsyncReceipts(store, policy(wait=1.0)).begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).listening)
        follower = asyncio.create_task(AsyncReceipts(store, policy(wait=20.0)).begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).flights.waiting == 2)
        proxy.delay_replies(0.8)
        with pytest.raises((errors.StoreUnavailable, errors.InFlight)):
            await leader
        await first.finish(b"r", 60)
        assert isinstance(await follower, Record)

    run(main())


def test_an_answer_that_came_while_the_loop_stood_still_counts(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a loop that is blocked, beyond a waiter's time, while its last look is out."""

    async def main() -> None:
        owner = Receipts(RedisStore(redis_url, "faults"), policy())
        first = owner.begin(CALL)
        assert isinstance(first, Held)
        store = RedisStore(redis_url, "faults")
        desk = async_desk_for(store, MAX_WAITERS)
        whole, end = desk._execute_by, time.monotonic() + 1.0

        async def execute_by(command: Command, limit: float) -> Reply:
            if time.monotonic() >= end:
                first.finish(b"r", 60)
                asyncio.get_running_loop().call_soon(time.sleep, 0.8)
            return await whole(command, limit)

        monkeypatch.setattr(desk, "_execute_by", execute_by)
        desk._deaf_until = end + 20  # it polls: the last look is what tells
        assert isinstance(await AsyncReceipts(store, policy(wait=1.0)).begin(CALL), Record)

    run(main())


def test_a_threads_command_ends_in_its_time_whatever_is_late() -> None:
    """Given a server each of whose replies takes 1.2 s, the handshake's too."""
    with Server() as server, Proxy(server.port) as slow:
        slow.delay_replies(1.2)
        receipts = Receipts(RedisStore(slow.url.replace("/0", "/3"), "faults"), policy())
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailable):
            receipts.begin(CALL)
        assert time.monotonic() - began < 2 * COMMAND_DEADLINE - 0.5  # not that for each reply


@pytest.mark.parametrize("sentinels", [3, 5])
def test_sentinels_that_hang_take_no_longer_than_one_command_may(sentinels: int) -> None:
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(sentinels)
        ]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        receipts = Receipts(open_store(f"redis+sentinel://{hosts}/orders"), policy())
        began = time.monotonic()
        with pytest.raises(errors.StoreUnavailable):
            receipts.begin(CALL)
        assert time.monotonic() - began < COMMAND_DEADLINE + 0.4  # not some for each sentinel


@pytest.mark.parametrize("colour", ["async", "sync"])
def test_a_short_wait_does_not_stand_in_line_behind_a_subscription(
    redis_url: str, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "faults")
        begun, over = threading.Event(), threading.Event()

        def hanging(*_: object) -> bool:
            begun.set()
            return over.wait(20)

        if colour == "async":
            desk = async_desk_for(store, MAX_WAITERS)
            monkeypatch.setattr(desk.door, "listen", lambda *_: asyncio.to_thread(hanging))
            first = asyncio.create_task(desk._listen(20.0))
            await until(begun.is_set)
            assert not await desk._listen(0.05)
        else:
            sync = desk_for(store, MAX_WAITERS)
            monkeypatch.setattr(sync.door, "listen", hanging)
            first = asyncio.create_task(asyncio.to_thread(sync._listen, 20.0))
            await until(begun.is_set)
            assert not await asyncio.to_thread(sync._listen, 0.05)
        assert not first.done()
        over.set()
        assert await first

    run(main())


def test_I70_O35_500_keys_at_once_need_one_connection(proxy: Proxy) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(proxy.url, "faults"), policy())

        async def once(n: int) -> None:
            await (await held(receipts, Call(f"k{n}", "s", ONE))).finish(b"r", 60)

        await asyncio.gather(*(once(n) for n in range(500)))
        assert proxy.connections == 1

    run(main())


def test_cancelled_callers_keep_the_order_of_replies(redis_url: str) -> None:
    async def main() -> None:
        store = RedisStore(redis_url, "faults")
        door = store.open_async()

        async def echo(n: int) -> bool:
            found = await door.command("ECHO", f"word-{n}")
            return bool(found == b"word-%d" % n)

        tasks = [asyncio.create_task(echo(n)) for n in range(5000)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        answered = [each for each in results if not isinstance(each, BaseException)]
        assert len(answered) > 3000
        assert all(answered)
        await door.close()

    run(main())


def test_a_large_record_goes_its_own_way_and_is_fetched_by_waiters(redis_url: str) -> None:
    async def main() -> None:
        big = b"x" * 3_000_000
        first = await held(AsyncReceipts(RedisStore(redis_url, "faults"), policy()))
        store = RedisStore(redis_url, "faults")
        waiter = asyncio.create_task(AsyncReceipts(store, policy()).begin(CALL))
        await until(lambda: async_desk_for(store, MAX_WAITERS).listening)
        await first.finish(big, 60)
        record = await waiter
        assert isinstance(record, Record)
        assert record.payload == big

    run(main())


def _grows(count: Callable[[], int], by: int) -> None:
    before = count()
    wait_until(lambda: count() >= before + by)


def _refusals(server: Server) -> int:
    with server.client() as client:
        return int(client.info("errorstats").get("errorstat_READONLY", {}).get("count", 0))


def test_threads_on_a_server_that_turns_read_only_see_no_error_but_ours(
    own_server: OwnServer,
) -> None:
    """One thread's READONLY closes no connection that another thread holds."""
    server = own_server()
    door = RedisStore(server.url, "tests").open()
    stopping = threading.Event()
    others: list[BaseException] = []
    answered = [0]

    def work(number: int) -> None:
        n = 0
        while not stopping.is_set():
            n += 1
            try:
                door.eval("result_write", (f"tests:{number}:{n}",), (b"x", 60_000, b"c", b""))
                answered[0] += 1
            except errors.StoreUnavailable:
                continue
            except BaseException as error:
                others.append(error)
                return

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(6):
            _grows(lambda: answered[0], 50)
            server.ask("REPLICAOF", "127.0.0.1", 1)
            _grows(lambda: _refusals(server), 20)
            server.ask("REPLICAOF", "NO", "ONE")
    finally:
        stopping.set()
        for thread in threads:
            thread.join(30)
        door.close()
    assert others == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_loop_that_stood_still_is_no_outage_of_the_store(redis_url: str, loop: str) -> None:
    async def main() -> None:
        door = RedisStore(redis_url).open_async()
        assert await door.command("ECHO", "first") == b"first"
        for _ in range(3):
            # The second one is to leave with the rest of its tick, which doesn't end.
            asked = [asyncio.ensure_future(door.command("ECHO", word)) for word in ("a", "b")]
            await asyncio.sleep(0)
            time.sleep(COMMAND_DEADLINE + 0.3)  # noqa: ASYNC251  (what is tested)
            assert await asyncio.gather(*asked) == [b"a", b"b"]
        await door.close()

    factory = uvloop.new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


@pytest.mark.parametrize("binary", server_binaries(), ids=lambda path: Path(path).name)
def test_every_server_there_is_hands_a_dead_owners_receipt_over(binary: str) -> None:
    """Given any server found on this machine, a dead owner's key is taken over, its late result
    changes nothing, and a retry is answered from what won."""
    with Server(binary=binary) as server:
        # One object a process: each has its own desk.
        dead, heir, retry = (
            Receipts(RedisStore(server.url, "kinds"), policy(lease=0.2, wait=5)) for _ in range(3)
        )
        first = dead.begin(CALL)
        assert isinstance(first, Held)
        first._desk.drop(first._taken)  # nobody renews its lease any more
        second = heir.begin(CALL)
        assert isinstance(second, Held) and second.fence > first.fence
        assert second.finish(b"won", 60) is None
        late = first.finish(b"late", 60)
        assert late is not None and late.payload == b"won"
        again = retry.begin(CALL)
        assert isinstance(again, Record) and again.payload == b"won"
