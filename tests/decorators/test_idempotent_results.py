"""What an idempotent function answers: the same value and type, for the first call and for each
replay, or nothing at all. Never another value in silence."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, NamedTuple, NoReturn, TypedDict
from zoneinfo import ZoneInfo

import attrs
import msgspec
import pydantic
import pytest

from retrysafe import errors
from retrysafe.decorators import idempotent
from retrysafe.events import Event
from retrysafe.keys import digest
from retrysafe.sameness import Sameness
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from tests.support import run


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1


@dataclasses.dataclass
class Line:
    sku: str
    price: Decimal
    tags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Order:
    id: uuid.UUID
    lines: list[Line]
    placed: dt.datetime
    colour: Colour | None = None


@dataclasses.dataclass(eq=False)
class NoEq:
    at: dt.date


class Charge(msgspec.Struct):
    id: str
    amount: Decimal


class Refund(msgspec.Struct):
    id: str


@attrs.define
class Attrs:
    id: int
    ratio: float


class Model(pydantic.BaseModel):
    id: uuid.UUID
    amount: Decimal
    at: dt.datetime
    parts: list[tuple[int, str]] = []
    renamed: str = pydantic.Field("x", alias="re-named")


class Other(pydantic.BaseModel):
    id: str


class Point(NamedTuple):
    x: int
    y: Decimal


class Movie(TypedDict):
    title: str
    year: int


@dataclasses.dataclass
class WithModel:
    model: Model
    when: dt.timedelta


PARIS = ZoneInfo("Europe/Paris")
MOMENT = dt.datetime(2026, 7, 1, 12, 30, 15, 123456, tzinfo=PARIS)
MODEL = Model.model_validate(
    {"id": uuid.UUID(int=5), "amount": Decimal("1.10"), "at": MOMENT, "re-named": "y"}
)

VALUES: list[tuple[Any, Any]] = [
    (Decimal, Decimal("1.10")),
    (Decimal, Decimal("NaN")),
    (dt.datetime, MOMENT),
    (dt.datetime, dt.datetime(2026, 1, 1, 1, 1)),
    (dt.datetime, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)),
    (dt.date, dt.date(2026, 1, 1)),
    (dt.time, dt.time(1, 2, 3, tzinfo=dt.UTC)),
    (dt.timedelta, dt.timedelta(days=-1, microseconds=7)),
    (uuid.UUID, uuid.UUID(int=7)),
    (Colour, Colour.BLUE),
    (Size, Size.SMALL),
    (bytes, b"\x00\xff"),
    (bytearray, bytearray(b"ab")),
    (None, None),
    (int, 2**80),
    (int, -(2**70)),
    (float, math.nan),
    (float, -0.0),
    (float, math.inf),
    (str, "naïve 🎉"),
    (tuple[int, ...], (1, 2)),
    (tuple[int, str, Decimal], (1, "a", Decimal("0.0"))),
    (set[str], {"a", "b"}),
    (frozenset[uuid.UUID], frozenset({uuid.UUID(int=1)})),
    (list[tuple[int, list[str]]], [(1, ["a"]), (2, [])]),
    (dict[int, tuple[int, int]], {1: (1, 2)}),
    (dict[uuid.UUID, Decimal], {uuid.UUID(int=1): Decimal("1.0")}),
    (dict[tuple[int, int], str], {(1, 2): "x"}),
    (dict[str, Any], {"a": [1, 2.5, None, True], "b": {"c": "d"}}),
    (dict[str, object], {"a": [1, {"b": None}]}),
    (Sequence[int], [1, 2]),
    (Line, Line("a", Decimal("1.10"), ("x",))),
    (Order, Order(uuid.UUID(int=1), [Line("a", Decimal("1.1"))], MOMENT, Colour.RED)),
    (NoEq, NoEq(dt.date(2026, 1, 1))),
    (Charge, Charge("c", Decimal("1.0"))),
    (list[Charge], [Charge("c", Decimal("1.0"))]),
    (Attrs, Attrs(1, math.nan)),
    (Point, Point(1, Decimal("2.0"))),
    (Movie, {"title": "x", "year": 1999}),
    (Model, MODEL),
    (list[Model], [MODEL, MODEL]),
    (dict[str, Model | None], {"a": MODEL, "b": None}),
    (WithModel, WithModel(MODEL, dt.timedelta(seconds=3))),
    (Model | Other, Other(id="o")),
    (Order | None, None),
    (Line | Attrs, Attrs(1, 2.0)),
    (Charge | Refund, Refund("c")),
    (str | uuid.UUID, uuid.UUID(int=3)),
    (str | Decimal | None, "1.10"),
    (int | float, 3),
    (int | float, 3.0),
    (bytes | str, "text"),
    (bool | int, True),
]


def returning(annotation: Any, value: Any) -> Callable[[], Any]:
    """A function that is declared to return `annotation`, and returns a fresh `value`."""

    def function() -> Any:
        return value

    function.__annotations__["return"] = annotation
    return function


def named(value: Any) -> str:
    # The order of a set's repr differs between processes.
    return "a set" if isinstance(value, set | frozenset) else repr(value)


@pytest.mark.parametrize(("annotation", "value"), VALUES, ids=named)
def test_I80_O77_first_and_replayed_result_are_equal_and_of_one_type(
    memory: MemoryStore, annotation: Any, value: Any
) -> None:
    runs: list[int] = []
    inner = returning(annotation, value)

    def counted() -> Any:
        runs.append(1)
        return inner()

    counted.__annotations__["return"] = annotation
    function = idempotent(store=memory)(counted)
    first, second = function(), function()
    assert first is value
    assert Sameness().same(first, second), (first, second)
    assert len(runs) == 1


@pytest.mark.parametrize("value", [None, 0, "", [], False, {}, 0.0], ids=repr)
@pytest.mark.parametrize("annotated", [False, True])
def test_I92_O78_empty_results_are_replayed_as_themselves(
    store: Store, value: Any, annotated: bool
) -> None:
    runs: list[int] = []

    def function() -> Any:
        runs.append(1)
        return value

    if annotated:
        function.__annotations__["return"] = None if value is None else type(value)
    else:
        del function.__annotations__["return"]
    decorated = idempotent(store=store)(function)
    for _ in range(2):
        got = decorated()
        assert got == value
        assert type(got) is type(value)
    assert len(runs) == 1


def test_I81_without_an_annotation_a_json_like_result_is_replayed(store: Store) -> None:
    @idempotent(store=store)
    def work(n):  # type: ignore[no-untyped-def]
        return {"a": [1, 2.5, "x", None, True, {"b": 2**70}], "n": n}

    first = work(1)
    assert work(1) == first
    assert work(1) is not first


OTHERS: list[Any] = [
    (1, 2),
    {"a": (1,)},
    {1: 2},
    {1, 2},
    Decimal(1),
    b"x",
    object(),
    Colour.RED,
    Size.SMALL,
    Line("a", Decimal(1)),
    dt.date(2026, 1, 1),
]


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: type(value).__name__)
def test_I81_O79_any_other_result_goes_to_the_first_caller_and_is_not_kept(
    memory: MemoryStore, told: list[Event], value: Any
) -> None:
    runs: list[int] = []

    @idempotent(store=memory)
    def work():  # type: ignore[no-untyped-def]
        runs.append(1)
        return value

    assert work() is value
    for _ in range(2):
        with pytest.raises(errors.ResultNotKept):
            work()
    assert work.receipt().state == "not-kept"
    assert len(runs) == 1
    assert [event.kind for event in told].count("result-not-kept") == 1


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str, 5),
        (int, "5"),
        (int, 5.0),
        (int, True),
        (bool, 1),
        (Line, None),
        (Sequence[int], (1, 2)),
        (list[int], (1, 2)),
        (Movie, {"title": "x", "year": 1, "extra": 2}),
        (dict[str, Any], {"a": Decimal(1)}),
        (Line, Line("a", "1.10")),  # type: ignore[arg-type]
        (None, "something"),
        (str, "\ud800"),
        (Model, Other(id="x")),
        (Line | Attrs, "neither"),
    ],
    ids=named,
)
def test_I93_a_result_that_would_come_back_changed_is_not_kept(
    memory: MemoryStore, annotation: Any, value: Any
) -> None:
    function = idempotent(store=memory)(returning(annotation, value))
    assert function() is value
    with pytest.raises(errors.ResultNotKept):
        function()


def test_I93_a_subclass_of_what_was_declared_is_not_cut_down_in_silence(
    memory: MemoryStore,
) -> None:
    @dataclasses.dataclass
    class Special(Line):
        more: int = 0

    function = idempotent(store=memory)(returning(Line, Special("a", Decimal(1), more=5)))
    assert function().more == 5
    with pytest.raises(errors.ResultNotKept):
        function()


def test_an_int_declared_to_be_a_float_is_a_float_for_everybody(memory: MemoryStore) -> None:
    function = idempotent(store=memory)(returning(dict[str, float], {"a": 1, "b": 2.5}))
    first, second = function(), function()
    assert first == second == {"a": 1.0, "b": 2.5}
    assert type(first["a"]) is type(second["a"]) is float


def test_a_replay_keeps_the_offset_of_a_moment(memory: MemoryStore) -> None:
    function = idempotent(store=memory)(returning(dt.datetime, MOMENT))
    assert function().isoformat() == function().isoformat() == "2026-07-01T12:30:15.123456+02:00"


def test_each_caller_gets_a_result_of_its_own(memory: MemoryStore) -> None:
    @idempotent(store=memory)
    def work() -> list[int]:
        return [1]

    work().append(2)
    work().append(3)
    assert work() == [1]


class Plain:
    """A class that nothing knows how to store."""


@pytest.mark.parametrize(
    "annotation",
    [
        Plain,
        list[Plain],
        dict[str, tuple[Plain, ...]],
        Plain | None,
        complex,
        type[int],
        Callable[[], int],
        Iterator[int],
        range,
        "NoSuch[",
    ],
    ids=repr,
)
def test_an_annotation_that_cant_be_stored_is_refused_when_decorated(annotation: Any) -> None:
    with pytest.raises(errors.NotEncodable):
        idempotent(returning(annotation, None))


def test_annotations_as_text_are_found_where_the_function_is_made(memory: MemoryStore) -> None:
    @dataclasses.dataclass
    class Local:
        n: int

    @idempotent(store=memory)
    def work() -> Local:
        return Local(1)

    @idempotent(store=memory, namespace="optional")
    def maybe() -> Local | None:
        return None

    assert [work(), work()] == [Local(1)] * 2
    assert [maybe(), maybe()] == [None, None]


def test_a_method_may_return_its_own_class(memory: MemoryStore) -> None:
    @dataclasses.dataclass
    class Account:
        number: str

        @classmethod
        @idempotent(store=memory)
        def open(cls, number: str) -> Account:
            return cls(number)

        @idempotent(store=memory)
        def twin(self) -> Account:
            return Account(self.number)

    assert Account.open("1") == Account.open("1") == Account("1")
    assert Account("1").twin() == Account("1").twin() == Account("1")


def test_a_name_that_never_appears_is_told_at_the_first_call(memory: MemoryStore) -> None:
    @idempotent(store=memory)
    def work() -> NoSuchClass:  # type: ignore[name-defined]  # noqa: F821
        raise AssertionError("it must not run")

    with pytest.raises(errors.NotEncodable, match="NoSuchClass"):
        work()
    assert memory.size() == 0


def test_a_function_that_never_returns_is_fine(memory: MemoryStore) -> None:
    @idempotent(store=memory)
    def work() -> NoReturn:
        raise LookupError

    with pytest.raises(LookupError):
        work()


def test_O81_a_result_that_the_type_of_today_cant_read_is_an_error_never_a_run(
    memory: MemoryStore, told: list[Event]
) -> None:
    old = idempotent(store=memory, namespace="n")(returning(Charge, Charge("c", Decimal(1))))
    old()

    def changed() -> Attrs:
        raise AssertionError("it must not run")

    with pytest.raises(errors.RecordCorrupt, match="read as the type"):
        idempotent(store=memory, namespace="n")(changed)()
    assert [event.kind for event in told].count("record-corrupt") == 1


def test_a_version_of_its_own_shares_nothing(memory: MemoryStore) -> None:
    one = idempotent(store=memory, namespace="n", version=1)(returning(int, 1))
    two = idempotent(store=memory, namespace="n", version=2)(returning(str, "2"))
    assert [one(), two(), one(), two()] == [1, "2", 1, "2"]


class Upper:
    """A codec of one's own."""

    def encode(self, value: Any) -> bytes:
        return str(value.text).upper().encode()

    def decode(self, data: bytes) -> Any:
        if data == b"BAD":
            raise ValueError("bad")
        return data.decode()


