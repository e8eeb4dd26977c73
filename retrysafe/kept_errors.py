"""Exceptions that are results: recorded, and raised again on replay as their own type.

Stored are the type's name, its arguments and its attributes. The type is looked up among those
that were named, never imported by its name, and nothing is pickled.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from retrysafe.errors import NotEncodable, RetrySafeError
from retrysafe.sameness import Sameness

TAG = b"e"

# What arguments and attributes of an exception may hold besides None, bool, int, float, str, bytes.
_TEXT: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    Decimal: ("decimal", str, Decimal),
    uuid.UUID: ("uuid", str, uuid.UUID),
    datetime.datetime: ("datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.isoformat, datetime.time.fromisoformat),
}
_READ = {name: read for name, _, read in _TEXT.values()}
_MANY: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAKE: dict[str, Callable[[Any], Any]] = {name: kind for kind, name in _MANY.items()}


class KeptErrors:
    """The exceptions a function is allowed to keep.

    Raises TypeError where one is no subclass of Exception.
    """

    def __init__(self, kinds: Any = ()) -> None:
        kinds = (kinds,) if isinstance(kinds, type) else tuple(kinds)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(
                    f"keep_errors takes subclasses of Exception, not {kind!r}: what interrupts a "
                    "call is not its result"
                )
        self._kinds: tuple[type[Exception], ...] = kinds

    def wants(self, error: Exception) -> bool:
        """Whether this error is a result. The library's own (in flight, store unavailable …) are
        kept only where one of them is named: they say that a call did not run."""
        kinds = self._kinds
        if isinstance(error, RetrySafeError):
            kinds = tuple(kind for kind in kinds if issubclass(kind, RetrySafeError))
        return isinstance(error, kinds)

    def pack(self, error: Exception) -> bytes:
        """The stored form. Raises NotEncodable where the error can't be rebuilt the same."""
        try:
            tree = [_name(type(error)), _plain(_arguments(error)), _plain(vars(error))]
            data = TAG + msgspec.msgpack.encode(tree)
            back = self.unpack(data)
        except NotEncodable:
            raise
        except Exception as failure:  # constructors of users' errors run in here
            raise NotEncodable(
                f"{type(error).__qualname__} can't be kept ({type(failure).__name__})"
            ) from None
        comparison = Sameness()
        # Exception's own text is the repr of its arguments; one of its own may say more.
        own_text = type(error).__str__ is not BaseException.__str__
        if not comparison.same(error.args, back.args) or (own_text and str(error) != str(back)):
            raise NotEncodable(f"{type(error).__qualname__} can't be rebuilt from its arguments")
        return data

    def unpack(self, data: bytes) -> Exception:
        """The error again. Raises NotEncodable where it can't be built."""
        try:
            name, args, attributes = msgspec.msgpack.decode(data[1:])
            kind, given, held = self._kind(name), _value(args), _value(attributes)
            if type(given) is not tuple or type(held) is not dict or not _are_names(held):
                raise TypeError("no arguments and attributes")
            error = _build(kind, given)
            error.__dict__.update(held)
        except Exception as failure:  # its text, and that of what it came from, may quote a value
            raise NotEncodable(
                f"a kept error can't be built again ({type(failure).__name__})"
            ) from None
        return error

    def _kind(self, name: str) -> type[Exception]:
        for kind in _with_subclasses(self._kinds):
            if _name(kind) == name:
                return kind
        raise LookupError(f"{name} is not among keep_errors")


def _arguments(error: Exception) -> tuple[Any, ...]:
    if isinstance(error, OSError) and error.filename is not None and len(error.args) == 2:
        # OSError takes its file names out of `args`.
        second = (None, error.filename2) if error.filename2 is not None else ()
        return (*error.args, error.filename, *second)
    return error.args


def _build(kind: type[Exception], args: tuple[Any, ...]) -> Exception:
    try:
        error = kind(*args)
        if isinstance(error, OSError) or error.args == args:
            return error
    except TypeError:
        pass  # its constructor takes something else than it hands to Exception
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def _are_names(attributes: dict[Any, Any]) -> bool:
    return all(type(name) is str for name in attributes)


def _with_subclasses(kinds: tuple[type[Exception], ...]) -> Iterator[type[Exception]]:
    for kind in kinds:
        yield kind
        yield from _with_subclasses(tuple(kind.__subclasses__()))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: Any) -> Any:
    """A tree that msgpack can say, with types by name where it can't."""
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else ["int", str(value)]
    if kind in _TEXT:
        name, write, _ = _TEXT[kind]
        return [name, write(value)]
    if kind in _MANY:
        return [_MANY[kind], [_plain(each) for each in value]]
    if kind is dict:
        return ["dict", [[_plain(key), _plain(each)] for key, each in value.items()]]
    raise NotEncodable(f"an error that holds a {kind.__qualname__} can't be kept")


def _value(tree: Any) -> Any:
    if not isinstance(tree, list):
        return tree
    name, inner = tree
    if name in _READ:
        return _READ[name](inner)
    if name == "int":
        return int(inner)
    if name == "dict":
        return {_value(key): _value(each) for key, each in inner}
    return _MAKE[name](_value(each) for each in inner)
