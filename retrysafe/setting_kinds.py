"""The kinds of settings: what each takes, in words; how its text is read; what its value may be.

`check` returns the value in its final form and raises ValueError with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from retrysafe import units
from retrysafe.encryption_keys import KEYS_FORM, EncryptionKeys
from retrysafe.urls import URL_FORMS, check_store_url

BACKOFF_FORMS = (
    "fixed:400ms, or one of incremental, exponential, full-jitter, equal-jitter with "
    "<first>..<cap>, such as full-jitter:100ms..10s; each optionally after immediate+"
)
_RANGED = ("incremental", "exponential", "full-jitter", "equal-jitter")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}", re.ASCII)  # RFC 9110, 5.6.2
_NAMESPACE = re.compile(r"[A-Za-z0-9._:/-]{1,64}", re.ASCII)
_SWITCH = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


@dataclass(frozen=True, slots=True)
class BackoffSpec:
    """A parsed `RETRY_BACKOFF`: `first` and `cap` are seconds, `cap` is None for `fixed`;
    `immediate` says that the first retry doesn't wait."""

    kind: str
    first: float
    cap: float | None
    immediate: bool


def parse_backoff(text: str) -> BackoffSpec:
    """Read the grammar of `RETRY_BACKOFF`. Raises ValueError with the reason."""
    immediate = text.startswith("immediate+")
    kind, colon, numbers = text.removeprefix("immediate+").partition(":")
    if not colon or kind not in ("fixed", *_RANGED):
        raise ValueError("no known strategy")
    first_text, dots, cap_text = numbers.partition("..")
    if bool(dots) != (kind in _RANGED):
        raise ValueError("without <first>..<cap>" if kind in _RANGED else "with a cap")
    first = units.check_duration(units.parse_duration(first_text))
    cap = units.check_duration(units.parse_duration(cap_text)) if dots else None
    if cap is not None and cap < first:
        raise ValueError("capped below its first delay")
    return BackoffSpec(kind, first, cap, immediate)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting takes: in words, from text, and as a value. `in_code`: the words for a value
    in code, where they differ. `secret`: its value is never shown."""

    takes: str
    parse: Callable[[str], Any]
    check: Callable[[Any], Any]
    in_code: str = ""
    secret: bool = False


def text_kind(takes: str, check: Callable[[Any], Any]) -> Kind:
    """A setting whose value is its text."""
    return Kind(takes, str.strip, check)


def count(low: int) -> Kind:
    """A whole number of at least `low`."""
    return Kind(
        f"a whole number of at least {low}",
        units.parse_integer,
        lambda value: units.check_integer(value, low),
    )


def choice(*words: str, function: bool = False) -> Kind:
    """One of `words`; in code also a callable where `function` says so."""

    def check(value: Any) -> Any:
        if (isinstance(value, str) and value in words) or (function and callable(value)):
            return value
        raise ValueError("neither")

    return text_kind(" or ".join(words) + (" (in code also a callable)" if function else ""), check)


def _check_switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("neither")
    return value


def _parse_switch(text: str) -> bool:
    try:
        return _SWITCH[text.strip().lower()]
    except KeyError:
        raise ValueError("neither") from None


def _check_matching(pattern: re.Pattern[str]) -> Callable[[Any], Any]:
    def check(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError("of another form")
        return value

    return check


def _check_methods(value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("no collection of method names")
    methods = list(value)
    if not methods or not all(isinstance(m, str) and _TOKEN.fullmatch(m) for m in methods):
        raise ValueError("no list of method names")
    return frozenset(method.upper() for method in methods)


def _check_rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError("no share")
    return float(value)


def _parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("no number") from None


def _check_keys(value: Any) -> EncryptionKeys | None:
    if value is None or isinstance(value, EncryptionKeys):
        return value
    if not isinstance(value, str):
        raise ValueError("no text")
    return EncryptionKeys(value)


def _check_backoff(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    parse_backoff(value)
    return value


DURATION = Kind(
    f"a duration such as {units.DURATION_FORMS}",
    units.parse_duration,
    units.check_duration,
    in_code="seconds, a number over 0",
)
WAIT = Kind(
    f"a duration such as {units.DURATION_FORMS}, or 0 to answer at once",
    units.parse_duration,
    lambda value: units.check_duration(value, zero=True),
    in_code="seconds, or 0 to answer at once",
)
SIZE = Kind(
    f"a size such as {units.SIZE_FORMS}",
    units.parse_size,
    lambda value: units.check_integer(value, 1),
    in_code="a number of bytes, at least 1",
)
URL = text_kind(URL_FORMS, lambda value: None if value is None else check_store_url(value))
SWITCH = Kind("true or false", _parse_switch, _check_switch, in_code="True or False")
HEADER = text_kind("the name of a header, such as X-Request-ID", _check_matching(_TOKEN))
NAMESPACE = text_kind(
    "1-64 letters, digits and . _ : / - (braces would break Redis Cluster)",
    _check_matching(_NAMESPACE),
)
METHODS = Kind(
    "method names with commas between, such as POST,PATCH",
    lambda text: [method.strip() for method in text.split(",")],
    _check_methods,
    in_code='method names, such as {"POST", "PATCH"}',
)
RATE = Kind("a share over 0 and up to 1, such as 0.5", _parse_rate, _check_rate)


ENCRYPTION_KEYS = Kind(KEYS_FORM, str.strip, _check_keys, secret=True)
BACKOFF = text_kind(BACKOFF_FORMS, _check_backoff)

ABANDONED = choice("rerun", "refuse", function=True)
STORE_ERROR = choice("refuse", "run")
LEASE_LOST = choice("continue", "cancel")
FINGERPRINT = choice("body", "json", "none", function=True)
TTL = Kind(
    f"{DURATION.takes}, or a callable of the status that returns seconds",
    DURATION.parse,
    lambda value: value if callable(value) else DURATION.check(value),
    in_code=f"{DURATION.in_code}, or a callable of the status that returns them",
)


def function(takes: str) -> Kind:
    """A callable; in code only."""

    def check(value: Any) -> Any:
        if not callable(value):
            raise ValueError("not callable")
        return value

    return text_kind(takes, check)
