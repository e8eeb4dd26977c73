"""Codecs: whatever they keep comes back as it was."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.codec import NO_ANNOTATION, codec_for, custom_codec
from retrysafe.errors import NotEncodable
from retrysafe.kept_errors import KeptErrors
from retrysafe.sameness import Sameness


def same(a: Any, b: Any) -> bool:
    return Sameness().same(a, b)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_like)
def test_a_json_like_value_comes_back_as_itself_or_is_refused(value: Any) -> None:
    codec = codec_for(NO_ANNOTATION)
    try:
        data, answer = codec.pack(value)
    except NotEncodable:
        # Nothing says both at once: msgpack no integer over 64 bits, JSON no NaN.
        assert "1" in repr(value) or any(c in repr(value) for c in ("nan", "inf", "\\u"))
        return
    assert answer is value
    assert same(value, codec.unpack(data))


@dataclasses.dataclass
class Everything:
    number: Decimal
    moment: dt.datetime
    parts: list[tuple[int, bytes]]
    names: dict[int, str | None]
    ratio: float


everything = st.builds(
    Everything,
    number=st.decimals(),
    moment=st.datetimes(timezones=st.none() | st.just(dt.UTC)),
    parts=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.binary())),
    names=st.dictionaries(st.integers(-(2**63), 2**63 - 1), st.none() | st.text()),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
)


@given(everything)
def test_a_typed_value_comes_back_as_itself_or_is_refused(value: Everything) -> None:
    codec = codec_for(Everything)
    try:
        data, _ = codec.pack(value)
    except NotEncodable:
        assert value.number.is_nan() or value.moment.fold
        return
    assert same(value, codec.unpack(data))


@given(st.lists(json_like), st.sampled_from([list[int], str, float, dict[str, int], bytes, None]))
def test_a_value_that_breaks_its_annotation_is_refused_or_read_back_the_same(
    value: Any, annotation: Any
) -> None:
    codec = codec_for(annotation)
    try:
        data, answer = codec.pack(value)
    except NotEncodable:
        return
    assert same(answer, codec.unpack(data))


@pytest.mark.parametrize("data", [b"", b"m", b"x123", b"m\xc1", b"j{", b"u", b"u\x05x", b"p{}"])
@pytest.mark.parametrize("annotation", [NO_ANNOTATION, int, Everything, str | dt.date])
def test_bytes_that_are_no_result_are_refused(annotation: Any, data: bytes) -> None:
    with pytest.raises(NotEncodable):
        codec_for(annotation).unpack(data)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NotEncodable):
        codec_for(NO_ANNOTATION).pack(value)
    with pytest.raises(NotEncodable):
        codec_for(list[Any]).pack(value)


def test_the_reason_never_quotes_the_value() -> None:
    with pytest.raises(NotEncodable) as caught:
        codec_for(int).pack("secret")
    assert "secret" not in str(caught.value)


def test_a_codec_of_ones_own_has_two_methods() -> None:
    with pytest.raises(TypeError, match="encode"):
        custom_codec(object())  # type: ignore[arg-type]


def test_pydantic_is_not_imported_for_programs_without_it() -> None:
    script = (
        "import sys, retrysafe.codec as c; c.codec_for(dict[str, int]).pack({'a': 1});"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1.0, 1),
        ("1", 1),
        ((1,), [1]),
        (Decimal("1.10"), Decimal("1.1")),
        ({1}, {True}),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        (
            dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC),
            dt.datetime(2026, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=1))),
        ),
    ],
)
def test_what_is_equal_is_not_yet_the_same(a: Any, b: Any) -> None:
    assert not same(a, b)


def test_what_is_not_equal_to_itself_may_be_the_same() -> None:
    assert same([math.nan, Decimal("NaN")], [math.nan, Decimal("NaN")])


def test_an_int_that_came_back_as_a_float_is_noted() -> None:
    comparison = Sameness()
    assert comparison.same([1, {"a": 2}], [1.0, {"a": 2}])
    assert comparison.widened
    assert Sameness().same({1, 2}, {1.0, 2.0})


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Careless(Exception):
    def __init__(self, first: int) -> None:
        raise ValueError(first)


def test_errors_are_rebuilt_by_their_constructor_where_that_works() -> None:
    kept = KeptErrors((Slotted,))
    back = kept.unpack(kept.pack(Slotted(5)))
    assert isinstance(back, Slotted)
    assert back.code == 5


def test_an_error_whose_constructor_raises_is_refused() -> None:
    error = Careless.__new__(Careless, 1)
    with pytest.raises(NotEncodable):
        KeptErrors(Careless).pack(error)


def test_bytes_that_are_no_error_are_refused() -> None:
    for data in (b"e", b"e\xc1", b"e\x93\xa1x\x90\x90", b"e\xc0"):
        with pytest.raises(NotEncodable):
            KeptErrors(Slotted).unpack(data)
