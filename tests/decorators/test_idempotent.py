"""`@idempotent`: one execution per key, in both colours, and what ends one."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import threading
import time
import typing
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import msgspec
import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from retrysafe import errors
from retrysafe.commands import Begin, Finish, Forget
from retrysafe.context import current_request
from retrysafe.decorators import idempotent
from retrysafe.events import Event
from retrysafe.keys import NO_FINGERPRINT, digest
from retrysafe.policy import Recovered
from retrysafe.records import AbandonedReceipt, Record, encode_done
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from tests.support import run, until, wait_until


class Counter:
    """How often the work ran, from any thread."""

    def __init__(self) -> None:
        self.runs = 0
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.runs += 1
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.at_once -= 1


def dead_owner(store: Store, name: str, key: str, lease: float = 0.3) -> None:
    """A receipt whose owner claimed it and was never heard of again."""
    claim = Begin(
        key=digest(store.namespace, name, key),
        token=b"t" * 16,
        fingerprint=NO_FINGERPRINT,
        lease_us=int(lease * 1e6),
        ttl_ms=60_000,
        inbox=b"",
        take_over=True,
        request_id="dead",
    )
    store.open().execute(claim)


def test_a_sync_function_runs_once_and_is_replayed(store: Store) -> None:
    runs = Counter()

    @idempotent(key="order_id", store=store)
    def charge(order_id: str, amount: int) -> str:
        with runs:
            return f"{order_id}:{amount}"

    assert [charge("o-1", 5), charge("o-1", 5), charge("o-2", 5)] == ["o-1:5", "o-1:5", "o-2:5"]
    assert runs.runs == 2


def test_an_async_function_runs_once_for_fifty_at_once(store: Store) -> None:
    runs = Counter()

    @idempotent(key="order_id", store=store)
    async def charge(order_id: str) -> list[int]:
        with runs:
            await asyncio.sleep(0.05)
            return [1, 2]

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(charge("o-1") for _ in range(50)))

    assert run(main()) == [[1, 2]] * 50
    assert runs.runs == 1


def test_bare_it_is_keyed_by_all_arguments(store: Store) -> None:
    runs = Counter()

    @idempotent
    def unused() -> int:
        return 1

    @idempotent(store=store)
    def add(a: int, b: int = 2) -> int:
        with runs:
            return a + b

    assert [add(1), add(1, 2), add(a=1, b=2), add(1, 3)] == [3, 3, 3, 4]
    assert runs.runs == 2
    assert unused.__name__ == "unused"


def test_O90_a_sync_function_runs_on_the_callers_own_thread(store: Store) -> None:
    @idempotent(store=store)
    def where() -> int:
        return threading.get_ident()

    assert where() == threading.get_ident()


def test_duplicates_in_threads_wait_for_the_first(store: Store) -> None:
    runs = Counter()
    opened = threading.Event()

    @idempotent(key="n", store=store)
    def slow(n: int) -> int:
        with runs:
            opened.wait(5)
            return n * 2

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(slow, 4) for _ in range(8)]
        wait_until(lambda: runs.at_once == 1)
        opened.set()
        assert [call.result() for call in calls] == [8] * 8
    assert runs.runs == 1


# Ends of the work


def test_an_exception_releases_and_the_next_call_runs(store: Store) -> None:
    runs = Counter()

    @idempotent(store=store)
    def fails_once() -> int:
        with runs:
            if runs.runs == 1:
                raise OSError("down")
            return 7

    with pytest.raises(OSError, match="down"):
        fails_once()
    assert fails_once.receipt() is None
    assert fails_once() == 7
    assert runs.runs == 2


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_I88_O47_what_stops_the_process_interrupts_and_propagates(
    store: Store, stop: type[BaseException]
) -> None:
    @idempotent(store=store, on_abandoned="refuse")
    def stopped() -> int:
        raise stop

    with pytest.raises(stop):
        stopped()
    assert stopped.receipt().state == "abandoned"
    with pytest.raises(errors.Abandoned):
        stopped()
    assert stopped.forget() is True


def test_I88_O47_in_a_coroutine_too(memory: MemoryStore) -> None:
    # A loop re-raises KeyboardInterrupt past every task: it is thrown in by hand here.
    @idempotent(store=memory, on_abandoned="refuse")
    async def stopped() -> int:
        raise KeyboardInterrupt

    async def main() -> None:
        with pytest.raises(KeyboardInterrupt):
            stopped().send(None)
        assert (await stopped.receipt()).state == "abandoned"

    run(main())


def test_B006_a_cancelled_leader_makes_exactly_one_follower_run(store: Store) -> None:
    runs = Counter()

    async def main() -> None:
        gate = asyncio.Event()

        @idempotent(key="n", store=store, wait=5)
        async def work(n: int) -> str:
            with runs:
                await gate.wait()
                return "v"

        leader = asyncio.create_task(work(1))
        await until(lambda: runs.at_once == 1)
        followers = [asyncio.create_task(work(1)) for _ in range(10)]
        await asyncio.sleep(0)
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        await until(lambda: runs.runs == 2 and runs.at_once == 1)
        gate.set()
        assert await asyncio.gather(*followers) == ["v"] * 10
        assert await work(1) == "v"

    run(main())
    assert (runs.runs, runs.most_at_once) == (2, 1)


def test_B123_a_cancelled_leader_leaves_nothing_that_answers_for_ever(store: Store) -> None:
    values = iter(["never", "v1", "v2"])

    async def main() -> None:
        gate = asyncio.Event()
        started = asyncio.Event()

        @idempotent(key="n", store=store, ttl=1, lease=1, wait=1)
        async def work(n: int) -> str:
            value = next(values)
            started.set()
            await gate.wait()
            return value

        leader = asyncio.create_task(work(1))
        await started.wait()
        followers = [asyncio.create_task(work(1)) for _ in range(3)]
        await asyncio.sleep(0)
        leader.cancel()
        gate.set()
        assert await asyncio.gather(*followers) == ["v1"] * 3

        async def expired() -> bool:
            return await work.receipt(1) is None

        await until(expired)
        assert await work(1) == "v2"

    run(main())


def test_a_discarded_result_is_not_recorded(store: Store) -> None:
    runs = Counter()

    @idempotent(store=store)
    def work() -> int:
        with runs:
            context = current_request()
            assert context is not None
            context.receipt.discard()
            return runs.runs

    assert [work(), work()] == [1, 2]


# Abandoned


def test_a_dead_owners_call_runs_again_by_default(store: Store) -> None:
    @idempotent(key="n", store=store, namespace="pay", fingerprint="none")
    def pay(n: str) -> str:
        return "paid"

    dead_owner(store, "pay", "o-1")
    assert pay("o-1") == "paid"


def test_a_dead_owners_call_is_refused_where_chosen(store: Store) -> None:
    @idempotent(key="n", store=store, namespace="pay", on_abandoned="refuse", fingerprint="none")
    async def pay(n: str) -> str:
        return "paid"

    dead_owner(store, "pay", "o-1")

    async def main() -> None:
        with pytest.raises(errors.Abandoned):
            await pay("o-1")
        assert (await pay.receipt("o-1")).state == "abandoned"
        assert await pay.forget("o-1")
        assert await pay("o-1") == "paid"

    run(main())


def test_a_recovery_function_may_know_the_result(store: Store) -> None:
    asked: list[AbandonedReceipt] = []
    runs = Counter()

    def recover(receipt: AbandonedReceipt) -> Recovered:
        asked.append(receipt)
        return Recovered("found")

    @idempotent(key="n", store=store, namespace="pay", on_abandoned=recover, fingerprint="none")
    def pay(n: str) -> str:
        with runs:
            return "paid"

    dead_owner(store, "pay", "o-1")
    assert [pay("o-1"), pay("o-1")] == ["found", "found"]
    assert runs.runs == 0
    assert [(each.key, each.scope, each.request_id) for each in asked] == [("o-1", "pay", "dead")]


def test_an_async_recovery_function_may_say_run(store: Store) -> None:
    async def recover(receipt: AbandonedReceipt) -> None:
        return None

    @idempotent(key="n", store=store, namespace="pay", on_abandoned=recover, fingerprint="none")
    async def pay(n: str) -> str:
        return "paid"

    dead_owner(store, "pay", "o-1")

    async def main() -> str:
        return await pay("o-1")

    assert run(main()) == "paid"


@pytest.mark.parametrize("answer", ["not Recovered", RuntimeError("can't ask the bank")])
def test_a_recovery_that_fails_leaves_the_call_abandoned(store: Store, answer: Any) -> None:
    def recover(receipt: AbandonedReceipt) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    @idempotent(key="n", store=store, namespace="pay", on_abandoned=recover, fingerprint="none")
    def pay(n: str) -> str:
        raise AssertionError("it must not run")

    dead_owner(store, "pay", "o-1")
    with pytest.raises((TypeError, RuntimeError)):
        pay("o-1")
    assert pay.receipt("o-1").state == "abandoned"


def test_I44_an_owner_that_was_fenced_out_answers_from_the_record_that_won(
    memory: MemoryStore, told: list[Event]
) -> None:
    name = digest(memory.namespace, "pay", "o-1")

    @idempotent(key="n", store=memory, namespace="pay", fingerprint="none")
    def pay(n: str) -> str:
        # What happens elsewhere while this one is paused for longer than its lease.
        memory.execute(Forget(name))
        dead_owner(memory, "pay", n)
        done = Record(NO_FINGERPRINT, b"t" * 16, 1, "other", b"m" + msgspec.msgpack.encode("won"))
        memory.execute(Finish(name, b"t" * 16, encode_done(done), 60_000))
        return "late"

    assert [pay("o-1"), pay("o-1")] == ["won", "won"]
    assert "finish-refused" in [event.kind for event in told]


def test_B016_a_duplicate_of_a_dead_owner_is_told_and_runs_after_the_lease(
    store: Store, told: list[Event]
) -> None:
    @idempotent(key="n", store=store, namespace="pay", wait=0, fingerprint="none")
    def pay(n: str) -> str:
        return "paid"

    dead_owner(store, "pay", "o-1", lease=0.5)
    with pytest.raises(errors.InFlight) as caught:
        pay("o-1")
    assert caught.value.key and 0 < caught.value.retry_after <= 0.5
    assert [event.kind for event in told].count("in-flight") == 1
    wait_until(lambda: pay.receipt("o-1").state == "abandoned")
    assert pay("o-1") == "paid"


def test_B021_a_call_without_a_deadline_is_no_orphan(store: Store) -> None:
    runs = Counter()
    opened = threading.Event()

    @idempotent(key="n", store=store, wait=0)
    def work(n: int) -> int:
        with runs:
            opened.wait(5)
            return n

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(work, 1)
        wait_until(lambda: runs.at_once == 1)
        with pytest.raises(errors.InFlight):
            work(1)
        opened.set()
        assert first.result() == 1
    assert runs.runs == 1


def test_B022_the_lease_is_a_setting_of_each_function_apart_from_its_ttl(store: Store) -> None:
    @idempotent(key="n", store=store, namespace="bank", lease=0.4, ttl=60, wait=0)
    def withdraw(n: str) -> str:
        return "done"

    dead_owner(store, "bank", "o-1", lease=0.4)
    with pytest.raises(errors.InFlight):
        withdraw("o-1")
    wait_until(lambda: withdraw.receipt("o-1").state == "abandoned")
    assert withdraw("o-1") == "done"


def test_B026_work_longer_than_its_lease_runs_once(store: Store) -> None:
    runs = Counter()

    @idempotent(key="task", store=store, lease=0.3, wait=0)
    def job(task: str) -> str:
        with runs:
            time.sleep(1.0)  # the work itself
            return "done"

    refused = 0
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(job, "t-1")
        wait_until(lambda: runs.at_once == 1)
        while not first.done():
            try:
                job("t-1")
            except errors.InFlight:
                refused += 1
            time.sleep(0.1)
    assert first.result() == job("t-1") == "done"
    assert refused > 3
    assert runs.runs == 1


def test_B024_nothing_is_left_of_many_short_calls(memory: MemoryStore) -> None:
    @idempotent(key="n", store=memory, lease=0.3)
    async def short(n: int) -> int:
        await asyncio.sleep(0)
        return n

    async def main() -> None:
        before = set(asyncio.all_tasks())
        await asyncio.gather(*(short(n) for n in range(200)))
        tasks = [asyncio.create_task(short(n)) for n in range(1000, 1200)]
        for turns, task in enumerate(tasks):
            if turns % 3 == 0:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: set(asyncio.all_tasks()) == before)

    run(main())


# Nesting


def test_I86_a_call_that_would_wait_for_itself_says_so(store: Store) -> None:
    @idempotent(key="n", store=store)
    def again(n: int) -> int:
        return again(n)

    @idempotent(key="n", store=store)
    async def again_async(n: int) -> int:
        return await again_async(n)

    with pytest.raises(errors.Reentered, match="itself"):
        again(1)

    async def main() -> None:
        with pytest.raises(errors.Reentered, match="itself"):
            await again_async(1)

    run(main())


def test_a_recursion_with_other_keys_works(store: Store) -> None:
    @idempotent(store=store)
    def factorial(n: int) -> int:
        return 1 if n < 2 else n * factorial(n - 1)

    assert factorial(5) == 120
    assert factorial.receipt(3).state == "done"


def test_I94_O83_O87_six_nested_pairs_at_once_have_their_own_receipts(store: Store) -> None:
    @idempotent(key="n", store=store)
    def inner(n: int) -> str:
        return f"inner {n}"

    @idempotent(key="n", store=store)
    def outer(n: int) -> str:
        return f"outer of {inner(n)}"

    @idempotent(key="n", store=store)
    async def inner_async(n: int) -> str:
        await asyncio.sleep(0)
        return f"inner {n}"

    @idempotent(key="n", store=store)
    async def outer_async(n: int) -> str:
        return f"outer of {await inner_async(n)}"

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(outer, [0, 1, 2, 3, 4, 5] * 2))
    assert got == [f"outer of inner {n}" for n in range(6)] * 2

    async def main() -> list[str]:
        return await asyncio.gather(*(outer_async(n) for n in range(6)))

    assert run(main()) == [f"outer of inner {n}" for n in range(6)]
    assert inner.receipt(1).fence != outer.receipt(1).fence


def test_O84_two_functions_on_one_store_keep_their_own_settings(memory: MemoryStore) -> None:
    @idempotent(store=memory, ttl=60)
    def long() -> int:
        return 1

    @idempotent(store=memory, ttl=0.2, lease=0.1, wait=0)
    def short() -> int:
        return 2

    assert (long(), short()) == (1, 2)
    wait_until(lambda: short.receipt() is None)
    assert long.receipt().state == "done"


def test_I90_loops_one_after_the_other_and_one_in_each_thread(store: Store) -> None:
    runs = Counter()

    @idempotent(key="n", store=store)
    async def work(n: int) -> int:
        with runs:
            await asyncio.sleep(0)
            return n

    async def main(n: int) -> int:
        return await work(n)

    assert [run(main(1)), run(main(1)), run(main(2))] == [1, 1, 2]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: run(main(n)), [3, 4, 5, 3])) == [3, 4, 5, 3]
    assert runs.runs == 5


def test_B118_a_retry_outside_runs_again_and_inside_runs_under_one_receipt(store: Store) -> None:
    runs = Counter()

    def body() -> int:
        with runs:
            if runs.runs % 3:
                raise OSError
            return 7

    def three_times(function: Any) -> Any:
        for _ in range(2):
            try:
                return function()
            except OSError:
                continue
        return function()

    def inside() -> int:
        return three_times(body)  # type: ignore[no-any-return]

    assert idempotent(store=store, wait=0, namespace="a")(inside)() == 7
    assert three_times(idempotent(store=store, wait=0, namespace="b")(body)) == 7
    assert runs.runs == 6


def test_B033_the_same_operation_sends_the_same_key_after_a_rollback(store: Store) -> None:
    sent: set[str] = set()

    @idempotent(key="order_id", store=store)
    def charge(order_id: str) -> str:
        context = current_request()
        assert context is not None and context.key is not None
        sent.add(context.key)
        return "charged"

    def in_a_transaction() -> None:
        charge("o-1")
        raise RuntimeError("rolled back")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            in_a_transaction()
    assert len(sent) == 1


# Store out of reach


class NoStore:
    """A store that can't be reached."""

    namespace = "retrysafe"
    url = "memory://"

    def open(self) -> Any:
        return self

    def open_async(self) -> Any:
        return _NoAsyncDoor()

    def execute(self, command: Any, end: float | None = None) -> Any:
        raise errors.StoreUnavailable(reason="down")

    def close(self) -> None: ...


