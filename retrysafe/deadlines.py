"""A deadline that everything below respects: one context variable."""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from retrysafe import units
from retrysafe.timing import timing

__all__ = ["current_deadline", "deadline", "remaining"]

_ends: ContextVar[float | None] = ContextVar("retrysafe_deadline", default=None)


def current_deadline() -> float | None:
    """When time is up here, on the monotonic clock of `retrysafe.timing`; None: never."""
    return _ends.get()


def remaining() -> float | None:
    """Seconds until the deadline in force here, never below 0; None: there is none."""
    ends = _ends.get()
    return None if ends is None else max(0.0, ends - timing().monotonic())


class deadline:
    """`with deadline(seconds):` no retry inside goes past it, whatever its own policy allows.

    Of nested ones the tighter wins. It reaches tasks and `asyncio.to_thread`. It interrupts
    nothing: a running attempt learns by `remaining()` (also `attempt.remaining()`) how long it has.
    Raises ValueError for what is no number of seconds; 0 is one, and leaves no time for retries.
    """

    __slots__ = ("_seconds", "_tokens")

    def __init__(self, seconds: float) -> None:
        try:
            self._seconds = units.check_duration(seconds, zero=True)
        except ValueError as error:
            raise ValueError(
                f"deadline takes a number of seconds, 0 or more, not {seconds!r} ({error})"
            ) from None
        self._tokens: list[Token[float | None]] = []

    def __enter__(self) -> deadline:
        ends, outer = timing().monotonic() + self._seconds, _ends.get()
        self._tokens.append(_ends.set(ends if outer is None else min(ends, outer)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _ends.reset(self._tokens.pop())

    @staticmethod
    def remaining() -> float | None:
        """`retrysafe.deadlines.remaining()`."""
        return remaining()