class Text(Plain):
    def __init__(self, text: str) -> None:
        self.text = text


def test_a_codec_takes_the_annotations_place(store: Store) -> None:
    @idempotent(store=store, codec=Upper())
    def work(text: str) -> Plain:
        return Text(text)

    answers: list[Any] = [work("a"), work("a")]
    assert isinstance(answers[0], Text)
    assert answers[1] == "A"
    work("bad")
    with pytest.raises(errors.RecordCorrupt):
        work("bad")


def test_a_codec_that_refuses_a_result_closes_the_receipt_without_it(store: Store) -> None:
    @idempotent(store=store, codec=Upper())
    def work() -> Any:
        return 5

    assert work() == 5
    with pytest.raises(errors.ResultNotKept):
        work()


# Errors that are results


class Declined(Exception):
    """An error that takes something else than it shows."""

    def __init__(self, order: str, missing: Decimal) -> None:
        super().__init__(f"{order} lacks {missing}")
        self.order = order
        self.missing = missing


class Refused(Exception):
    pass


class RefusedForGood(Refused):
    pass


@pytest.mark.parametrize(
    "error",
    [
        Declined("o-1", Decimal("1.10")),
        Refused(),
        Refused(
            "why", 5, Decimal("1.0"), uuid.UUID(int=1), dt.date(2026, 1, 1), (1, [{"a": b"x"}]), {3}
        ),
        RefusedForGood("never", 2**70),
        FileNotFoundError(2, "No such file", "x"),
        KeyError("k"),
    ],
    ids=repr,
)
def test_I89_O80_a_kept_error_is_raised_again_as_its_own_type(store: Store, error: Any) -> None:
    runs: list[int] = []

    @idempotent(store=store, keep_errors=(Declined, Refused, FileNotFoundError, KeyError))
    def work() -> int:
        runs.append(1)
        raise error

    with pytest.raises(type(error)) as first:
        work()
    with pytest.raises(type(error)) as again:
        work()
    assert first.value is error
    assert type(again.value) is type(error)
    assert again.value.args == error.args
    assert str(again.value) == str(error)
    if isinstance(error, Declined):
        assert vars(again.value) == vars(error)
    assert len(runs) == 1


