"""Delays: the formula of each strategy, its band, its cap, what it refuses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrysafe.backoff import (
    Backoff,
    EqualJitter,
    Exponential,
    Fixed,
    FullJitter,
    Immediate,
    Incremental,
    parse_backoff,
)

LOW, HIGH = (lambda: 0.0), (lambda: math.nextafter(1.0, 0.0))
CAPPED: list[Callable[[float, float], Backoff]] = [
    Incremental,
    Exponential,
    FullJitter,
    EqualJitter,
    lambda base, cap: EqualJitter(base, cap, above=True),
]


def delays(strategy: Backoff, count: int, rng: Callable[[], float] = LOW) -> list[float]:
    return [strategy.delay(n, rng) for n in range(1, count + 1)]


def test_fixed_waits_the_same_each_time() -> None:
    assert delays(Fixed(3), 4) == [3, 3, 3, 3]


def test_incremental_begins_with_none_and_grows_by_d() -> None:
    assert delays(Incremental(3), 6) == [0, 3, 6, 9, 12, 15]


def test_exponential_doubles_up_to_its_cap() -> None:
    assert delays(Exponential(1), 6) == [1, 2, 4, 8, 16, 32]
    assert delays(Exponential(0.1, cap=1), 5) == [0.1, 0.2, 0.4, 0.8, 1]


def test_C46_full_jitter_is_between_none_and_the_exponential() -> None:
    assert delays(FullJitter(1), 3, LOW) == [0, 0, 0]
    assert delays(FullJitter(1), 3, HIGH) == pytest.approx([1, 2, 4])


def test_C46_equal_jitter_is_in_the_upper_half_of_the_exponential() -> None:
    assert delays(EqualJitter(1), 3, LOW) == [0.5, 1, 2]
    assert delays(EqualJitter(1), 3, HIGH) == pytest.approx([1, 2, 4])


def test_C46_equal_jitter_above_is_the_exponential_and_up_to_as_much_again() -> None:
    assert delays(EqualJitter(1, above=True), 3, LOW) == [1, 2, 4]
    assert delays(EqualJitter(1, above=True), 3, HIGH) == pytest.approx([2, 4, 8])
    assert delays(EqualJitter(1, cap=4, above=True), 4, HIGH) == pytest.approx([2, 4, 4, 4])


@pytest.mark.parametrize(
    ("strategy", "low"),
    [
        (FullJitter(0.1, 10), 0.0),
        (EqualJitter(0.1, 10), 5.0),
        (EqualJitter(0.1, 10, above=True), 5.0),
    ],
)
def test_C45_at_the_cap_delays_still_differ(strategy: Backoff, low: float) -> None:
    rng = random.Random(7).random
    drawn = {strategy.delay(40, rng) for _ in range(300)}
    assert len(drawn) == 300
    assert all(low <= each <= 10 for each in drawn)


@pytest.mark.parametrize("make", CAPPED)
@pytest.mark.parametrize(("base", "cap"), [(0.1, 5.0), (1e300, 1e300), (5e-324, 5.0), (1, 1e300)])
@pytest.mark.parametrize("n", [1, 2, 1025, 5000, 10**6, 2**1000])
def test_C44_B097_no_attempt_overflows(
    make: Callable[[float, float], Backoff], base: float, cap: float, n: int
) -> None:
    for rng in (LOW, HIGH):
        assert 0 <= make(base, cap).delay(n, rng) <= cap


@given(
    st.sampled_from(CAPPED),
    st.floats(1e-300, 1e300),
    st.floats(1e-300, 1e300),
    st.integers(1, 2**1100),
    st.floats(0, 1, exclude_max=True),
)
def test_every_delay_is_between_none_and_the_cap(
    make: Callable[[float, float], Backoff], one: float, other: float, n: int, draw: float
) -> None:
    base, cap = sorted((one, other))
    assert 0 <= make(base, cap).delay(n, lambda: draw) <= cap


def test_B097_twenty_thousand_delays_stay_in_the_band_once_the_cap_is_reached() -> None:
    drawn = delays(EqualJitter(0.1, 5), 20_000, random.Random(3).random)
    assert all(2.5 <= each <= 5 for each in drawn[7:])


def test_C60_immediate_is_none_once_and_then_another_strategy_takes_over() -> None:
    assert delays(Immediate(Exponential(1)), 4) == [0, 1, 2, 4]
    assert delays(Immediate(Incremental(3)), 4) == [0, 3, 6, 9]


@pytest.mark.parametrize("then", [Immediate(Fixed(1)), None, 3, Fixed])
def test_C60_immediate_without_another_strategy_is_refused(then: Any) -> None:
    with pytest.raises(ValueError, match=r"Immediate\.then"):
        Immediate(then)


@pytest.mark.parametrize("value", [True, 0, -1, -0.5, math.nan, math.inf, "1", None, 10**400])
@pytest.mark.parametrize(
    ("field", "make"),
    [
        (r"Fixed\.d", Fixed),
        (r"Incremental\.d", Incremental),
        (r"Exponential\.base", Exponential),
        (r"FullJitter\.base", FullJitter),
        (r"EqualJitter\.base", EqualJitter),
        (r"FullJitter\.cap", lambda value: FullJitter(0.1, value)),
    ],
)
def test_C47_what_is_no_duration_is_refused_by_name(
    field: str, make: Callable[[Any], Backoff], value: Any
) -> None:
    with pytest.raises(ValueError, match=field):
        make(value)


def test_a_cap_below_the_first_delay_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FullJitter\.cap"):
        FullJitter(5, cap=1)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("fixed:400ms", Fixed(0.4)),
        ("incremental:1s..30s", Incremental(1, 30)),
        ("exponential:100ms..10s", Exponential(0.1, 10)),
        ("full-jitter:100ms..1m", FullJitter(0.1, 60)),
        ("equal-jitter:1s..1h", EqualJitter(1, 3600)),
        ("immediate+fixed:1d", Immediate(Fixed(86400))),
    ],
)
def test_the_written_form_becomes_its_strategy(text: str, strategy: Backoff) -> None:
    assert parse_backoff(text) == strategy


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0s", "random:1s..2s", "exponential:1s"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_backoff(text)
