"""The return annotation of a function, as a type."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

from retrysafe.codec import NO_ANNOTATION
from retrysafe.errors import NotEncodable


def locals_of_caller(depth: int) -> Mapping[str, Any]:
    """The local names where a decorator is applied: classes made inside a function live there.

    `depth` counts frames above the function that calls this.
    """
    return sys._getframe(depth + 1).f_locals


def return_annotation(function: Callable[..., Any], local: Mapping[str, Any]) -> Any:
    """What a function is declared to return; `NO_ANNOTATION` where it doesn't say.

    Raises NameError where a name in it isn't known (yet): a method may return the class that is
    still being made. Raises NotEncodable where the annotation is no type at all.
    """
    annotations = getattr(function, "__annotations__", None) or {}
    if "return" not in annotations:
        return NO_ANNOTATION
    annotation = annotations["return"]
    if annotation is None:
        return None
    inner = function
    while hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__

    def only() -> None: ...

    only.__annotations__ = {"return": annotation}
    known = dict(local)
    code, cells = getattr(inner, "__code__", None), getattr(inner, "__closure__", None)
    for name, cell in zip(code.co_freevars if code else (), cells or (), strict=False):
        try:
            known.setdefault(name, cell.cell_contents)
        except ValueError:
            continue  # not assigned yet
    try:
        hints = typing.get_type_hints(
            only, getattr(inner, "__globals__", {}), known, include_extras=True
        )
    except NameError:
        raise
    except Exception as error:
        raise NotEncodable(f"the return annotation {annotation!r} can't be read: {error}") from None
    found = hints["return"]
    return None if found is type(None) else found
