"""`step`: parts of keyed work that a re-run skips."""

from __future__ import annotations

import asyncio
import dataclasses
from decimal import Decimal
from typing import Any

import pytest

from retrysafe import errors
from retrysafe.context import current_request
from retrysafe.decorators import idempotent, step
from retrysafe.steps import outbound_key
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from tests.support import run, until


@dataclasses.dataclass
class Charge:
    id: str
    amount: Decimal


class Down(Exception):
    pass


def test_a_rerun_skips_a_decorated_step_that_was_done(store: Store) -> None:
    charged: list[str] = []
    tries: list[int] = []

    @step("charge")
    def charge(order: str) -> Charge:
        charged.append(order)
        return Charge(order, Decimal("1.10"))

    @idempotent(key="order", store=store)
    def buy(order: str) -> Charge:
        got = charge(order)
        tries.append(1)
        if len(tries) == 1:
            raise Down
        return got

    with pytest.raises(Down):
        buy("o-1")
    assert buy("o-1") == Charge("o-1", Decimal("1.10"))
    assert buy("o-2") == Charge("o-2", Decimal("1.10"))
    assert charged == ["o-1", "o-2"]


def test_a_rerun_skips_an_async_step_that_was_done(store: Store) -> None:
    charged: list[str] = []
    tries: list[int] = []

    @step("charge")
    async def charge(order: str) -> Charge:
        charged.append(order)
        await asyncio.sleep(0)
        return Charge(order, Decimal(5))

    @idempotent(key="order", store=store)
    async def buy(order: str) -> Charge:
        got = await charge(order)
        tries.append(1)
        if len(tries) == 1:
            raise Down
        return got

    async def main() -> None:
        with pytest.raises(Down):
            await buy("o-1")
        assert await buy("o-1") == Charge("o-1", Decimal(5))

    run(main())
    assert charged == ["o-1"]


def test_a_block_asks_whether_it_was_done(store: Store) -> None:
    charged: list[str] = []
    tries: list[int] = []

    @idempotent(key="order", store=store)
    def buy(order: str) -> str:
        with step("charge", type=Charge) as s:
            if not s.done:
                charged.append(order)
                s.result = Charge(order, Decimal("2.50"))
        tries.append(1)
        if len(tries) == 1:
            raise Down
        assert s.done
        return f"{s.result.id}:{s.result.amount}"

    with pytest.raises(Down):
        buy("o-1")
    assert buy("o-1") == "o-1:2.50"
    assert charged == ["o-1"]


def test_an_async_block_asks_too_and_may_have_no_result(store: Store) -> None:
    sent: list[str] = []
    tries: list[int] = []

    @idempotent(key="order", store=store)
    async def buy(order: str) -> bool:
        async with step("mail") as s:
            if not s.done:
                sent.append(order)
        tries.append(1)
        if len(tries) == 1:
            raise Down
        return s.done and s.result is None

    async def main() -> bool:
        with pytest.raises(Down):
            await buy("o-1")
        return await buy("o-1")

    assert run(main()) is True
    assert sent == ["o-1"]


def test_a_step_that_fails_runs_again(store: Store) -> None:
    tries: list[int] = []

    @step("charge")
    def charge() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise Down
        return len(tries)

    @idempotent(store=store)
    def buy() -> int:
        try:
            return charge()
        except Down:
            return charge()

    assert buy() == 2


def test_a_cancelled_block_is_run_again_with_the_work(store: Store) -> None:
    entered: list[int] = []

    @idempotent(store=store)
    async def buy() -> str:
        async with step("charge") as s:
            if not s.done:
                entered.append(1)
                if len(entered) == 1:
                    await asyncio.sleep(30)
                s.result = "paid"
        return str(s.result)

    async def main() -> str:
        first = asyncio.create_task(buy())
        await until(lambda: bool(entered))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await buy()

    assert run(main()) == "paid"
    assert len(entered) == 2


def test_a_sync_step_works_in_async_work_and_in_its_threads(store: Store) -> None:
    @step("sync")
    def part() -> int:
        return 1

    @idempotent(store=store)
    async def work() -> int:
        return part() + await asyncio.to_thread(part)

    async def main() -> int:
        return await work()

    assert run(main()) == 2


def test_outside_keyed_work_a_step_says_so(memory: MemoryStore) -> None:
    @step("charge")
    def charge() -> None:
        raise AssertionError("it must not run")

    with pytest.raises(errors.NoKeyedWork, match="charge"):
        charge()
    with pytest.raises(RuntimeError), step("charge"):
        raise AssertionError("it must not run")


