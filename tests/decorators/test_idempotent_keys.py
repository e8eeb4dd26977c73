"""From a call's arguments to its key and fingerprint."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import pydantic
import pytest

from retrysafe import errors
from retrysafe.decorators import idempotent
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore


class Runs:
    """A function's runs."""

    def __init__(self) -> None:
        self.count = 0

    def one(self) -> int:
        self.count += 1
        return self.count


@pytest.fixture
def runs() -> Runs:
    return Runs()


def test_I82_O82_B131_position_keyword_and_default_are_one_key(store: Store, runs: Runs) -> None:
    @idempotent(store=store)
    def pay(order_id: int, amount: int = 10, *, note: str | None = None, **extra: int) -> int:
        return runs.one()

    assert [pay(1), pay(order_id=1), pay(1, 10), pay(1, amount=10, note=None)] == [1] * 4
    assert pay(1, 11) == 2
    assert [pay(1, x=2, y=3), pay(1, y=3, x=2)] == [3, 3]
    assert pay(1, x=2) == 4


def test_I82_positional_only_and_variadic_arguments(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(store=memory)
    def work(a: int, /, b: int = 2, *rest: int, c: int = 3) -> int:
        return runs.one()

    assert [work(1), work(1, 2), work(1, b=2, c=3)] == [1, 1, 1]
    assert [work(1, 2, 3), work(1, 2, 3, 4)] == [2, 3]


@pytest.mark.parametrize("how", ["key", "all"])
def test_I83_true_one_and_the_text_one_are_four_keys(
    memory: MemoryStore, runs: Runs, how: str
) -> None:
    @idempotent(store=memory, key="value" if how == "key" else None)
    def work(value: Any) -> int:
        return runs.one()

    values = [True, 1, 1.0, "1", "~i1:1", "~b1:1", "~", None]
    assert [work(value) for value in values] == list(range(1, 9))
    assert [work(value) for value in values] == list(range(1, 9))


def test_I84_key_and_fingerprint_are_taken_before_the_call(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(key="order.id", store=memory)
    def work(order: dict[str, Any]) -> int:
        order["id"] = "changed"
        order["more"] = 1
        return runs.one()

    assert [work({"id": "o-1"}), work({"id": "o-1"})] == [1, 1]
    assert work.receipt({"id": "o-1"}).state == "done"
    assert work.receipt({"id": "changed"}) is None


def test_a_call_that_differs_outside_the_key_is_refused(store: Store, runs: Runs) -> None:
    @idempotent(key="order_id", store=store)
    def charge(order_id: str, amount: Decimal, note: str = "") -> int:
        return runs.one()

    assert charge("o-1", Decimal("5")) == 1
    for amount, note in [("6", ""), ("5", "x"), ("5.0", "")]:
        with pytest.raises(errors.FingerprintMismatch):
            charge("o-1", Decimal(amount), note)
    assert charge(note="", amount=Decimal("5"), order_id="o-1") == 1


@dataclasses.dataclass
class Customer:
    id: str


@dataclasses.dataclass
class Order:
    id: str
    customer: Customer
    lines: list[str] = dataclasses.field(default_factory=list)


def test_a_dotted_path_reaches_members_and_the_rest_is_the_fingerprint(
    memory: MemoryStore, runs: Runs
) -> None:
    @idempotent(key="order.customer.id", store=memory)
    def work(order: Any) -> int:
        return runs.one()

    assert [work(Order("1", Customer("c-1"))), work(Order("1", Customer("c-1")))] == [1, 1]
    with pytest.raises(errors.FingerprintMismatch):
        work(Order("1", Customer("c-1"), ["more"]))
    assert work({"customer": {"id": "c-2"}}) == 2
    with pytest.raises(TypeError, match=r"order\.customer\.id"):
        work({"customer": {}})


def test_several_arguments_make_one_key(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(key=("tenant", "order.id"), store=memory)
    def work(tenant: str, order: Any, note: str = "") -> int:
        return runs.one()

    assert work("a", {"id": "bc"}) == 1
    assert work("ab", {"id": "c"}) == 2
    assert work(order={"id": "bc"}, tenant="a") == 1
    with pytest.raises(errors.FingerprintMismatch):
        work("a", {"id": "bc"}, note="x")
    assert work.receipt(tenant="a", order={"id": "bc"}).state == "done"


def test_a_callable_key_gets_the_calls_arguments(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(key=lambda a, b=2, **more: (a, b), store=memory, fingerprint="none")
    def work(a: int, b: int = 2, c: int = 0) -> int:
        return runs.one()

    assert [work(1), work(1, 2), work(1, b=2), work(1, c=5), work(2)] == [1, 1, 1, 1, 2]
    assert work.forget(1) is True


def test_a_callable_key_that_returns_none_is_an_error(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(key=lambda a: None, store=memory)
    def work(a: int) -> int:
        return runs.one()

    with pytest.raises(errors.KeyInvalid):
        work(1)
    assert (memory.size(), runs.count) == (0, 0)


def test_a_fingerprint_may_be_none_of_some_or_of_ones_own(memory: MemoryStore, runs: Runs) -> None:
    def base(order_id: str, amount: int, session: Any = None) -> int:
        return runs.one()

    session = object()
    none = idempotent(key="order_id", fingerprint="none", store=memory, namespace="1")(base)
    some = idempotent(key="order_id", fingerprint="amount", store=memory, namespace="2")(base)
    own = idempotent(
        key="order_id",
        fingerprint=lambda order_id, amount, session=None: amount % 10,
        store=memory,
        namespace="3",
    )(base)
    assert [none("o", 1, session), none("o", 2)] == [1, 1]
    assert [some("o", 1, session), some("o", 1, object())] == [2, 2]
    with pytest.raises(errors.FingerprintMismatch):
        some("o", 2)
    assert [own("o", 11), own("o", 21, session)] == [3, 3]
    with pytest.raises(errors.FingerprintMismatch):
        own("o", 12)


def test_a_key_may_be_among_the_extra_arguments(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(key="order", store=memory, fingerprint="none")
    def work(**fields: Any) -> int:
        return runs.one()

    assert [work(order=1, x=1), work(x=2, order=1), work(order=2)] == [1, 1, 2]
    with pytest.raises(TypeError, match="order"):
        work(x=1)


def test_B040_the_order_of_a_dict_makes_no_difference(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(store=memory)
    def work(payload: dict[str, Any]) -> int:
        return runs.one()

    assert work({"a": 1, "b": {"c": 2, "d": 3}}) == work({"b": {"d": 3, "c": 2}, "a": 1}) == 1
    assert [work({"a": 1}), work({"a": "1"})] == [2, 3]


def test_B041_the_order_of_a_list_does(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(store=memory)
    def work(payload: Any) -> int:
        return runs.one()

    pairs: list[tuple[Any, Any]] = [
        ({"steps": ["debit", "credit"]}, {"steps": ["credit", "debit"]}),
        ([{"a": 1}, {"b": 2}], [{"b": 2}, {"a": 1}]),
        ([1, 2], [2, 1]),
    ]
    for first, second in pairs:
        assert work(first) != work(second)


class Kind(enum.Enum):
    A = "a"


class Model(pydantic.BaseModel):
    id: uuid.UUID
    at: dt.datetime
    kind: Kind


@attrs.define
class Attrs:
    id: Decimal


class Struct(msgspec.Struct):
    id: bytes


MAKERS: list[Callable[[], Any]] = [
    lambda: Model(id=uuid.UUID(int=1), at=dt.datetime(2026, 1, 1, tzinfo=dt.UTC), kind=Kind.A),
    lambda: Order("1", Customer("c"), ["x"]),
    lambda: Attrs(Decimal("1.10")),
    lambda: Struct(b"x"),
    lambda: {
        "u": uuid.UUID(int=1),
        "aware": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "naive": dt.datetime(2026, 1, 1),
        "d": Decimal("1.10"),
        "e": Kind.A,
        "b": b"x",
        "s": {"a", "b", "c", "d"},
        "t": (1, dt.timedelta(seconds=1), dt.date(2026, 1, 1)),
    },
]


@pytest.mark.parametrize("make", MAKERS)
def test_B047_equal_values_of_every_listed_type_are_one_key(
    store: Store, runs: Runs, make: Callable[[], Any]
) -> None:
    @idempotent(key="value", store=store)
    def work(value: Any) -> int:
        return runs.one()

    assert [work(make()), work(make())] == [1, 1]


@pytest.mark.parametrize("key", ["value", None, "other"])
def test_B047_an_unlisted_type_is_told_by_the_arguments_name_before_anything_is_claimed(
    memory: MemoryStore, runs: Runs, key: str | None
) -> None:
    @idempotent(key=key, store=memory)
    def work(other: int, value: Any) -> int:
        return runs.one()

    with pytest.raises(errors.NotEncodable, match="'value'") as caught:
        work(1, object())
    assert isinstance(caught.value, TypeError)
    assert (memory.size(), runs.count) == (0, 0)


def test_a_wrong_call_is_a_type_error_as_without_the_decorator(
    memory: MemoryStore, runs: Runs
) -> None:
    @idempotent(store=memory)
    def work(a: int) -> int:
        return runs.one()

    wrong: list[Callable[[Any], Any]] = [
        lambda f: f(),
        lambda f: f(1, 2),
        lambda f: f(1, a=1),
        lambda f: f(b=1),
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call(work)
    assert memory.size() == 0


def test_forget_and_receipt_take_the_arguments_of_the_key_alone(store: Store, runs: Runs) -> None:
    @idempotent(key="order_id", store=store)
    def charge(order_id: str, amount: Decimal) -> int:
        return runs.one()

    assert charge.receipt(order_id="o-1") is None
    assert charge.forget(order_id="o-1") is False
    charge("o-1", Decimal(5))
    receipt = charge.receipt(order_id="o-1")
    assert (receipt.state, receipt.lease_left) == ("done", None)
    assert receipt.started.tzinfo is not None
    assert charge.receipt("o-1", Decimal(6)) == receipt
    assert charge.forget("o-1") is True
    assert charge("o-1", Decimal(6)) == 2
    with pytest.raises(TypeError, match="order_id"):
        charge.receipt(amount=Decimal(5))


def test_I91_a_renamed_function_starts_a_new_key_space_unless_it_keeps_its_namespace(
    memory: MemoryStore, runs: Runs
) -> None:
    def before(n: int) -> int:
        return runs.one()

    def after(n: int) -> int:
        return runs.one()

    assert [idempotent(store=memory)(f)(1) for f in (before, after)] == [1, 2]
    named = [idempotent(store=memory, namespace="billing.charge")(f) for f in (before, after)]
    assert [f(1) for f in named] == [3, 3]


def test_B047_decimals_of_other_digits_are_other_keys(memory: MemoryStore, runs: Runs) -> None:
    @idempotent(store=memory)
    def work(value: Decimal) -> int:
        return runs.one()

    assert [work(Decimal("1.10")), work(Decimal("1.1")), work(Decimal("1.10"))] == [1, 2, 1]
