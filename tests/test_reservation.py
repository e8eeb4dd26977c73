"""Reservations: the count is right whatever is repeated, late or at once."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from retrysafe import Reservation, Saga
from retrysafe.errors import (
    FingerprintMismatch,
    OutOfStock,
    ReservationConfirmed,
    ReservationExpired,
    RetrySafeError,
    SagaFailed,
    UnknownItem,
)
from retrysafe.reservation import Stock
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.testing import FakeClock
from tests.support import run, wait_until

_names = itertools.count()


def test_R28_a_hold_that_is_not_confirmed_is_back_by_itself(store: Store) -> None:
    seats = Reservation(store, ttl=0.1)
    seats.stock("seat", 3)
    assert seats.hold("seat", 2, "ann").expires_in == pytest.approx(0.1, abs=0.02)
    assert seats.stock("seat") == Stock(free=1, held=2)
    with pytest.raises(OutOfStock) as caught:
        seats.hold("seat", 2, "bob")
    assert (caught.value.asked, caught.value.left) == (2, 1)
    wait_until(lambda: seats.stock("seat") == Stock(free=3, held=0))
    with pytest.raises(ReservationExpired):
        seats.confirm("seat", "ann")
    assert seats.stock("seat") == Stock(free=3, held=0)


def test_C94_each_call_may_be_repeated(store: Store) -> None:
    seats = Reservation(store)
    assert seats.add("seat", 5, "delivery-1") == seats.add("seat", 5, "delivery-1") == Stock(5, 0)
    first, again = seats.hold("seat", 2, "ann"), seats.hold("seat", 2, "ann")
    assert again.expires_in <= first.expires_in <= 900
    assert seats.stock("seat") == Stock(3, 2)
    seats.confirm("seat", "ann")
    seats.confirm("seat", "ann")
    assert seats.stock("seat") == Stock(3, 0)
    assert seats.hold("seat", 2, "ann").confirmed  # the hold's reply was lost until now
    assert seats.stock("seat") == Stock(3, 0)
    seats.hold("seat", 1, "bob")
    assert [seats.release("seat", "bob"), seats.release("seat", "bob")] == [True, False]
    assert seats.stock("seat") == Stock(3, 0)


def test_what_contradicts_is_refused(store: Store) -> None:
    seats = Reservation(store)
    for call in (
        lambda: seats.hold("seat", 1, "ann"),
        lambda: seats.confirm("seat", "ann"),
        lambda: seats.stock("seat"),
    ):
        with pytest.raises(UnknownItem):  # never a count of 0
            call()
    seats.stock("seat", 4)
    seats.hold("seat", 2, "ann")
    with pytest.raises(FingerprintMismatch):
        seats.hold("seat", 3, "ann")
    with pytest.raises(OutOfStock):
        seats.stock("seat", 1)
    seats.confirm("seat", "ann")
    with pytest.raises(ReservationConfirmed):
        seats.release("seat", "ann")
    with pytest.raises(ReservationExpired):
        seats.confirm("seat", "nobody")
    seats.add("seat", 1, "return-1")
    with pytest.raises(FingerprintMismatch):
        seats.add("seat", 2, "return-1")
    for wrong in (0, -1, True, 1.5, 10**16):
        with pytest.raises(ValueError):
            seats.hold("seat", wrong, "x")  # type: ignore[arg-type]
    for name in ("", "x" * 513, "\ud800", 3):
        with pytest.raises(ValueError):
            seats.hold("seat", 1, name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep"):
        Reservation(store, ttl=10, keep=5)


def test_async_forms(store: Store) -> None:
    async def main() -> None:
        seats = Reservation(store)
        assert await seats.astock("seat", 3) == Stock(3, 0)
        assert (await seats.ahold("seat", 1, "ann")).quantity == 1
        assert (await seats.ahold("seat", 1, "bob")).quantity == 1
        await seats.aconfirm("seat", "ann")
        assert await seats.arelease("seat", "bob")
        assert await seats.aadd("seat", 2, "d") == await seats.astock("seat") == Stock(4, 0)

    run(main())


def test_threads_that_want_the_last_ones_get_no_more_than_there_are(store: Store) -> None:
    seats, got = Reservation(store), []
    seats.stock("seat", 25)
    start = threading.Barrier(8)

    def buy(buyer: int) -> None:
        start.wait()
        for number in range(10):
            try:
                seats.hold("seat", 1, f"{buyer}-{number}")
            except OutOfStock:
                continue
            seats.confirm("seat", f"{buyer}-{number}")
            got.append(1)

    threads = [threading.Thread(target=buy, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(got) == 25
    assert seats.stock("seat") == Stock(0, 0)


def test_what_has_ended_is_forgotten(redis_url: str) -> None:
    import redis

    store = RedisStore(redis_url, "tests")
    seats = Reservation(store, ttl=0.05, remember=0.05, keep=10)
    seats.stock("seat", 10)
    with redis.Redis.from_url(redis_url) as client:

        def now() -> float:
            seconds, micros = client.time()
            return seconds + micros / 1e6

        for number in range(900):
            seats.add("seat", 1, f"delivery-{number}")
        end = now() + 0.06
        wait_until(lambda: now() > end)
        for number in range(900, 1100):
            seats.add("seat", 1, f"delivery-{number}")
        (key,) = client.keys("tests:stock:*")
        assert client.hlen(key) < 900
        assert 0 < client.pttl(key) <= 10_000
    assert seats.stock("seat") == Stock(1110, 0)


def test_a_reservation_as_the_step_of_a_saga(store: Store) -> None:
    seats = Reservation(store, ttl=60)
    seats.stock("seat", 1)
    saga = Saga(f"booking{next(_names)}", store)

    def release(ctx: Any, data: Any) -> None:
        seats.release("seat", ctx.saga_id)

    @saga.step(undo=release, reserves="seat", hold=60)
    def hold(ctx: Any, fail: bool) -> int:
        return seats.hold("seat", 1, ctx.saga_id).quantity

    @saga.step
    def pay(ctx: Any, fail: bool) -> None:
        if fail:
            raise ValueError("declined")
        seats.confirm("seat", ctx.saga_id)

    with pytest.raises(SagaFailed):
        saga.run_sync("1", True)
    assert seats.stock("seat") == Stock(1, 0)
    saga.run_sync("2", False)
    assert seats.stock("seat") == Stock(0, 0)


class ReservationMachine(RuleBasedStateMachine):
    """One item against a model of it. Short holds are over before the next call."""

    store: Store
    pause: Any

    def __init__(self) -> None:
        super().__init__()
        self.item = f"item-{next(_names)}"
        self.long = Reservation(self.store, ttl=3600)
        self.short = Reservation(self.store, ttl=0.001)
        self.long.stock(self.item, 10)
        self.on_hand = 10
        self.held: dict[str, int] = {}
        self.confirmed: dict[str, int] = {}
        self.added: dict[str, int] = {}

    ids = st.sampled_from("abcdef")
    counts = st.integers(1, 6)

    def answer(self, call: Any, *args: Any) -> Any:
        try:
            return call(self.item, *args)
        except RetrySafeError as error:
            return type(error)

    def known(self, id: str) -> int | None:
        return self.held.get(id, self.confirmed.get(id, self.added.get(id)))

    @rule(id=ids, count=counts, brief=st.booleans())
    def hold(self, id: str, count: int, brief: bool) -> None:
        found = self.answer((self.short if brief else self.long).hold, count, id)
        if id in self.added or self.known(id) not in (None, count):
            assert found is FingerprintMismatch
        elif id in self.held or id in self.confirmed:
            assert (found.quantity, found.confirmed) == (count, id in self.confirmed)
        elif count > self.on_hand - sum(self.held.values()):
            assert found is OutOfStock
        else:
            assert found.quantity == count and not found.confirmed
            if not brief:
                self.held[id] = count
            self.pause()

    @rule(id=ids)
    def confirm(self, id: str) -> None:
        found = self.answer(self.long.confirm, id)
        if id in self.held:
            self.on_hand -= self.held[id]
            self.confirmed[id] = self.held.pop(id)
            assert found is None
        else:
            assert found is (None if id in self.confirmed else ReservationExpired)

    @rule(id=ids)
    def release(self, id: str) -> None:
        found = self.answer(self.long.release, id)
        if id in self.held:
            del self.held[id]
            assert found is True
        else:
            assert found is (ReservationConfirmed if id in self.confirmed else False)

    @rule(id=ids, count=counts)
    def add(self, id: str, count: int) -> None:
        found = self.answer(self.long.add, count, id)
        if id in self.held or id in self.confirmed or self.known(id) not in (None, count):
            assert found is FingerprintMismatch
        elif id not in self.added:
            self.added[id] = count
            self.on_hand += count

    @rule(count=st.integers(0, 15))
    def say(self, count: int) -> None:
        found = self.answer(self.long.stock, count)
        if count < sum(self.held.values()):
            assert found is OutOfStock
        else:
            self.on_hand = count

    @invariant()
    def counts_agree(self) -> None:
        held = sum(self.held.values())
        assert self.long.stock(self.item) == Stock(self.on_hand - held, held)
        assert 0 <= held <= self.on_hand


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_every_history_agrees_with_the_model(request: pytest.FixtureRequest, kind: str) -> None:
    class Machine(ReservationMachine):
        if kind == "memory":
            clock = FakeClock()
            store = MemoryStore("tests", clock)
            pause = staticmethod(lambda: Machine.clock.advance(0.002))
        else:
            store = RedisStore(request.getfixturevalue("redis_url"), "tests")
            pause = staticmethod(lambda: time.sleep(0.002))  # the server's clock: 1 ms holds

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
