"""Small immutable values, cheap to make: a keyed call makes a dozen of them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

__all__ = ["Value", "replace"]


class Value(msgspec.Struct, frozen=True):
    """Base of plain data. No `repr` shows the fields named in `secret`."""

    secret: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__struct_fields__
            if name not in self.secret
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def __rich_repr__(self) -> Any:
        for name in self.__struct_fields__:
            if name not in self.secret:
                yield name, getattr(self, name)
