"""Arguments and results of steps, as JSON in the saga's document (S2: what undo is given)."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from retrysafe.codec import NO_ANNOTATION, ResultCodec, codec_for, json_first
from retrysafe.errors import NotEncodable
from retrysafe.saga_state import Stored

__all__ = ["annotations_of", "pack", "unpack", "value_codec"]

_JSON = (b"j", b"p")


def value_codec(annotation: Any) -> ResultCodec:
    """How values of this type are stored; JSON-like ones where there is no annotation.

    Raises NotEncodable for a type that can't be read back as itself.
    """
    return json_first(codec_for(annotation))


def pack(codec: ResultCodec, value: Any) -> tuple[Stored, Any]:
    """The stored form, and the value to go on with. Raises NotEncodable."""
    data, same = codec.pack(value)
    how = data[:1]
    if how in _JSON:
        return Stored(how.decode(), [msgspec.Raw(data[1:])]), same
    return Stored(how.decode(), base64=data[1:]), same


def unpack(codec: ResultCodec, stored: Stored) -> Any:
    """The value again. Raises NotEncodable where it can't be read as the type it has now."""
    body = bytes(stored.json[0]) if stored.json else stored.base64
    return codec.unpack(stored.how.encode() + body)


def annotations_of(function: Callable[..., Any], local: Mapping[str, Any]) -> dict[str, Any]:
    """The types a function declares, by parameter and `return`; what it doesn't is missing.

    `local`: names where it is decorated. Raises NotEncodable for a name that isn't known.
    """
    target = function if hasattr(function, "__code__") else type(function).__call__
    scope = {**vars(sys.modules.get(target.__module__, typing)), **local}
    try:
        return typing.get_type_hints(
            target, getattr(target, "__globals__", scope), scope, include_extras=True
        )
    except Exception as error:  # the annotation's own code runs in here
        name = getattr(function, "__qualname__", repr(function))
        raise NotEncodable(f"the annotations of {name} can't be read: {error}") from None


def annotation_or_none(found: Mapping[str, Any], name: str) -> Any:
    """The declared type; NO_ANNOTATION where there is none or it says nothing."""
    annotation = found.get(name, NO_ANNOTATION)
    if annotation is Any or annotation is inspect.Parameter.empty:
        return NO_ANNOTATION
    return None if annotation is type(None) else annotation
