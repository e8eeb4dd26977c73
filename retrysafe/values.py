"""Small immutable values, cheap to make: a keyed call makes a dozen of them."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

__all__ = ["Value", "replace"]


class Value(msgspec.Struct, frozen=True, gc=False):
    """Base of plain data. No `repr` shows the fields named in `secret`.

    The garbage collector need not look at them: nothing that they hold leads back to them.
    """

    secret: ClassVar[frozenset[str]] = frozenset()

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        names = (name for name in self.__struct_fields__ if name not in self.secret)
        return [(name, getattr(self, name)) for name in names]
