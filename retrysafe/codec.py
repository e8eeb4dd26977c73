"""Results as bytes: typed by the annotation, exact, without pickle.

A stored result starts with one byte that says how it was written: `m` msgpack, `j` JSON,
`p` pydantic's JSON, `u` one arm of a union (then the arm's number and its own bytes), `c` a codec
of the user's. What is written is read back at once and compared: a result that would come back as
anything else than it was is not kept, in place of being changed in silence.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import msgspec

from retrysafe.errors import NotEncodable
from retrysafe.sameness import Sameness

NO_ANNOTATION: Any = object()
_NEVER = (typing.NoReturn, typing.Never)


class Codec(Protocol):
    """How a user stores results of their own: `codec=`. Both may raise anything."""

    def encode(self, value: Any, /) -> bytes: ...

    def decode(self, data: bytes, /) -> Any: ...


class ResultCodec(Protocol):
    """How results of one function are stored."""

    def pack(self, value: Any) -> tuple[bytes, Any]:
        """The stored form, and the value to answer the first caller with: the same one, unless
        an int was declared to be a float. Raises NotEncodable."""

    def unpack(self, data: bytes) -> Any:
        """Read a stored form. Raises NotEncodable where it can't be read as the type it has now."""


class _Wire:
    """One way to write a type and to read it back."""

    def __init__(
        self, tag: bytes, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
    ) -> None:
        self.tag, self.encode, self.decode = tag, encode, decode


class _Written:
    """A type that is written by the first wire that reads back the same value."""

    def __init__(self, wires: Iterable[_Wire]) -> None:
        self._wires = tuple(wires)
        self._by_tag = {wire.tag: wire for wire in self._wires}

    def pack(self, value: Any) -> tuple[bytes, Any]:
        reason = "it would be read back as something else"
        for wire in self._wires:
            comparison = Sameness()
            try:
                data = wire.encode(value)
                back = wire.decode(data)
                if comparison.same(value, back):
                    return wire.tag + data, back if comparison.widened else value
            except Exception as error:  # constructors and hooks of users' types run in here
                reason = type(error).__name__  # its text may quote the value
        raise NotEncodable(f"a result of type {type(value).__qualname__} can't be stored: {reason}")

    def unpack(self, data: bytes) -> Any:
        wire = self._by_tag.get(data[:1])
        if wire is None:
            raise NotEncodable(f"the stored result has an unknown form ({data[:1]!r})")
        try:
            return wire.decode(data[1:])
        except Exception as error:  # its text may quote the value
            raise NotEncodable(
                "the stored result can't be read as the type the function has now "
                f"({type(error).__name__})"
            ) from None

    def json_first(self) -> _Written:
        """The same, where JSON is tried before msgpack."""
        other = copy.copy(self)
        other._wires = tuple(sorted(self._wires, key=lambda wire: wire.tag == b"m"))
        return other


class _JsonLike(_Written):
    """Results without an annotation: None, bool, int, float, str, list and dict with text keys,
    exactly those. Nothing else comes back as itself without a type to read it by."""

    def __init__(self) -> None:
        super().__init__(_builtin_wires(Any))

    def pack(self, value: Any) -> tuple[bytes, Any]:
        try:
            foreign = _foreign(value)
        except RecursionError:
            foreign = type(value)
        if foreign is not None:
            raise NotEncodable(
                f"a result with {foreign.__qualname__} in it can't be stored without a return "
                "annotation to read it back by"
            )
        return super().pack(value)


class _Arms:
    """A union whose members can't be told apart by what is stored: the arm's number is stored."""

    def __init__(self, arms: list[tuple[Any, ResultCodec]]) -> None:
        self._arms = arms

    def pack(self, value: Any) -> tuple[bytes, Any]:
        exact = [i for i, (arm, _) in enumerate(self._arms) if _class_of(arm) is type(value)]
        for i in exact or range(len(self._arms)):
            try:
                data, answer = self._arms[i][1].pack(value)
            except NotEncodable:
                continue
            return b"u" + bytes((i,)) + data, answer
        raise NotEncodable(f"a result of type {type(value).__qualname__} fits no arm of the union")

    def unpack(self, data: bytes) -> Any:
        if data[:1] != b"u" or len(data) < 3 or data[1] >= len(self._arms):
            raise NotEncodable("the stored result is of no arm the annotation has now")
        return self._arms[data[1]][1].unpack(data[2:])