def test_in_work_that_runs_unprotected_by_choice_steps_run_too(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_DISABLED", "1")

    @step("charge")
    def charge() -> int:
        return 1

    @idempotent(store=memory)
    def buy() -> int:
        with step("mail") as s:
            assert not s.done
        return charge()

    assert buy() == 1
    assert memory.size() == 0


def test_steps_of_two_keys_and_of_two_names_are_apart(memory: MemoryStore) -> None:
    @step("a")
    def a() -> str:
        return "a"

    @step("b")
    def b() -> str:
        return "b"

    @idempotent(store=memory)
    def work(n: int) -> str:
        return a() + b()

    assert [work(1), work(2)] == ["ab", "ab"]
    assert memory.size() == 6


def test_a_step_called_twice_in_one_run_with_other_arguments_is_refused(
    memory: MemoryStore,
) -> None:
    @step("charge")
    def charge(order: str) -> str:
        return order

    @idempotent(store=memory)
    def same() -> list[str]:
        return [charge("a"), charge(order="a")]

    @idempotent(store=memory)
    def other() -> list[str]:
        return [charge("a"), charge("b")]

    assert same() == ["a", "a"]
    with pytest.raises(errors.FingerprintMismatch):
        other()


def test_a_step_takes_arguments_that_have_no_canonical_form(memory: MemoryStore) -> None:
    @step("charge")
    def charge(session: object) -> int:
        return 1

    @idempotent(store=memory)
    def work() -> int:
        return charge(object())

    assert work() == 1


def test_a_method_can_be_a_step(memory: MemoryStore) -> None:
    class Shop:
        @step("charge")
        def charge(self, n: int) -> int:
            return n

        @idempotent(store=memory)
        def buy(self, n: int) -> int:
            return self.charge(n)

    assert [Shop().buy(3), Shop().buy(3)] == [3, 3]


def test_a_step_whose_result_cant_be_kept_is_not_run_again(memory: MemoryStore) -> None:
    runs: list[int] = []

    @idempotent(store=memory)
    def work() -> int:
        with step("odd") as s:
            if not s.done:
                runs.append(1)
                s.result = object()
        raise Down

    with pytest.raises(Down):
        work()
    with pytest.raises(errors.ResultNotKept):
        work()
    assert len(runs) == 1


def test_a_type_that_cant_be_stored_is_refused_where_it_is_said() -> None:
    with pytest.raises(errors.NotEncodable):
        step("x", type=complex)
    with pytest.raises(TypeError):
        step("")


def test_an_entered_step_cant_be_entered_again(memory: MemoryStore) -> None:
    @idempotent(store=memory)
    def work() -> None:
        manager = step("a")
        with manager, pytest.raises(RuntimeError, match="entered already"), manager:
            pass
        with manager as s:
            assert s.done

    work()


def test_B033_R8_outbound_keys_are_the_same_on_each_rerun(store: Store) -> None:
    sent: list[list[str | None]] = []

    @step("inner")
    def inner() -> None:
        keep("inner")

    def keep(name: str) -> None:
        context = current_request()
        assert context is not None
        sent[-1].append(outbound_key(context, name))

    @idempotent(store=store)
    def work(fail: bool = False) -> None:
        keep("POST /a")
        keep("POST /a")
        keep("POST /b")
        inner()
        keep("POST /a")
        if len(sent) < 3:
            raise Down

    for _ in range(3):
        sent.append([])
        try:
            work()
        except Down:
            continue
    first, *reruns = sent
    assert len(set(first)) == 5
    # A step that was done sends nothing, and shifts no other call's key.
    assert reruns == [first[:3] + first[4:]] * 2


def test_outside_keyed_work_there_is_no_outbound_key() -> None:
    from retrysafe.context import RequestContext

    assert outbound_key(RequestContext("r"), "POST /a") is None


def test_a_decorated_step_still_looks_like_the_function() -> None:
    @step("x")
    async def documented(a: int) -> int:
        """Words."""
        return a

    assert asyncio.iscoroutinefunction(documented)
    assert documented.__doc__ == "Words."
    assert documented.__name__ == "documented"


def test_steps_nest(memory: MemoryStore) -> None:
    names: list[Any] = []

    @step("part")
    def part() -> None:
        context = current_request()
        names.append(context.key if context else None)

    @step("outer")
    def outer() -> None:
        part()

    @idempotent(store=memory)
    def work() -> None:
        part()
        outer()

    work()
    assert len(set(names)) == 2
