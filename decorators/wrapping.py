"""The wrapper of decorated functions: it looks like the function, and pickles by its name."""

from __future__ import annotations

from typing import Any

import wrapt


class FunctionWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """wrapt's, with the ways to copy and pickle that a function has."""

    def __reduce__(self) -> Any:
        return self.__wrapped__.__qualname__

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self