def test_I89_any_other_error_releases(store: Store) -> None:
    runs: list[int] = []

    @idempotent(store=store, keep_errors=Refused)
    async def work() -> int:
        runs.append(1)
        if len(runs) == 1:
            raise OSError
        raise Refused("no")

    async def main() -> None:
        with pytest.raises(OSError):
            await work()
        for _ in range(2):
            with pytest.raises(Refused):
                await work()

    run(main())
    assert len(runs) == 2


def test_an_error_that_cant_be_kept_closes_the_receipt_without_it(
    store: Store, told: list[Event]
) -> None:
    @idempotent(store=store, keep_errors=Refused)
    def work() -> int:
        raise Refused(object())

    with pytest.raises(Refused):
        work()
    with pytest.raises(errors.ResultNotKept):
        work()
    assert "result-not-kept" in [event.kind for event in told]


def test_an_error_that_says_a_call_did_not_run_is_no_result(memory: MemoryStore) -> None:
    runs: list[int] = []

    @idempotent(store=memory, keep_errors=Exception)
    def work() -> int:
        runs.append(1)
        if len(runs) == 1:
            raise errors.InFlight("x", 1.0)
        return 5

    with pytest.raises(errors.InFlight):
        work()
    assert work() == 5


def test_a_kept_error_that_is_no_longer_named_is_not_guessed(memory: MemoryStore) -> None:
    def work() -> int:
        raise Refused("no")

    with pytest.raises(Refused):
        idempotent(store=memory, namespace="n", keep_errors=Refused)(work)()
    with pytest.raises(errors.RecordCorrupt):
        idempotent(store=memory, namespace="n", keep_errors=KeyError)(work)()


def test_what_is_stored_is_no_pickle(memory: MemoryStore) -> None:
    idempotent(store=memory, namespace="n")(returning(Line, Line("a", Decimal(1))))()
    value, _ = memory._values[digest(memory.namespace, "n", "~")]
    assert b"a" in value
    assert b"\x80\x04" not in value
    assert b"Line" not in value
