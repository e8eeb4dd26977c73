"""One attempt, as the running code sees it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from retrysafe.timing import timing

if TYPE_CHECKING:
    from retrysafe.calls import Call

__all__ = ["Attempt"]

T = TypeVar("T", bound=Hashable)


class Attempt:
    """One attempt: what the running code may know of it. As a context manager it is the body of
    `for attempt in policy:`.

    number: from 1.
    """

    __slots__ = ("_call", "delay", "done", "number")

    def __init__(self, call: Call, number: int) -> None:
        self._call = call
        self.number = number
        self.done: bool | None = None  # None: not yet; False: to be followed by another
        self.delay: float = 0.0

    @property
    def idempotency_key(self) -> str:
        """The key of the logical call: the same on each of its attempts, another for each call."""
        return self._call.key

    @property
    def target(self) -> Any:
        """Where this attempt goes; set it, and it is in `tried` of the next ones if it fails.

        Where it is set, an answer that can't be understood (PROTOCOL) is also retried, once for
        each target: the illness may be that node's alone. Without it there is no such retry.
        """
        return self._call.target

    @target.setter
    def target(self, target: Any) -> None:
        self._call.target = target

    @property
    def tried(self) -> tuple[Any, ...]:
        """The targets of this call that failed, in order."""
        return self._call.tried

    @property
    def last(self) -> BaseException | None:
        """The error of the attempt before; None in the first."""
        return self._call.last

    def remaining(self) -> float | None:
        """Seconds until the deadline of the policy, or of a `deadline()` around it, never below 0;
        None: there is none. An attempt's own timeout should be no longer."""
        ends = self._call.ends()
        return None if ends == math.inf else max(0.0, ends - timing().monotonic())

    def choose(self, targets: Iterable[T]) -> T:
        """Pick where this attempt goes: the first target that has not failed yet, else the one
        that failed longest ago. Raises ValueError where there are none."""
        given = list(targets)
        if not given:
            raise ValueError("choose takes at least one target")
        tried = self._call.tried
        fresh = [each for each in given if each not in tried]
        chosen = fresh[0] if fresh else min(given, key=tried.index)
        if not fresh:
            # It goes to the end of the queue should it fail again.
            self._call.tried = tuple(each for each in tried if each != chosen)
        self.target = chosen
        return chosen

    def __enter__(self) -> Attempt:
        if self._call.number >= self.number:
            raise RuntimeError("an attempt is entered once")
        self._call.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._call.leave()
        self.done = True
        if error is None:
            self._call.succeeded()
        elif isinstance(error, Exception):
            delay = self._call.failed(error)
            if delay is not None:
                self.done, self.delay = False, delay
                return True
        return False

    def _next(self) -> Attempt | None:
        """The attempt after this one; None: the call is over."""
        if self.done is None:
            raise RuntimeError("run the work of each attempt in a block: `with attempt:`")
        return None if self.done else Attempt(self._call, self.number + 1)

    def __repr__(self) -> str:
        return f"<attempt {self.number} of {self._call.name}>"
