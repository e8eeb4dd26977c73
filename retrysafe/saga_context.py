"""What a step and its undo are told, and how they ask whether they may still act."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

__all__ = ["StepContext"]


@dataclass(frozen=True, slots=True)
class StepContext:
    """One attempt of one step, or of its undo.

    saga, saga_id, step: which one. key (also `idempotency_key`): 40 hex digits, the same on every
    attempt, in every process and after every crash; another one for the undo. Send it with what
    the step does; HTTP clients of `retrysafe.middleware` send keys made from it by themselves.
    attempt: 1, 2, …, counted over all processes. undoing: this is an undo. maybe: it is unknown
    whether an earlier attempt of the step took effect: a step then relies on the key; an undo,
    which then may get the data None, must also be right where the step never happened.
    args: what the saga was run with. results: those of the steps done before.
    """

    saga: str
    saga_id: str
    step: str
    key: str
    attempt: int
    undoing: bool
    maybe: bool
    args: tuple[Any, ...] = field(repr=False)
    results: dict[str, Any] = field(repr=False)
    _check: Callable[[], None] = field(repr=False)
    _acheck: Callable[[], Coroutine[Any, Any, None]] = field(repr=False)

    @property
    def idempotency_key(self) -> str:
        """`key`."""
        return self.key

    def check(self) -> None:
        """Ask the store, right before an act that can't be taken back, whether this process still
        runs the saga. Raises InFlight where another took over, StoreUnavailable."""
        self._check()

    async def acheck(self) -> None:
        """The same in async steps."""
        await self._acheck()
