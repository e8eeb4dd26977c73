"""The breaker shared through Redis: a real server, several processes."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing as mp
import re
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures.thread import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

import retrysafe.stores
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.breaker_remote import breaker_keys
from retrysafe.errors import BreakerOpen
from retrysafe.events import Event, listening
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.conftest import OwnServer
from tests.servers import Server
from tests.support import admitted, run, until, wait_until

SPAWN = mp.get_context("spawn")
NAMESPACE = "test"
_names = itertools.count()


@pytest.fixture
def url(redis_url: str) -> str:
    return redis_url


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url, decode_responses=True) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    return f"pay-{next(_names)}"


def consecutive(fail_max: int = 1, **rules: Any) -> BreakerPolicy:
    rules = {"open_for": 0.2, "probes": 1, **rules}
    return BreakerPolicy(failure_rate=1.0, min_calls=fail_max, window=fail_max, **rules)


def process(url: str, name: str, fail_max: int = 1, **rules: Any) -> CircuitBreaker:
    """The breaker as one more process would make it: a store and a view of its own."""
    return CircuitBreaker(name, consecutive(fail_max, **rules), shared=RedisStore(url, NAMESPACE))


def key(name: str) -> str:
    return breaker_keys(NAMESPACE, name)[0]


def commands(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{each}", {"calls": 0})["calls"] for each in ("eval", "evalsha"))


def tripped(url: str, name: str, **rules: Any) -> CircuitBreaker:
    breaker = process(url, name, **rules)
    assert breaker.acquire().failure()
    assert breaker.state == "open"
    return breaker


def half_open(url: str, name: str, **rules: Any) -> CircuitBreaker:
    breaker = tripped(url, name, **rules)
    wait_until(lambda: breaker.state == "half-open")
    return breaker


# -- the healthy path ----------------------------------------------------------------------------


def test_a_closed_breaker_costs_no_round_trip(url: str, name: str, client: redis.Redis) -> None:
    breaker = CircuitBreaker(
        name, consecutive(3), shared=RedisStore(url, NAMESPACE), clock=lambda: 50.0
    )

    async def main() -> None:
        for _ in range(500):
            async with breaker:
                pass

    assert admitted(process(url, f"{name}-first"))  # the server knows the script now
    before = commands(client)
    for _ in range(500):
        with breaker:
            pass
    run(main())
    # The first call of a process asks, and the next call after each subscription has begun.
    assert 1 <= commands(client) - before <= 3


def test_successes_of_a_process_weigh_in_the_shared_window(url: str, name: str) -> None:
    rules = BreakerPolicy(failure_rate=0.5, min_calls=2, window=20)
    one = CircuitBreaker(name, rules, shared=RedisStore(url, NAMESPACE))
    two = CircuitBreaker(name, rules, shared=RedisStore(url, NAMESPACE))
    for _ in range(8):
        assert one.acquire().success()
    one.acquire().failure()
    for _ in range(5):
        two.acquire().failure()
    assert two.state == "closed"  # 6 of 14
    two.acquire().failure()
    two.acquire().failure()
    assert two.state == "open"  # 8 of 16


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(calls=st.lists(st.sampled_from("SSFL"), max_size=40), size=st.integers(1, 8))
def test_the_shared_count_window_judges_as_the_local_one(
    url: str, calls: list[str], size: int
) -> None:
    now = [0.0]
    rules = BreakerPolicy(
        failure_rate=0.5, min_calls=4, window=size, slow_call=1.0, slow_rate=0.75, open_for=1000.0
    )
    store = RedisStore(url, NAMESPACE)
    name = f"same-{next(_names)}"
    pair = [
        CircuitBreaker(name, rules, shared=each, clock=lambda: now[0]) for each in (None, store)
    ]
    for call in calls:
        try:
            permits = [each.acquire() for each in pair]
        except BreakerOpen:
            break
        now[0] += 0.01 if call != "L" else 1.0
        for permit in permits:
            assert permit.failure() if call == "F" else permit.success()
        assert pair[0].state == pair[1].state
        now[0] -= 0.01 if call != "L" else 1.0


def test_C34_failures_leave_a_shared_time_window(url: str, name: str) -> None:
    rules = BreakerPolicy(failure_rate=0.5, min_calls=2, window_seconds=0.2, open_for=5.0)
    breaker = CircuitBreaker(name, rules, shared=RedisStore(url, NAMESPACE))
    for _ in range(4):
        breaker.acquire().failure()
        end = time.monotonic() + 0.25
        wait_until(lambda: time.monotonic() > end)  # noqa: B023
    assert breaker.state == "closed"
    breaker.acquire().failure()
    breaker.acquire().failure()
    assert breaker.state == "open"


# -- opening -------------------------------------------------------------------------------------


def test_C33_ten_concurrent_failures_open_at_three(
    url: str, name: str, client: redis.Redis
) -> None:
    breakers = [process(url, name, fail_max=3, open_for=30.0) for _ in range(10)]

    async def main() -> list[bool]:
        permits = [await breaker.aacquire() for breaker in breakers]
        return await asyncio.gather(*(permit.afailure() for permit in permits))

    counted = run(main())
    assert sum(counted) == 3
    assert client.hget(key(name), "s") == "open"


def test_C35_every_key_has_an_end(url: str, client: redis.Redis, name: str) -> None:
    breaker = half_open(url, name, probes=2)
    held = breaker.acquire()
    other = process(url, f"{name}-window", fail_max=5)
    other.acquire().failure()
    forced = process(url, f"{name}-forced")
    forced.force_open()
    keys = list(client.scan_iter(f"{NAMESPACE}:b:*{name}*"))
    assert len(keys) >= 5
    assert all(client.ttl(each) > 0 for each in keys)
    held.release()


def test_C18_late_failures_do_not_move_the_opening_time(
    url: str, name: str, client: redis.Redis
) -> None:
    breaker = process(url, name, open_for=30.0)
    permits = [breaker.acquire() for _ in range(4)]
    assert permits[0].failure()
    opened = client.hmget(key(name), "o", "u", "g")
    assert [permit.failure() for permit in permits[1:]] == [False] * 3
    assert client.hmget(key(name), "o", "u", "g") == opened


def test_B080_a_new_process_meets_the_breaker_as_it_is(
    url: str, name: str, client: redis.Redis
) -> None:
    one = process(url, name, fail_max=3, open_for=60.0)
    one.acquire().failure()
    one.acquire().failure()
    two = process(url, name, fail_max=3, open_for=60.0)
    assert two.state == "closed"
    one.acquire().failure()
    opened = client.hget(key(name), "o")
    three = process(url, name, fail_max=3, open_for=60.0)
    with pytest.raises(BreakerOpen) as refused:
        three.acquire()
    assert 58 < refused.value.retry_after <= 60
    assert three.state == "open"
    assert client.hgetall(key(name))["s"] == "open"
    assert client.hget(key(name), "o") == opened


def test_B081_new_processes_do_not_push_the_opening_time(
    url: str, name: str, client: redis.Redis
) -> None:
    tripped(url, name, open_for=1.0)
    opened = int(client.hget(key(name), "o") or 0)
    start = time.monotonic()
    while not admitted(process(url, name, open_for=1.0)):
        assert int(client.hget(key(name), "o") or 0) == opened
        assert time.monotonic() < start + 5
    seconds, micros = client.time()
    assert seconds * 1_000_000 + micros >= opened + 1_000_000


def test_B084_the_open_time_is_kept_below_a_second(url: str) -> None:
    """Forty breakers at random phases, each asked every 20 ms until it admits. Told by when the
    calls were made, so that a busy machine, which makes them late, changes nothing."""

    async def one(number: int) -> None:
        breaker = process(url, f"phase-{next(_names)}", open_for=0.5)
        await asyncio.sleep(number * 0.013)  # the phase
        permit = await breaker.aacquire()
        before = time.monotonic()
        await permit.afailure()
        after = time.monotonic()
        while True:
            asked = time.monotonic()
            try:
                await (await breaker.aacquire()).arelease()
            except BreakerOpen:
                assert asked <= after + 0.5 + 0.06
                await asyncio.sleep(0.02)
            else:
                assert time.monotonic() >= before + 0.5
                return

    async def main() -> None:
        await asyncio.gather(*(one(number) for number in range(40)))

    run(main())


def without_channels(server: Server) -> str:
    """The URL of a user who may neither tell nor be told anything."""
    with server.client() as admin:
        rules = ("on", ">secret", "~*", "+@all", "resetchannels")
        admin.execute_command("ACL", "SETUSER", "deaf", *rules)
    return f"redis://deaf:secret@127.0.0.1:{server.port}/0"


def test_a_process_that_is_told_nothing_learns_of_the_opening_by_its_next_look(
    own_server: OwnServer, name: str
) -> None:
    now = [0.0]
    server = own_server()
    store = RedisStore(without_channels(server), NAMESPACE)
    other = CircuitBreaker(name, consecutive(), shared=store, clock=lambda: now[0])
    assert other.acquire().success()
    tripped(server.url, name, open_for=60.0)
    assert other.acquire().success()  # heard of less than a second ago
    now[0] += 1.1
    other.acquire().success()  # looks in the background
    wait_until(lambda: not admitted(other))
    assert other.state == "open"


def test_a_process_that_was_idle_asks_before_its_call(url: str, name: str) -> None:
    now = [0.0]
    other = CircuitBreaker(
        name, consecutive(), shared=RedisStore(url, NAMESPACE), clock=lambda: now[0]
    )
    assert other.acquire().success()
    tripped(url, name, open_for=60.0)
    now[0] += 6.0
    with pytest.raises(BreakerOpen):
        other.acquire()


def still(url: str, name: str, **rules: Any) -> CircuitBreaker:
    """A process whose clock stands: it never looks by itself, and believes what it was told."""
    store = RedisStore(url, NAMESPACE)
    return CircuitBreaker(name, consecutive(**rules), shared=store, clock=lambda: 50.0)


def heard_by(client: redis.Redis, name: str) -> int:
    return int(client.pubsub_numsub(key(name))[0][1])


def test_an_opening_is_heard_by_the_next_call_of_an_idle_process(
    url: str, name: str, client: redis.Redis
) -> None:
    idle, other = still(url, name), process(url, name, open_for=60)
    assert admitted(idle)
    wait_until(lambda: heard_by(client, name) == 1)
    assert admitted(idle)
    other.acquire().failure()
    wait_until(lambda: not admitted(idle))
    before = commands(client)
    assert not admitted(idle)
    assert commands(client) == before  # it knows until when


def test_an_opening_is_heard_in_an_event_loop(url: str, name: str, client: redis.Redis) -> None:
    idle, other = still(url, name), process(url, name, open_for=60)

    async def admits() -> bool:
        try:
            permit = await idle.aacquire()
        except BreakerOpen:
            return False
        await permit.asuccess()
        return True

    async def main() -> None:
        assert await admits()
        await until(lambda: heard_by(client, name) == 1)
        assert await admits()
        await asyncio.to_thread(lambda: other.acquire().failure())
        await until(lambda: _not(admits()))

    run(main())


async def _not(asked: Coroutine[Any, Any, bool]) -> bool:
    return not await asked


def test_an_operators_word_is_heard_at_once(url: str, name: str, client: redis.Redis) -> None:
    idle, other = still(url, name), process(url, name)
    assert admitted(idle)
    wait_until(lambda: heard_by(client, name) == 1)
    other.force_open()
    wait_until(lambda: not admitted(idle))
    other.reset()
    wait_until(lambda: admitted(idle))


def test_a_closing_is_heard_by_those_who_still_refuse(
    url: str, name: str, client: redis.Redis
) -> None:
    idle, other = still(url, name), tripped(url, name, open_for=3)  # time for it to be refused
    assert not admitted(idle)  # for as long as its clock stands
    wait_until(lambda: heard_by(client, name) == 2)
    wait_until(lambda: other.state == "half-open")
    assert other.acquire().success()
    wait_until(lambda: admitted(idle))


def test_a_move_while_nobody_could_be_told_is_made_good_on_the_next_connection(
    url: str, name: str, client: redis.Redis
) -> None:
    idle, other = still(url, name), process(url, name, open_for=60)
    assert admitted(idle)
    wait_until(lambda: heard_by(client, name) == 1)
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    other.acquire().failure()
    wait_until(lambda: not admitted(idle))


def _child(breaker: CircuitBreaker, ready: Any, results: Any) -> None:
    assert admitted(breaker)
    ready.set()
    wait_until(lambda: not admitted(breaker))
    results.put("heard")


def test_a_forked_child_asks_and_hears_for_itself(url: str, name: str, client: redis.Redis) -> None:
    parent = still(url, name)
    assert admitted(parent)
    wait_until(lambda: heard_by(client, name) == 1)
    fork = mp.get_context("fork")
    ready, results = fork.Event(), fork.Queue()
    child = fork.Process(target=_child, args=(parent, ready, results))
    child.start()
    assert ready.wait(30)
    wait_until(lambda: heard_by(client, name) == 2)
    process(url, name, open_for=60).acquire().failure()
    assert results.get(timeout=30) == "heard"
    child.join(30)
    assert child.exitcode == 0
    wait_until(lambda: not admitted(parent))


def test_an_answer_that_a_move_has_overtaken_is_not_believed_for_long(url: str, name: str) -> None:
    remote = process(url, name)._core._remote
    asked = remote._clock()
    remote.wake(b"")  # it moved after the server had answered, before the answer is read
    remote.learn([1, b"closed", b"0", 0], asked - 0.001)
    assert remote.era.fresh == float("-inf")
    remote.learn([1, b"closed", b"0", 0], remote._clock())
    assert remote.era.fresh > asked


def test_a_user_without_the_right_to_tell_still_moves_the_breaker(
    own_server: OwnServer, name: str
) -> None:
    server = own_server()
    mute = process(without_channels(server), name, open_for=60)
    assert mute.acquire().failure()
    assert not admitted(mute)
    assert not admitted(process(server.url, name))


def test_the_shared_open_time_grows_and_starts_over_after_closing(
    url: str, name: str, client: redis.Redis
) -> None:
    rules: dict[str, Any] = {"open_for": 0.05, "open_growth": 2.0, "open_cap": 0.3}
    breaker = CircuitBreaker(
        name, consecutive(**rules), shared=RedisStore(url, NAMESPACE), rng=lambda: 0.5
    )
    opens = []
    for _ in range(6):
        wait_until(lambda: breaker.state in ("closed", "half-open"))
        assert breaker.acquire().failure()
        opened, until_us = client.hmget(key(name), "o", "u")
        opens.append(round((int(until_us or 0) - int(opened or 0)) / 1e6, 4))
    assert opens == [0.05, 0.075, 0.15, 0.225, 0.225, 0.225]
    wait_until(lambda: breaker.state == "half-open")
    assert breaker.acquire().success()
    assert breaker.acquire().failure()
    opened, until_us = client.hmget(key(name), "o", "u")
    assert int(until_us or 0) - int(opened or 0) == 50_000


# -- probes --------------------------------------------------------------------------------------


def test_C12_one_of_fifty_tasks_probes(url: str, name: str) -> None:
    breaker = half_open(url, name)
    ran: list[int] = []

    async def main() -> None:
        finish = asyncio.Event()

        async def call(number: int) -> None:
            async with breaker:
                ran.append(number)
                await finish.wait()

        tasks = [asyncio.create_task(call(number)) for number in range(50)]
        await until(lambda: sum(task.done() for task in tasks) == 49)
        finish.set()
        await asyncio.wait(tasks)
        assert sum(task.exception() is None for task in tasks) == 1

    run(main())
    assert len(ran) == 1
    assert breaker.state == "closed"


def test_C13_one_of_twenty_threads_probes(url: str, name: str) -> None:
    breaker = half_open(url, name)
    start, finish = threading.Barrier(20), threading.Event()
    refused = threading.Semaphore(0)
    ran: list[int] = []

    def call(number: int) -> None:
        start.wait()
        try:
            with breaker:
                ran.append(number)
                finish.wait(10)
        except BreakerOpen:
            refused.release()

    with ThreadPoolExecutor(20) as pool:
        futures = [pool.submit(call, number) for number in range(20)]
        for _ in range(19):
            assert refused.acquire(timeout=10)
        finish.set()
        for future in futures:
            future.result(10)
    assert len(ran) == 1
    assert breaker.state == "closed"


def test_C10_a_lost_probe_is_issued_again(url: str, name: str) -> None:
    breaker = half_open(url, name, probes=2, permit_lease=0.3)
    lost, other = breaker.acquire(), breaker.acquire()
    assert other.success()
    assert breaker.acquire().success()
    assert breaker.state == "closed"
    assert lost.success() is False


def test_C9_a_refused_acquire_writes_nothing(url: str, name: str, client: redis.Redis) -> None:
    breaker = half_open(url, name)
    held = breaker.acquire()
    keys = breaker_keys(NAMESPACE, name)
    for each in keys[:2]:
        client.pexpire(each, 50_000)
    before = client.hgetall(key(name)), client.zrange(keys[1], 0, -1, withscores=True)
    for _ in range(20):
        assert not admitted(process(url, name))
    assert (client.hgetall(key(name)), client.zrange(keys[1], 0, -1, withscores=True)) == before
    assert all(client.pttl(each) <= 50_000 for each in keys[:2])
    assert held.success()


def test_C7_C21_an_expired_probe_is_stale_and_its_successor_decides(url: str, name: str) -> None:
    breaker = half_open(url, name, permit_lease=0.2)
    expired = breaker.acquire()
    found = []

    def next_probe() -> bool:
        try:
            found.append(breaker.acquire())
        except BreakerOpen:
            return False
        return True

    wait_until(next_probe)
    assert expired.success() is False
    assert breaker.state == "half-open"
    assert found[0].success() is True
    assert breaker.state == "closed"


@pytest.mark.parametrize("verdict", ["success", "failure", "release", "release_as_success"])
def test_C15_C16_C17_late_verdicts_of_the_closed_era_change_nothing(
    url: str, name: str, client: redis.Redis, verdict: str
) -> None:
    breaker = process(url, name)
    while_open, while_half_open = breaker.acquire(), breaker.acquire()
    assert breaker.acquire().failure()
    before = client.hgetall(key(name))
    assert getattr(while_open, verdict)() is False
    assert client.hgetall(key(name)) == before
    wait_until(lambda: breaker.state == "half-open")
    probe = breaker.acquire()
    before = client.hgetall(key(name))
    assert getattr(while_half_open, verdict)() is False
    assert client.hgetall(key(name)) == before
    assert not admitted(breaker)
    assert probe.failure() is True
    assert breaker.state == "open"


def test_C20_a_probe_of_an_earlier_round_is_stale(url: str, name: str) -> None:
    breaker = half_open(url, name, probes=2)
    first = breaker.acquire()
    breaker.acquire().failure()
    wait_until(lambda: breaker.state == "half-open")
    held = breaker.acquire()
    assert first.success() is False
    assert breaker.state == "half-open"
    assert held.release()


def test_C1_a_cancelled_probe_gives_its_slot_back(url: str, name: str) -> None:
    breaker = half_open(url, name)
    other = process(url, name)

    async def main() -> None:
        entered = asyncio.Event()

        async def probe() -> None:
            async with breaker:
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(probe())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with other:
            pass
        assert await other.astate() == "closed"

    run(main())


class Gate:
    """Holds every async answer back until it is opened."""

    def __init__(self, door: Any, store: GatedStore) -> None:
        self._door = door
        self._store = store

    async def subscribe(self, channel: bytes, on_news: Any, limit: float) -> bool:
        confirmed: bool = await self._door.subscribe(channel, on_news, limit)
        return confirmed

    async def eval(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        reply = await self._door.eval(script, keys, args)
        self._store.answered += 1
        await self._store.gate.wait()
        return reply

    async def close(self) -> None:
        await self._door.close()


class GatedStore(RedisStore):
    def __init__(self, url: str) -> None:
        super().__init__(url, NAMESPACE)
        self.gate = asyncio.Event()
        self.gate.set()
        self.answered = 0

    def open_async(self) -> Any:
        return Gate(super().open_async(), self)


def test_C23_a_cancellation_during_the_release_still_gives_the_slot_back(
    url: str, name: str, client: redis.Redis
) -> None:
    half_open(url, name)
    store = GatedStore(url)
    breaker = CircuitBreaker(name, consecutive(), shared=store)

    async def main() -> None:
        entered = asyncio.Event()

        async def probe() -> None:
            async with breaker:
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(probe())
        await entered.wait()
        store.gate.clear()
        sent = store.answered
        task.cancel()
        await until(lambda: store.answered > sent)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.zcard(breaker_keys(NAMESPACE, name)[1]) == 0
        store.gate.set()
        permit = await breaker.aacquire()
        assert await permit.asuccess()

    run(main())


def test_an_acquire_cancelled_on_its_way_leaves_no_permit(
    url: str, name: str, client: redis.Redis
) -> None:
    half_open(url, name)
    store = GatedStore(url)
    breaker = CircuitBreaker(name, consecutive(), shared=store)
    permits = breaker_keys(NAMESPACE, name)[1]

    async def main() -> None:
        store.gate.clear()
        task = asyncio.create_task(breaker.aacquire())
        await until(lambda: store.answered == 1)
        assert client.zcard(permits) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        store.gate.set()
        await until(lambda: client.zcard(permits) == 0)

    run(main())


def test_a_sync_verdict_in_async_code_is_told_in_the_background(
    url: str, name: str, client: redis.Redis
) -> None:
    breaker = half_open(url, name)

    async def main() -> None:
        permit = await breaker.aacquire()
        assert permit.success() is True
        await until(lambda: client.hget(key(name), "s") == "closed")

    run(main())


def _one_call(url: str, name: str, together: Any, results: Any, finish: Any) -> None:
    breaker = process(url, name)
    together.wait(30)
    try:
        with breaker:
            results.put("ran")
            finish.wait(30)
    except BreakerOpen:
        results.put("refused")


def test_C12_one_of_four_processes_probes(url: str, name: str) -> None:
    half_open(url, name)
    together, finish, results = SPAWN.Barrier(4), SPAWN.Event(), SPAWN.Queue()
    args = (url, name, together, results, finish)
    workers = [SPAWN.Process(target=_one_call, args=args) for _ in range(4)]
    for worker in workers:
        worker.start()
    answers = sorted(results.get(timeout=30) for _ in range(4))
    finish.set()
    for worker in workers:
        worker.join(30)
    assert answers == ["ran", "refused", "refused", "refused"]
    assert process(url, name).state == "closed"


def _hold(url: str, name: str, holding: Any, never: Any) -> None:
    with process(url, name, permit_lease=1.0):
        holding.set()
        never.wait()


def test_C8_a_killed_process_gives_its_probe_back_with_its_lease(
    url: str, name: str, client: redis.Redis
) -> None:
    breaker = half_open(url, name, permit_lease=1.0)
    holding, never = SPAWN.Event(), SPAWN.Event()
    worker = SPAWN.Process(target=_hold, args=(url, name, holding, never))
    worker.start()
    assert holding.wait(30)
    worker.kill()
    worker.join(30)
    wait_until(lambda: admitted(breaker), limit=1.0 + 1.0)  # lease + 1 s, under traffic
    with breaker:
        pass
    assert breaker.state == "closed"


# -- operators -----------------------------------------------------------------------------------


def test_C28_an_operators_word_reaches_the_other_processes_and_stays(url: str, name: str) -> None:
    one, two = process(url, name), process(url, name)
    one.force_open()
    with pytest.raises(BreakerOpen):
        two.acquire()
    assert two.state == "forced-open"
    two.reset()
    assert process(url, name).state == "closed"
    assert two.acquire().success()
    two.disable()
    three = process(url, name)
    assert three.acquire().failure() is False
    assert three.state == "disabled"

    async def main() -> None:
        await three.aforce_open()
        assert await three.astate() == "forced-open"
        await three.areset()
        await three.adisable()
        await three.areset()
        assert await three.astate() == "closed"

    run(main())


# -- Redis away, flushed, of another time ------------------------------------------------------


def test_C36_C37_without_redis_a_breaker_of_this_process_stands_in(
    own_server: OwnServer, name: str
) -> None:
    seen: list[Event] = []
    own = own_server()
    url = own.url
    breaker = process(url, name, fail_max=2)
    held = breaker.acquire()
    own.stop()
    with listening(seen.append):
        assert held.failure() is False  # dropped, and not an error
        assert "breaker-verdict-dropped" in {event.kind for event in seen}
        assert "store-unavailable" in {event.kind for event in seen}
        with breaker:
            pass
        for number in range(2):
            with pytest.raises(ConnectionError, match=str(number)), breaker:
                raise ConnectionError(number)
        assert not admitted(breaker)
        new = process(url, f"{name}-new")
        with new:
            pass

        async def main() -> None:
            another = process(url, f"{name}-async")
            async with another:
                pass
            with pytest.raises(ConnectionError):
                async with another:
                    raise ConnectionError
            with pytest.raises(BreakerOpen):
                await another.aacquire()

        run(main())


def test_redis_coming_back_ends_the_stand_in(own_server: OwnServer, name: str) -> None:
    now = [0.0]
    own = own_server()
    store = RedisStore(own.url, NAMESPACE)
    breaker = CircuitBreaker(name, consecutive(open_for=60.0), shared=store, clock=lambda: now[0])
    held = breaker.acquire()
    own.stop()
    assert held.failure() is False
    breaker.acquire().failure()
    assert not admitted(breaker)  # the stand-in is open
    assert breaker.state == "open"
    own.start()
    now[0] += 1.1
    wait_until(lambda: admitted(breaker))  # a call looks whether Redis is back
    assert breaker.state == "closed"
    assert breaker.acquire().failure() is True
    assert process(store.url, name).state == "open"


def test_C38_hosts_with_other_clocks_see_one_time(url: str, name: str) -> None:
    def at(offset: float) -> CircuitBreaker:
        return CircuitBreaker(
            name,
            consecutive(open_for=0.5),
            shared=RedisStore(url, NAMESPACE),
            clock=lambda: time.monotonic() + offset,
        )

    start = time.monotonic()
    assert at(-90_000.0).acquire().failure()
    ahead, behind = at(1e6), at(-1e6)
    with pytest.raises(BreakerOpen) as refused:
        ahead.acquire()
    assert refused.value.retry_after <= 0.5
    wait_until(lambda: admitted(behind))
    assert time.monotonic() - start >= 0.5
    assert ahead.state == "half-open"


def test_C40_all_keys_of_a_breaker_share_one_slot_and_scripts_touch_no_other(url: str) -> None:
    for name in ("pay", "{odd}", "}x{", "a b"):
        assert len({key_slot(each.encode()) for each in breaker_keys("ns", name)}) == 1
    folder = Path(retrysafe.stores.__file__).parent / "lua"
    scripts = sorted(folder.glob("breaker_*.lua"))
    assert len(scripts) == 4
    for script in scripts:
        for used in re.findall(r"redis\.call\('(\w+)'(?:, (\S+?))?[,)]", script.read_text()):
            assert used[0] == "TIME" or used[1].startswith("KEYS["), (script.name, used)


def test_C41_flushed_scripts_are_loaded_again(url: str, name: str, client: redis.Redis) -> None:
    breaker = half_open(url, name)
    client.script_flush()
    permit = breaker.acquire()
    client.script_flush()
    assert permit.success()
    assert breaker.state == "closed"


def test_C41_after_a_failover_to_an_older_state_stale_writes_are_harmless(
    url: str, name: str, client: redis.Redis
) -> None:
    breaker = process(url, name)
    assert breaker.acquire().success()
    client.hset(key(name), mapping={"s": "closed", "g": "5"})
    client.pexpire(key(name), 60_000)
    older: Any = client.hgetall(key(name))
    assert process(url, name).acquire().failure()  # opens, in a new generation
    wait_until(lambda: breaker.state == "half-open")
    probe = breaker.acquire()
    client.delete(*breaker_keys(NAMESPACE, name))
    client.hset(key(name), mapping=older)
    client.pexpire(key(name), 60_000)
    assert probe.failure() is False
    assert client.hget(key(name), "s") == "closed"
    assert breaker.acquire().success()


def test_breaker_keys_that_vanish_mean_closed(url: str, name: str, client: redis.Redis) -> None:
    breaker = half_open(url, name)
    probe = breaker.acquire()
    client.delete(*breaker_keys(NAMESPACE, name))
    assert probe.success() is False
    assert process(url, name).state == "closed"


def test_C39_nothing_is_locked_while_the_call_runs(url: str, name: str) -> None:
    breaker = process(url, name, fail_max=3)
    with breaker, breaker, process(url, name, fail_max=3):
        breaker.acquire().failure()
    assert breaker.state == "closed"


# -- memory --------------------------------------------------------------------------------------


def test_a_memory_store_shares_by_name_in_the_process() -> None:
    store = MemoryStore("ns")
    one = CircuitBreaker("mem", consecutive(), shared=store)
    two = CircuitBreaker("mem", consecutive(), shared=store)
    one.acquire().failure()
    assert two.state == "open"
    assert CircuitBreaker("mem", consecutive(), shared=MemoryStore("ns")).state == "closed"
    with pytest.raises(ValueError, match="another policy"):
        CircuitBreaker("mem", consecutive(2), shared=store)
