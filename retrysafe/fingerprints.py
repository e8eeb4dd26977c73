"""Fingerprints: what tells one payload from another under the same key.

Always 16 bytes: the first names the scheme (so that two schemes are never compared), the rest is
a digest. A fingerprint is compared, never read back.
"""

from __future__ import annotations

import json
from decimal import Decimal
from hashlib import blake2b
from typing import Any

__all__ = ["NO_FINGERPRINT", "RequestFingerprint", "fingerprint", "json_fingerprint"]

FINGERPRINT_SIZE = 16
NO_FINGERPRINT = b"n" + bytes(FINGERPRINT_SIZE - 1)

MAX_JSON_DEPTH = 100
MAX_SAFE_INTEGER = 2**53
# The longest number a double can be written as without loss is 17 digits, point, sign, exponent.
_MAX_NUMBER_LENGTH = 40
_SCHEMES = frozenset("bjca")
_PRINTS = blake2b(digest_size=FINGERPRINT_SIZE - 1, person=b"retrysafe-print")


def fingerprint(scheme: str, *parts: bytes) -> bytes:
    """The fingerprint of `parts`, in order. Parts are length-prefixed: no two lists of them meet.

    `scheme`: `body`, `json`, `callable` or `arguments`, or its first letter.
    """
    hasher = _hasher(scheme)
    for part in parts:
        _feed(hasher, part)
    return scheme[:1].encode() + hasher.digest()


class RequestFingerprint:
    """The fingerprint of a request whose body comes in pieces (scheme `body`).

    Where the pieces are cut makes no difference. `path` and `query` count byte for byte as the
    client sent them: nothing is normalised. Content-Encoding counts: the compressed and the plain
    form of a body are different payloads.
    """

    __slots__ = ("_hasher",)

    def __init__(
        self, method: str, path: bytes, query: bytes, content_encoding: bytes = b""
    ) -> None:
        verb, coding = method.encode("latin-1", "replace"), _coding(content_encoding)
        self._hasher = _PRINTS.copy()
        self._hasher.update(
            b"%d:%b%d:%b%d:%b%d:%b"
            % (len(verb), verb, len(path), path, len(query), query, len(coding), coding)
        )

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add the next piece of the body."""
        self._hasher.update(chunk)

    def finish(self) -> bytes:
        """The fingerprint of what was added so far."""
        return b"b" + self._hasher.digest()


def json_fingerprint(
    method: str, path: bytes, query: bytes, encoding: bytes, body: bytes, content_type: str
) -> bytes:
    """The fingerprint of a request by its JSON value (scheme `json`); never raises.

    The order of members and the whitespace make no difference; the order of lists does, and so do
    `1`, `1.0` and `"1"`. Two bodies are equal only if their values are: a body that parsers may
    read differently (repeated members, integers over 2**53, numbers that a double can't hold, lone
    surrogates, nesting over 100) or that is no JSON (by its type, its encoding or its text) is
    compared byte for byte. Parses in the calling thread: some 60 ms a MiB.
    """
    coding = _coding(encoding)
    value = None
    if coding in (b"", b"identity") and _is_json(content_type):
        value = _canonical_json(body)
    # Both forms carry one scheme byte: a raw body and a canonical one must be compared, and differ.
    form = (b"raw", body) if value is None else (b"json", value)
    return fingerprint("json", method.encode("latin-1", "replace"), path, query, coding, *form)


def _hasher(scheme: str) -> blake2b:
    if scheme[:1] not in _SCHEMES:
        raise ValueError(f"{scheme!r} is no scheme; take body, json, callable or arguments")
    return _PRINTS.copy()


def _feed(hasher: blake2b, part: bytes) -> None:
    hasher.update(b"%d:" % len(part))
    hasher.update(part)


def _coding(content_encoding: bytes) -> bytes:
    return content_encoding.strip(b" \t").lower()


def _is_json(content_type: str) -> bool:
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charset = [each for each in parameters if each.startswith("charset")]
    if any(each.replace('"', "") not in ("charset=utf-8", "charset=utf8") for each in charset):
        return False
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


class _Unsafe(ValueError):
    """JSON whose value depends on who reads it."""


def _canonical_json(body: bytes) -> bytes | None:
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_members,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_constant,
        )
        if _deeper_than(value, MAX_JSON_DEPTH):
            return None
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-8")
    except (ValueError, RecursionError):  # _Unsafe, bad JSON, bad UTF-8, lone surrogates
        return None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _Unsafe("a member is repeated")
    return members


def _integer(text: str) -> int:
    if len(text) > _MAX_NUMBER_LENGTH or abs(number := int(text)) > MAX_SAFE_INTEGER:
        raise _Unsafe("an integer over 2**53")
    return -number if text.startswith("-") else number


def _number(text: str) -> float:
    if len(text) > _MAX_NUMBER_LENGTH:
        raise _Unsafe("a number with more digits than a double holds")
    number = float(text)
    try:
        same = Decimal(text) == Decimal(repr(number))
    except ArithmeticError:
        same = False
    if not same:
        raise _Unsafe("a number that a double can't hold")
    return number


def _constant(text: str) -> Any:
    raise _Unsafe(f"{text} is no JSON")


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
