"""One encoding of function arguments: the same value gives the same bytes, another never does.

Every item carries its type and its length, so `True`, `1`, `1.0`, `"1"` and `[1]`, `(1,)` are all
different, and no two structures run into each other. It is only hashed, never decoded.

What counts as the same: members of a dict and of a set in any order; a subclass of a builtin
without state of its own (`Email(str)`, a named tuple) and its builtin. What doesn't:
`Decimal("1.10")` and `Decimal("1.1")` (the digits are part of the value), one instant in two
zones. Fields that a dataclass or an attrs class leaves out of its comparison are left out. A class
is known by its module and name: one that moves starts a new key space.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from retrysafe.errors import NotEncodable

__all__ = ["canonical"]

MAX_DEPTH = 100


def canonical(value: object) -> bytes:
    """The canonical bytes of `value`.

    Takes None, bool, int, float, str, bytes, Decimal, UUID, datetime, date, time, timedelta, Enum
    members, dataclasses, msgspec Structs, attrs classes, pydantic models, lists, tuples, sets and
    dicts of these, and any object with `__retrysafe_key__()` (which returns one of these).
    Raises NotEncodable, naming the type, for anything else, for cycles and for nesting over 100.
    """
    try:
        return _encode(value, ())
    except RecursionError:
        raise NotEncodable("a value is nested too deep to be part of a key") from None


def _encode(value: Any, above: tuple[int, ...]) -> bytes:
    kind = type(value)
    simple = _SIMPLE.get(kind)
    if simple is not None:
        tag, write = simple
        return _item(tag, write(value))
    if id(value) in above:
        raise NotEncodable(f"a {_name(kind)} contains itself: it can't be part of a key")
    if len(above) >= MAX_DEPTH:
        raise NotEncodable(f"a value is nested deeper than {MAX_DEPTH}: it can't be part of a key")
    inside = (*above, id(value))
    if hasattr(kind, "__retrysafe_key__"):
        return _object(b"K", kind, _encode(value.__retrysafe_key__(), inside))
    if isinstance(value, Enum):
        return _object(b"E", kind, _encode(_member(value), inside))
    fields = _fields(value)
    if fields is not None:
        return _object(b"O", kind, _pairs(fields, inside))
    for base, (tag, write) in _SIMPLE.items():
        if isinstance(value, base):
            _refuse_extra_state(value, base)
            return _item(tag, write(value))
    return _container(value, inside)


def _container(value: Any, inside: tuple[int, ...]) -> bytes:
    for base in (list, tuple, set, frozenset, dict):
        if isinstance(value, base):
            _refuse_extra_state(value, base)
    if isinstance(value, dict):
        return _item(b"m", _pairs(value.items(), inside))
    if isinstance(value, list | tuple):
        tag = b"l" if isinstance(value, list) else b"u"
        return _item(tag, b"".join(_encode(each, inside) for each in value))
    if isinstance(value, set | frozenset):
        return _item(b"x", b"".join(sorted(_encode(each, inside) for each in value)))
    raise NotEncodable(
        f"a value of type {_name(type(value))} can't be part of a key or fingerprint: give the "
        "class a method __retrysafe_key__() that returns what identifies it, or name other "
        "arguments with key="
    )


def _item(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def _object(tag: bytes, kind: type, data: bytes) -> bytes:
    return _item(tag, _item(b"c", _name(kind).encode()) + data)


def _pairs(pairs: Iterable[tuple[Any, Any]], inside: tuple[int, ...]) -> bytes:
    return b"".join(
        key + data
        for key, data in sorted((_encode(k, inside), _encode(v, inside)) for k, v in pairs)
    )


def _name(kind: type) -> str:
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _member(value: Enum) -> str | int:
    # A combination of flags has no one name; its number is its value.
    name = value._name_
    return name if name in type(value).__members__ else int(value.value)


def _fields(value: Any) -> Iterable[tuple[str, Any]] | None:
    """The named values of a structured object, None for any other object."""
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind) if each.compare]
    elif isinstance(attributes := getattr(kind, "__attrs_attrs__", None), tuple):
        names = [each.name for each in attributes if each.eq]
    elif isinstance(structure := getattr(kind, "__struct_fields__", None), tuple):
        names = list(structure)
    elif isinstance(getattr(kind, "model_fields", None), Mapping) and hasattr(kind, "__iter__"):
        # Not model_dump(): it writes a subclass's value as its declared type, without the rest.
        return list(value)
    elif callable(getattr(kind, "model_dump", None)):
        dumped: dict[str, Any] = value.model_dump()
        return dumped.items()
    else:
        return None
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _refuse_extra_state(value: Any, base: type) -> None:
    kind = type(value)
    own = kind.__mro__[: kind.__mro__.index(base)]
    slots = (each.__dict__.get("__slots__", ()) for each in own)
    if kind is not base and (getattr(value, "__dict__", None) or any(slots)):
        raise NotEncodable(
            f"a value of type {_name(kind)} holds more than its {base.__name__}: give the class a "
            "method __retrysafe_key__() that returns what identifies it"
        )


def _text(value: str) -> bytes:
    return str.encode(value, "utf-8", "surrogatepass")


def _integer(value: int) -> bytes:
    return b"%x" % value  # hex: decimal text of a huge integer is slow, and limited


def _moment(value: datetime | time) -> bytes:
    return value.isoformat().encode() + (b"/1" if value.fold else b"")


# By exact type first; subclasses in this order: bool before int, datetime before date.
_SIMPLE: dict[type, tuple[bytes, Callable[[Any], bytes]]] = {
    type(None): (b"n", lambda value: b""),
    bool: (b"t", lambda value: b"1" if value else b"0"),
    int: (b"i", _integer),
    float: (b"f", lambda value: float.__repr__(value).encode()),
    str: (b"s", _text),
    bytes: (b"b", bytes),
    bytearray: (b"b", bytes),
    Decimal: (b"d", lambda value: str(value).encode()),
    UUID: (b"U", lambda value: value.bytes),
    datetime: (b"D", _moment),
    date: (b"y", lambda value: value.isoformat().encode()),
    time: (b"h", _moment),
    timedelta: (b"e", lambda value: b"%d" % (value // timedelta(microseconds=1))),
}
