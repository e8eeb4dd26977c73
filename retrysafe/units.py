"""Durations and sizes: how they are written in the environment, what they may be in code."""

from __future__ import annotations

import math
import re

__all__ = [
    "DURATION_FORMS",
    "LONGEST",
    "SIZE_FORMS",
    "check_duration",
    "check_integer",
    "format_duration",
    "parse_duration",
    "parse_integer",
    "parse_size",
]

DURATION_FORMS = "250ms, 30s, 15m, 24h, 7d"
SIZE_FORMS = "512KiB, 10MiB, 1GiB, or a number of bytes"

# Stores count in integer milliseconds and microseconds: neither end may round away or overflow.
SHORTEST = 0.001
LONGEST = 3650 * 86400.0

_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)"
_DURATION = re.compile(_NUMBER + r"(ms|s|m|h|d)?", re.ASCII)
_SIZE = re.compile(_NUMBER + r"(B|kB|KB|MB|GB|KiB|MiB|GiB)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}


def parse_duration(text: str) -> float:
    """Seconds from `250ms`, `30s`, `15m`, `24h`, `7d`, `1.5h`; a bare number is seconds.

    Raises ValueError for anything else.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"no duration such as {DURATION_FORMS}")
    number, unit = match.groups()
    if unit == "ms":
        return float(number) / 1000  # dividing is exact where multiplying by 0.001 is not
    return float(number) * _SECONDS[unit or "s"]


def format_duration(seconds: float) -> str:
    """The shortest way to write a duration that `parse_duration` reads back."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.15g}{unit}"
    return f"{seconds:.15g}s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.12g}ms"


def parse_size(text: str) -> int:
    """Bytes from `10MiB`, `512KiB`, `1GiB`, `10MB` (10**6) or a bare number of bytes.

    Raises ValueError for anything else, fractions of a byte among them.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"no size such as {SIZE_FORMS}")
    number, unit = match.groups()
    size = (
        float(number) * _BYTES[unit or "B"] if "." in number else int(number) * _BYTES[unit or "B"]
    )
    if size != int(size):
        raise ValueError("no whole number of bytes")
    return int(size)


def parse_integer(text: str) -> int:
    """A whole number in decimal digits. Raises ValueError for anything else."""
    if not re.fullmatch(r"\d{1,18}", text.strip(), re.ASCII):
        raise ValueError("no whole number")
    return int(text)


def check_duration(value: object, *, zero: bool = False) -> float:
    """`value` as seconds. Raises ValueError for what no duration can be: a bool, NaN, an infinity,
    a negative one, less than a millisecond (0 only where `zero` says so), more than 3650 days."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("no number of seconds")
    seconds = float(value) if abs(value) < 1e300 or value != value else math.inf
    if not math.isfinite(seconds):
        raise ValueError("not finite")
    if seconds < 0:
        raise ValueError("negative")
    if seconds == 0 and zero:
        return 0.0
    if seconds < SHORTEST:
        raise ValueError("shorter than 1ms")
    if seconds > LONGEST:
        raise ValueError("longer than 3650d")
    return seconds


def check_integer(value: object, low: int) -> int:
    """`value`, a whole number of at least `low`. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("no whole number")
    if value < low:
        raise ValueError(f"less than {low}")
    return value