class _NoAsyncDoor:
    forgotten = None

    async def execute(self, command: Any) -> Any:
        raise errors.StoreUnavailable(reason="down")

    async def close(self) -> None: ...


def test_without_a_store_nothing_is_run(told: list[Event]) -> None:
    @idempotent(store=NoStore())
    def work() -> int:
        raise AssertionError("it must not run")

    with pytest.raises(errors.StoreUnavailable):
        work()


def test_without_a_store_it_runs_unprotected_where_chosen(told: list[Event]) -> None:
    @idempotent(store=NoStore(), on_store_error="run")
    def work() -> int:
        return 1

    @idempotent(store=NoStore(), on_store_error="run")
    async def work_async() -> int:
        return 2

    async def main() -> int:
        return await work_async()

    assert (work(), run(main())) == (1, 2)
    assert [event.kind for event in told].count("unprotected") == 2


def test_a_corrupt_record_is_never_run_over_even_where_unprotected_is_chosen(
    memory: MemoryStore,
) -> None:
    @idempotent(store=memory, on_store_error="run", namespace="n", key="k")
    def work(k: str) -> int:
        raise AssertionError("it must not run")

    memory.put(digest(memory.namespace, "n", "a"), b"somebody else's", 60_000)
    with pytest.raises(errors.RecordCorrupt):
        work("a")


