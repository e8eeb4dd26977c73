"""Keys, fingerprints and the encoding of arguments."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from typing import Any
from uuid import UUID, uuid4

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe import keys
from retrysafe.errors import KeyInvalid, NotEncodable
from retrysafe.keys import RequestFingerprint, canonical, digest, fingerprint, json_fingerprint
from tests.support import collector_held

VISIBLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)
JSON = "application/json"


# --- syntax ------------------------------------------------------------------------------------


def test_I1_the_quoted_and_the_bare_form_of_a_text_are_one_key() -> None:
    assert keys.parse_key([b"abc"]) == keys.parse_key([b'"abc"']) == keys.parse_key(['\t"abc" '])


def test_I2_escapes_are_undone_in_the_quoted_form_only() -> None:
    assert keys.parse_key([rb'"a\"b\\c"']) == 'a"b\\c'
    assert keys.parse_key([rb"a\b"]) == r"a\b"
    for other in (rb'"a\nb"', rb'"a\u0041"', rb'"a\"', b'"a\\'):
        with pytest.raises(KeyInvalid):
            keys.parse_key([other])


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b" ", b'""', b'" "', b"a b", b'"a b"', b"a\x00b", b"a\nb", b"a\tb", b"a\x7f"),
        *(b"\xe9", "é".encode(), b"\xff", "é", "a" * 256, '"' + "a" * 256 + '"'),
    ],
)
def test_I3_what_is_not_1_to_255_visible_characters_is_refused(value: bytes | str) -> None:
    with pytest.raises(KeyInvalid) as caught:
        keys.parse_key([value])
    assert caught.value.reason in str(caught.value)


@pytest.mark.parametrize("values", [[b"a", b"a"], [b"a", b"b"], [b"", b"a"], []])
def test_I4_two_headers_are_refused_equal_or_not(values: list[bytes]) -> None:
    with pytest.raises(KeyInvalid):
        keys.parse_key(values)


@pytest.mark.parametrize("value", [b'"abc', b'abc"', b'"a"b"', b'a"b', b'"', b"'a b'", b'"a", "b"'])
def test_O2_unbalanced_quotes_are_refused(value: bytes) -> None:
    with pytest.raises(KeyInvalid):
        keys.parse_key([value])


@pytest.mark.parametrize("value", [b'"abc";v=1', b'"abc" ;v=1', b'"abc"; v', b'"abc",'])
def test_O3_parameters_after_a_quoted_key_are_refused(value: bytes) -> None:
    with pytest.raises(KeyInvalid):
        keys.parse_key([value])


def test_O7_the_limit_counts_after_unquoting() -> None:
    assert keys.parse_key([b'"' + rb"\"" * 255 + b'"']) == '"' * 255
    assert keys.parse_key(["a" * 255]) == "a" * 255


def test_a_refusal_never_repeats_the_key() -> None:
    with pytest.raises(KeyInvalid) as caught:
        keys.parse_key([b"secret token"])
    assert "secret" not in str(caught.value)


@given(VISIBLE)
def test_every_visible_text_can_be_sent_quoted(text: str) -> None:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    assert keys.parse_key([f'"{escaped}"'.encode()]) == text == keys.check_key(text)


@given(st.binary(max_size=300))
def test_any_header_is_a_key_or_refused_never_another_error(value: bytes) -> None:
    try:
        text = keys.parse_key([value])
    except KeyInvalid:
        return
    assert re.fullmatch(r"[\x21-\x7e]{1,255}", text)


# --- digests -----------------------------------------------------------------------------------


def test_O8_parts_of_a_digest_never_run_into_each_other() -> None:
    names = {
        digest("ns", "a", "b:c"),
        digest("ns", "a:b", "c"),
        digest("ns:a", "b", "c"),
        digest("ns", "", "ab:c"),
        digest("ns", "a\x00", "b"),
        digest("ns", "a", "\x00b"),
    }
    assert len(names) == 6
    assert {len(name) for name in names} == {16}


def test_I11_another_scope_is_another_digest() -> None:
    assert digest("ns", "alice", "k") != digest("ns", "bob", "k")


def test_a_scope_with_a_lone_surrogate_has_a_digest() -> None:
    assert digest("ns", "\udce9", "k") != digest("ns", "?", "k")


def test_a_derived_key_is_stable_and_depends_on_every_part() -> None:
    work = digest("ns", "", "k")
    first = keys.derive(work, "charge", 1)
    assert first == keys.derive(work, "charge", 1) == keys.derive(work.hex(), "charge", 1)
    others = [
        keys.derive(work, "charge", 2),
        keys.derive(work, "charge", "1"),
        keys.derive(work, "charge"),
        keys.derive(work, "charge1"),
        keys.derive(digest("ns", "", "l"), "charge", 1),
    ]
    assert len({first, *others}) == 6
    assert keys.check_key(first) == first and len(first) <= 64


def test_digests_are_the_same_in_every_process() -> None:
    code = (
        "from retrysafe import keys\n"
        "print(keys.digest('ns', 's', 'k').hex(), keys.derive(b'd', 'a', 1),"
        " keys.fingerprint('a', keys.canonical({'b': {1, 'x', None}, 'a': 1.5})).hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


# --- fingerprints ------------------------------------------------------------------------------


def body_print(body: bytes, method: str = "POST", path: bytes = b"/a", query: bytes = b"") -> bytes:
    made = RequestFingerprint(method, path, query, b"")
    made.update(body)
    return made.finish()


def json_print(body: str | bytes, content_type: str = JSON, encoding: bytes = b"") -> bytes:
    data = body.encode("utf-8") if isinstance(body, str) else body
    return json_fingerprint("POST", b"/a", b"", encoding, data, content_type)


def test_every_fingerprint_is_16_bytes_and_begins_with_its_scheme() -> None:
    made = [
        fingerprint("body", b"x"),
        fingerprint("j", b"x"),
        fingerprint("callable", b"x"),
        fingerprint("arguments", b"x"),
        body_print(b"x"),
        json_print("{}"),
        keys.NO_FINGERPRINT,
    ]
    assert [each[:1] for each in made] == [b"b", b"j", b"c", b"a", b"b", b"j", b"n"]
    assert {len(each) for each in made} == {16}
    with pytest.raises(ValueError):
        fingerprint("md5", b"x")


def test_parts_of_a_fingerprint_never_run_into_each_other() -> None:
    assert fingerprint("a", b"ab", b"c") != fingerprint("a", b"a", b"bc")
    assert fingerprint("a", b"a") != fingerprint("a", b"a", b"")


def test_I5_method_path_query_and_body_are_all_in_the_fingerprint() -> None:
    made = {
        body_print(b"x"),
        body_print(b"y"),
        body_print(b"x", method="PATCH"),
        body_print(b"x", path=b"/b"),
        body_print(b"x", query=b"q=1"),
        body_print(b"", query=b"x"),
        body_print(b""),
    }
    assert len(made) == 7


@given(st.binary(max_size=2000), st.integers(1, 50))
def test_I7_where_a_body_is_cut_makes_no_difference(body: bytes, size: int) -> None:
    made = RequestFingerprint("POST", b"/a", b"", b"")
    for at in range(0, len(body), size):
        made.update(body[at : at + size])
        made.update(b"")
    assert made.finish() == body_print(body)


def test_I17_no_path_is_normalised() -> None:
    paths = [b"/a", b"/a/", b"/a//b", b"/a/b", b"/A", b"/%61"]
    assert len({body_print(b"", path=path) for path in paths}) == len(paths)


def test_O24_the_content_encoding_is_part_of_the_fingerprint() -> None:
    plain = RequestFingerprint("POST", b"/", b"", b"").finish()
    packed = RequestFingerprint("POST", b"/", b"", b"gzip").finish()
    assert plain != packed == RequestFingerprint("POST", b"/", b"", b" GZIP").finish()
    data = b'{"a":1}'
    assert json_print(gzip.compress(data), encoding=b"gzip") != json_print(data)
    assert json_print(b'{"a": 1}', encoding=b"gzip") != json_print(b'{"a":1}', encoding=b"gzip")


def test_O25_the_query_counts_byte_for_byte() -> None:
    assert body_print(b"", query=b"a=1&b=2") != body_print(b"", query=b"b=2&a=1")
    assert body_print(b"", query=b"a=1&a=2") != body_print(b"", query=b"a=2&a=1")


def test_I6_the_order_of_members_counts_by_body_and_not_by_json() -> None:
    one, other = '{"a":1,"b":{"c":2,"d":3}}', ' {"b": {"d":3,"c":2},\n"a":1}'
    assert body_print(one.encode()) != body_print(other.encode())
    assert json_print(one) == json_print(other)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
@pytest.mark.parametrize("other", ["application/problem+json", 'application/json;charset="UTF-8"'])
def test_O20_json_types_are_compared_by_value(kind: str, other: str) -> None:
    assert json_print('{"a":1, "b":2}', kind) == json_print('{"b":2,"a":1}', other)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/jsonp", "text/x+json", "json"])
def test_another_type_is_compared_byte_for_byte(kind: str) -> None:
    assert json_print('{"a":1}', kind) == json_print('{"a":1}', kind)
    assert json_print('{"a":1}', kind) != json_print('{"a": 1}', kind)
    assert json_print('{"a":1}', kind) != json_print('{"a":1}')


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"amount":1,"amount":200}', '{"amount":200}'),  # O21
        ("9007199254740993.0", "9007199254740992.0"),  # O22
        ("1e400", "2e400"),
        ("1e-400", "0.0"),
        ("1e-99999999999999999999", "0.0"),
        ("9007199254740993", "9007199254740992"),
        ("0.1", "0.10000000000000000001"),
        ("1", "1.0"),
        ("1", '"1"'),
        ("1", "true"),
        ("null", '"null"'),
        ("NaN", "NaN "),
        ("[1,2]", "[2,1]"),  # B041
        ('[{"a":1},{"b":2}]', '[{"b":2},{"a":1}]'),
        ('"\\u00e9"', '"e\\u0301"'),
        ("", " "),
        ("", "null"),
        ("[" * 20_000 + "]" * 20_000, " " + "[" * 20_000 + "]" * 20_000),  # O23
        ("[" * 101 + "]" * 101, " " + "[" * 101 + "]" * 101),
        ('"\\ud800"', ' "\\ud800"'),
        ("9" * 5000, "9" * 5000 + " "),
        ('{"a":', '{"a": '),
    ],
)
def test_I18_two_json_bodies_are_equal_only_if_their_values_surely_are(
    one: str, other: str
) -> None:
    with collector_held():
        assert json_print(one) == json_print(one)
        assert json_print(other) == json_print(other)
        assert json_print(one) != json_print(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('"\\u00e9"', '"é"'),
        ("1.0", "1.00"),
        ("100.0", "1e2"),
        ("9007199254740992", " 9007199254740992"),
        ("[" * 100 + "]" * 100, " " + "[" * 100 + "]" * 100),
        ('{"a":[1, null, true, "x", {}]}', '{"a":[1,null,true,"x",{ }]}'),
    ],
)
def test_equal_json_values_written_in_two_ways_are_equal(one: str, other: str) -> None:
    assert json_print(one) == json_print(other)


def test_a_raw_body_and_a_canonical_one_are_compared_and_differ() -> None:
    # Both carry the scheme of the policy: else they would count as not comparable, and replay.
    one, other = json_print('{"a":1}'), json_print('{"a":1,"a":1}')
    assert one[:1] == other[:1] and one != other


@pytest.mark.parametrize("body", [b"\xff\xfe", b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16")])
def test_what_is_no_utf8_json_is_compared_byte_for_byte(body: bytes) -> None:
    assert json_print(body) == json_print(body) != json_print(b"{}")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_json_written_in_any_order_and_layout_is_equal(value: Any) -> None:
    def turned(each: Any) -> Any:
        if isinstance(each, dict):
            return {name: turned(inner) for name, inner in reversed(each.items())}
        return [turned(inner) for inner in each] if isinstance(each, list) else each

    assert json_print(json.dumps(value)) == json_print(
        json.dumps(turned(value), indent=1, ensure_ascii=True)
    )


@given(st.binary(max_size=200), st.text(max_size=30))
def test_a_json_fingerprint_never_raises(body: bytes, content_type: str) -> None:
    assert len(json_print(body, content_type)) == len(json_print(body)) == 16


# --- arguments ---------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Paint(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Word(StrEnum):
    ONE = "one"


class Right(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Order:
    id: str
    total: Decimal
    seen: int = field(default=0, compare=False)


@dataclass
class Refund:
    id: str
    total: Decimal


@attrs.define
class Item:
    name: str
    count: int


class Line(msgspec.Struct):
    name: str
    count: int


class Animal(pydantic.BaseModel):
    name: str


class Dog(Animal):
    breed: str


class Owner(pydantic.BaseModel):
    pet: Animal


class Email(str):
    __slots__ = ()


class Tagged(str):
    tag: str


class Account:
    def __init__(self, number: int, cache: object) -> None:
        self.number, self.cache = number, cache

    def __retrysafe_key__(self) -> int:
        return self.number


Point = namedtuple("Point", "x y")


def test_I83_true_1_1_0_and_the_text_1_are_four_keys() -> None:
    assert len({canonical(each) for each in (True, 1, 1.0, "1", b"1", Decimal(1), Level.LOW)}) == 7


DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 2**70, 0.0, 1.0, 0.1, float("inf"), float("nan"), "", "0", "None",
    b"", b"0", Decimal("1.1"), Decimal("1.10"), Decimal("NaN"), UUID(int=0), UUID(int=1),
    datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, fold=1),
    datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))), date(2026, 1, 1), time(0),
    time(1), time(0, tzinfo=UTC), timedelta(0), timedelta(microseconds=1), timedelta(days=-1),
    Colour.RED, Colour.BLUE, Paint.RED, Level.LOW, Word.ONE, "one", Right.READ,
    Right.READ | Right.WRITE, Right(0), Order("o", Decimal(1)), Order("p", Decimal(1)),
    Refund("o", Decimal(1)),
    Item("a", 1), Item("a", 2), Line("a", 1), Line("b", 1), Animal(name="a"),
    Dog(name="a", breed="b"), Owner(pet=Animal(name="a")),
    Owner(pet=Dog(name="a", breed="x")), Owner(pet=Dog(name="a", breed="y")),
    [], (), {}, set(), [[]], [()], ["a", "b"], ["b", "a"], ["ab"], ["a", ["b"]], [["a"], "b"],
    ("a", "b"), {"a": 1}, {"a": "1"}, {1: "a"}, {"1": "a"}, {"a": {"b": 1}}, {"a": 1, "b": 1},
    {"a", "b"},
    {"a"}, [None], [None, None], Account(1, None), Account(2, None), "\ud800", "\ufffd",
]  # fmt: skip


def test_different_values_have_different_encodings() -> None:
    seen: dict[bytes, Any] = {}
    for value in DIFFERENT:
        data = canonical(value)
        assert data not in seen, (value, seen[data])
        seen[data] = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),  # B040
        ({1, 2, 3}, {3, 2, 1}),
        ({"a", "b"}, frozenset({"b", "a"})),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (Email("a@b"), "a@b"),
        (Point(1, 2), (1, 2)),
        (bytearray(b"x"), b"x"),
        (Order("o", Decimal(1), seen=1), Order("o", Decimal(1), seen=2)),
        (Account(1, object()), Account(1, None)),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=timezone(timedelta(0)))),
    ],
)
def test_equal_values_have_one_encoding(one: Any, other: Any) -> None:
    assert canonical(one) == canonical(other)


def test_B041_the_order_of_a_list_counts() -> None:
    assert canonical({"steps": ["debit", "credit"]}) != canonical({"steps": ["credit", "debit"]})


def test_a_list_and_its_shared_members_are_no_cycle() -> None:
    shared = ["x"]
    assert canonical([shared, shared]) == canonical([["x"], ["x"]])


def test_O16_a_pydantic_subclass_in_a_field_is_not_cut_to_the_declared_type() -> None:
    dog = Owner(pet=Dog(name="a", breed="x"))
    assert dog.model_dump(warnings=False) == Owner(pet=Animal(name="a")).model_dump()
    assert canonical(dog) != canonical(Owner(pet=Animal(name="a")))


@pytest.mark.parametrize(
    "value",
    [object(), len, Order, lambda: 1, 1j, iter([]), range(3), re.compile("a"), memoryview(b"")],
)
def test_another_type_is_refused_by_name(value: object) -> None:
    with pytest.raises(NotEncodable, match=type(value).__qualname__) as caught:
        canonical([{"deep": value}])
    assert "__retrysafe_key__" in str(caught.value)


def test_a_subclass_with_more_than_its_builtin_is_refused() -> None:
    value = Tagged("a")
    value.tag = "tenant-1"
    with pytest.raises(NotEncodable, match="holds more than its str"):
        canonical(value)


def test_a_cycle_and_extreme_depth_are_refused_not_a_recursion_error() -> None:
    cycle: list[Any] = []
    cycle.append({"a": cycle})
    with pytest.raises(NotEncodable, match="contains itself"):
        canonical(cycle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotEncodable, match="nested"):
        canonical(deep)


def test_a_huge_integer_is_encoded_whole() -> None:
    assert canonical(10**6000) != canonical(10**6000 + 1)


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
    | st.binary(max_size=4) | st.decimals(allow_nan=False, places=2) | st.dates(),
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(ARGUMENTS, ARGUMENTS)
def test_encodings_are_equal_only_for_equal_values(one: Any, other: Any) -> None:
    if canonical(one) == canonical(other):
        assert one == other


def test_two_instances_of_one_model_are_equal_by_value() -> None:
    ident = uuid4()
    assert canonical([ident, Dog(name="a", breed="b")]) == canonical(
        [UUID(str(ident)), Dog(breed="b", name="a")]
    )