class _Custom:
    """A codec of the user's."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def pack(self, value: Any) -> tuple[bytes, Any]:
        try:
            data = self._codec.encode(value)
            return b"c" + data, value
        except Exception as error:
            raise NotEncodable(f"the codec refused the result ({type(error).__name__})") from error

    def unpack(self, data: bytes) -> Any:
        if data[:1] != b"c":
            raise NotEncodable("the stored result was written without this codec")
        try:
            return self._codec.decode(data[1:])
        except Exception as error:
            raise NotEncodable(
                f"the codec can't read the stored result ({type(error).__name__})"
            ) from error


def custom_codec(codec: Codec) -> ResultCodec:
    """Results stored by a codec of the user's.

    Raises TypeError for an object without `encode` and `decode`.
    """
    if not (callable(getattr(codec, "encode", None)) and callable(getattr(codec, "decode", None))):
        raise TypeError("codec= takes an object with encode(value) -> bytes and decode(bytes)")
    return _Custom(codec)


def codec_for(annotation: Any) -> ResultCodec:
    """The codec of a return annotation (`NO_ANNOTATION`, Any: JSON-like results).

    Raises NotEncodable for a type that can't be stored and read back.
    """
    if annotation is NO_ANNOTATION or annotation is Any or annotation in _NEVER:
        return _JSON_LIKE
    arms = _union_arms(annotation)
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and any(
        isinstance(each, type) and issubclass(each, pydantic.BaseModel)
        for each in _mentioned(annotation, set())
    ):
        return _numbered(arms) if arms else _pydantic_codec(pydantic, annotation)
    try:
        info = msgspec.inspect.type_info(annotation)
    except TypeError as error:
        if arms:
            return _numbered(arms)
        raise _refusal(annotation, error) from None
    parts = list(_parts(info, set()))
    for part in parts:
        if isinstance(part, msgspec.inspect.CustomType) and part.cls is not object:
            raise _refusal(annotation, f"{_name(part.cls)} can't be read back as itself")
    wires = _builtin_wires(annotation)
    clocks = (msgspec.inspect.DateTimeType, msgspec.inspect.TimeType)
    if any(isinstance(part, clocks) for part in parts):
        wires.reverse()  # msgpack keeps the instant, JSON its offset too
    return _Written(wires)


def json_first(codec: ResultCodec) -> ResultCodec:
    """The same codec, but what JSON reads back as itself is written as JSON: people read it."""
    return codec.json_first() if isinstance(codec, _Written) else codec


def _builtin_wires(annotation: Any) -> list[_Wire]:
    """msgpack first; JSON for what it can't say (integers over 64 bits)."""
    return [
        _Wire(
            b"m",
            msgspec.msgpack.Encoder().encode,
            msgspec.msgpack.Decoder(annotation, dec_hook=_as_is).decode,
        ),
        _Wire(
            b"j",
            msgspec.json.Encoder().encode,
            msgspec.json.Decoder(annotation, dec_hook=_as_is).decode,
        ),
    ]


def _pydantic_codec(pydantic: Any, annotation: Any) -> ResultCodec:
    try:
        adapter = pydantic.TypeAdapter(annotation)
    except Exception as error:
        raise _refusal(annotation, error) from None

    # By field names: an alias for reading may differ from the one for writing. Pydantic before
    # 2.11 reads by alias only.
    by_name = "by_name" in inspect.signature(adapter.validate_json).parameters
    how = {"by_alias": False, "by_name": True} if by_name else {}

    def encode(value: Any) -> bytes:
        data: bytes = adapter.dump_json(
            value, by_alias=not by_name, warnings="error", round_trip=True
        )
        return data

    def decode(data: bytes) -> Any:
        return adapter.validate_json(data, **how)

    return _Written([_Wire(b"p", encode, decode)])


def _numbered(arms: tuple[Any, ...]) -> ResultCodec:
    return _Arms([(arm, codec_for(arm)) for arm in arms])


def _as_is(kind: type, value: Any) -> Any:
    return value  # only `object` comes here: other unknown types were refused


def _union_arms(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return ()


def _class_of(annotation: Any) -> Any:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return typing.get_origin(annotation) or annotation


def _mentioned(annotation: Any, seen: set[int]) -> Iterator[Any]:
    """An annotation and every one inside it, fields of classes too."""
    if id(annotation) in seen:
        return
    seen.add(id(annotation))
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _mentioned(argument, seen)
    kind = typing.get_origin(annotation) or annotation
    if isinstance(kind, type) and kind.__module__ != "builtins":
        try:
            hints = typing.get_type_hints(kind, include_extras=True)
        except (NameError, TypeError, AttributeError):
            hints = {}  # msgspec or pydantic will say what is wrong with it
        for hint in hints.values():
            yield from _mentioned(hint, seen)


def _parts(node: Any, seen: set[Any]) -> Iterator[msgspec.inspect.Type]:
    """A described type and every one inside it. A class is looked into once."""
    if isinstance(node, tuple):
        for each in node:
            yield from _parts(each, seen)
    elif isinstance(node, msgspec.inspect.Field):
        yield from _parts(node.type, seen)
    elif isinstance(node, msgspec.inspect.Type):
        cls = getattr(node, "cls", None)
        if cls is not None:
            if cls in seen:
                return
            seen.add(cls)
        yield node
        for name in node.__struct_fields__:
            if name not in ("cls", "values"):
                yield from _parts(getattr(node, name), seen)


def _foreign(value: Any) -> type | None:
    """The first type in a value that is not JSON-like, if there is one."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return None
    if kind is list:
        return next((found for each in value if (found := _foreign(each))), None)
    if kind is dict:
        for key, each in value.items():
            if type(key) is not str:
                return type(key)
            if found := _foreign(each):
                return found
        return None
    return kind


def _refusal(annotation: Any, reason: object) -> NotEncodable:
    return NotEncodable(
        f"results of type {_name(annotation)} can't be stored: {reason}; return a dataclass, "
        "msgspec Struct, attrs or pydantic class or a standard type, or give codec="
    )


def _name(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) else str(annotation)


_JSON_LIKE = _JsonLike()