def test_disabled_everything_passes_through(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_DISABLED", "true")
    runs = Counter()

    @idempotent(store=memory)
    def work() -> int:
        with runs:
            return runs.runs

    assert [work(), work()] == [1, 2]
    assert memory.size() == 0


def test_settings_are_read_at_the_first_call_and_a_bad_one_is_told(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    @idempotent(store=memory)
    def work() -> int:
        raise AssertionError("it must not run")

    monkeypatch.setenv("RETRYSAFE_LEASE", "soon")
    with pytest.raises(errors.SettingsError, match="RETRYSAFE_LEASE"):
        work()


# What it is applied to


def test_I87_generators_are_refused_when_decorated() -> None:
    def rows() -> Iterator[int]:
        yield 1

    async def pages() -> AsyncIterator[int]:
        yield 1

    for function in (rows, pages, partial(rows)):
        with pytest.raises(TypeError, match="generator"):
            idempotent(function)


def test_O91_a_sync_function_that_returns_a_coroutine_is_told_so(memory: MemoryStore) -> None:
    async def inner() -> int:
        return 1

    @idempotent(store=memory)
    def outer() -> Any:
        return inner()

    with pytest.raises(TypeError, match="awaitable"):
        outer()
    assert memory.size() == 0


@pytest.mark.parametrize(
    "options",
    [
        {"on_abandoned": "ignore"},
        {"on_store_error": "hope"},
        {"ttl": 0},
        {"ttl": -1},
        {"ttl": float("nan")},
        {"lease": 0},
        {"wait": -1},
        {"ttl": 1, "lease": 2},
        {"ttl": lambda status: 3},
        {"key": "order_nr"},
        {"key": ("order_id", "order_nr")},
        {"key": ()},
        {"key": 5},
        {"key": "order_id.."},
        {"fingerprint": "amont"},
        {"keep_errors": (BaseException,)},
        {"keep_errors": "ValueError"},
        {"codec": object()},
        {"store": "mongodb://x"},
    ],
)
def test_options_are_checked_when_decorated(options: dict[str, Any]) -> None:
    def charge(order_id: str, amount: int) -> str:
        return order_id

    with pytest.raises((TypeError, ValueError)):
        idempotent(**options)(charge)


def test_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match="function"):
        idempotent(int)


class Shop:
    """Methods of every kind."""

    store = MemoryStore()

    def __init__(self, name: str) -> None:
        self.name = name

    @idempotent(store=store)
    def buy(self, item: str) -> str:
        return f"{self.name}:{item}"

    @idempotent(store=store)
    async def buy_async(self, item: str) -> str:
        return f"{self.name}:{item}"

    @classmethod
    @idempotent(store=store)
    def inner_class(cls, item: str) -> str:
        return f"{cls.__name__}:{item}"

    @idempotent(store=store)
    @classmethod
    def outer_class(cls, item: str) -> str:
        return f"{cls.__name__}:{item}"

    @staticmethod
    @idempotent(store=store)
    def static(item: str) -> str:
        return item

    @idempotent(store=store)
    def copy(self) -> Shop:
        raise AssertionError

    @idempotent(store=store, key="self.name")
    def named(self, item: str) -> str:
        return f"{self.name}:{item}"


def test_I85_self_is_not_in_the_key() -> None:
    a, b = Shop("a"), Shop("b")
    unbound: Any = Shop.buy
    assert [a.buy("x"), b.buy("x"), unbound(b, "x")] == ["a:x"] * 3
    assert a.buy.receipt("x").state == b.buy.receipt(item="x").state == "done"
    assert Shop.buy.receipt(a, "x").state == "done"
    assert b.buy.forget("x")
    assert b.buy("x") == "b:x"


def test_I85_unless_the_key_names_it() -> None:
    a, b = Shop("a"), Shop("b")
    assert [a.named("x"), b.named("x"), a.named("x")] == ["a:x", "b:x", "a:x"]
    with pytest.raises(errors.FingerprintMismatch):
        a.named("y")
    assert b.named.forget()


def test_I85_or_the_object_says_what_identifies_it(memory: MemoryStore) -> None:
    class Account:
        def __init__(self, number: str) -> None:
            self.number = number

        def __retrysafe_key__(self) -> str:
            return self.number

        @idempotent(key="ref", store=memory)
        def pay(self, ref: str, amount: int) -> str:
            return f"{self.number}:{ref}"

    assert [Account(n).pay("r", 1) for n in ("1", "2", "1")] == ["1:r", "2:r", "1:r"]
    assert Account("1").pay.receipt(ref="r").state == "done"
    assert Account("3").pay.receipt(ref="r") is None


def test_class_and_static_methods_work_on_the_class_and_on_an_object() -> None:
    a: Any = Shop("a")
    static: Any = Shop.static  # mypy takes what a decorator returns for a method
    for _ in range(2):
        assert Shop.inner_class("x") == a.inner_class(item="x") == "Shop:x"
        assert Shop.outer_class("x") == a.outer_class(item="x") == "Shop:x"
        assert static("x") == a.static(item="x") == "x"
    for method in (Shop.inner_class, Shop.outer_class, Shop.static, Shop("a").outer_class):
        assert method.receipt("x").state == "done"


def test_an_async_method_works() -> None:
    async def main() -> None:
        a, b = Shop("a"), Shop("b")
        assert [await a.buy_async("x"), await b.buy_async("x")] == ["a:x", "a:x"]
        assert (await b.buy_async.receipt("x")).state == "done"

    run(main())


def test_a_return_type_that_is_still_being_made_is_checked_at_the_first_call() -> None:
    with pytest.raises(errors.NotEncodable, match="Shop"):
        Shop("a").copy()


def test_partials_keep_what_they_bind(memory: MemoryStore) -> None:
    def pay(bank: str, order: str, *, amount: int = 1) -> str:
        return f"{bank}:{order}:{amount}"

    a = idempotent(store=memory)(partial(pay, "a"))
    b = idempotent(store=memory)(partial(pay, "b", amount=2))
    assert [a("o"), b("o"), a("o"), b("o", amount=3)] == ["a:o:1", "b:o:2", "a:o:1", "b:o:3"]


def test_a_callable_object_works(memory: MemoryStore) -> None:
    class Adder:
        async def __call__(self, a: int) -> int:
            return a + 1

    add = idempotent(store=memory)(Adder())

    async def main() -> list[int]:
        return [await add(1), await add(1)]

    assert run(main()) == [2, 2]
    assert memory.size() == 1


Tag = Annotated[str, "a tag"]


@idempotent(store=Shop.store)
async def documented(order_id: str, tag: Tag = "x") -> list[int]:
    """It has words."""
    return [1]


@idempotent(store=Shop.store)
def documented_sync(order_id: str) -> None:
    """It has words too."""


def test_B130_a_decorated_function_still_looks_like_one() -> None:
    assert inspect.iscoroutinefunction(documented)
    assert asyncio.iscoroutinefunction(documented)
    assert not inspect.iscoroutinefunction(documented_sync)
    assert inspect.iscoroutinefunction(Shop.buy_async)
    assert inspect.iscoroutinefunction(Shop("a").buy_async)
    assert str(inspect.signature(documented)).startswith("(order_id: 'str', tag: 'Tag' = 'x')")
    assert str(inspect.signature(Shop("a").buy)) == "(item: 'str') -> 'str'"
    assert documented.__name__ == "documented"
    assert documented.__doc__ == "It has words."
    assert inspect.isfunction(documented.__wrapped__)
    assert typing.get_type_hints(documented) == {"order_id": str, "tag": str, "return": list[int]}
    for function in (documented, documented_sync):
        assert pickle.loads(pickle.dumps(function)) is function
        assert copy.deepcopy(function) is copy.copy(function) is function


def signed_in() -> str:
    return "ada"


def test_B130_it_is_an_endpoint_of_fastapi() -> None:
    app = FastAPI()
    store = MemoryStore()
    loops: set[Any] = set()

    @app.post("/orders/{order_id}")
    @idempotent(key="order_id", store=store)
    async def order(order_id: str, user: Annotated[str, Depends(signed_in)]) -> dict[str, str]:
        loops.add(asyncio.get_running_loop())
        return {"id": order_id, "user": user}

    with TestClient(app) as client:
        for _ in range(2):
            assert client.post("/orders/o-1").json() == {"id": "o-1", "user": "ada"}
    assert len(loops) == 1
