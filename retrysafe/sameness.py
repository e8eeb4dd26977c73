"""Whether a value that was stored and read back is the value it was: equal and of the same type.

`==` says too little (`1 == 1.0 == True`, two offsets of one instant, Decimal("1.10") and
Decimal("1.1")) and, for NaN or classes without `__eq__`, too much is asked of it.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import sys
from typing import Any

import msgspec

_PLAIN = frozenset({type(None), bool, int, str, bytes, bytearray})


class Sameness:
    """One comparison. `widened` is set where an int came back as the float it was declared to be
    (PEP 484 lets a function declared to return float return an int)."""

    def __init__(self) -> None:
        self.widened = False

    def same(self, a: Any, b: Any) -> bool:
        """Compare what was stored (`a`) with what was read back (`b`)."""
        kind = type(a)
        if kind is not type(b):
            if kind is int and type(b) is float and a == b:
                self.widened = True
                return True
            return False
        if kind in _PLAIN:
            return bool(a == b)
        if kind is float:
            return bool(a == b or (a != a and b != b))
        if kind is dict:
            if len(a) != len(b):
                return False
            for (left, of_a), (right, of_b) in zip(a.items(), b.items(), strict=True):
                if not (self.same(left, right) and self.same(of_a, of_b)):
                    return False
            return True
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(self.same, a, b))
        if kind is decimal.Decimal:
            return bool(a.as_tuple() == b.as_tuple())
        if kind in (datetime.datetime, datetime.time):
            return bool(
                a.utcoffset() == b.utcoffset()
                and a.replace(tzinfo=None) == b.replace(tzinfo=None)
                and (a.tzinfo is not None or a.fold == b.fold)
            )
        if isinstance(a, set | frozenset):
            return self._same_set(a, b)
        return self._same_object(a, b)

    def _same_set(self, a: Any, b: Any) -> bool:
        if a != b:
            return False
        before, after = set(map(type, a)), set(map(type, b))
        if before == after:
            return True
        self.widened = True
        return before | after == {int, float} or (before, after) == ({int}, {float})

    def _same_object(self, a: Any, b: Any) -> bool:
        names: list[str] | None = None
        if isinstance(a, msgspec.Struct):
            names = list(a.__struct_fields__)
        elif dataclasses.is_dataclass(a):
            names = [field.name for field in dataclasses.fields(a)]
        elif hasattr(type(a), "__attrs_attrs__"):
            names = [attribute.name for attribute in type(a).__attrs_attrs__]
        if names is None:
            return a is b or bool(a == b) or _same_model(self, a, b)
        missing = object()
        return all(
            self.same(getattr(a, name, missing), getattr(b, name, missing)) for name in names
        )


def _same_model(comparison: Sameness, a: Any, b: Any) -> bool:
    """Pydantic models that aren't `==`: NaN inside is still the same."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(a, pydantic.BaseModel):
        return False
    return bool(
        a.__pydantic_private__ == b.__pydantic_private__
        and comparison.same(a.__pydantic_extra__, b.__pydantic_extra__)
        and comparison.same(vars(a), vars(b))
    )
