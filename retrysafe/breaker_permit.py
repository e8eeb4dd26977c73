"""The right to make one call, and the seam between a breaker's face and where its state lives."""

from __future__ import annotations

import asyncio
import sys
import warnings
from typing import Protocol

from retrysafe.breaker_states import Verdict


class Core(Protocol):
    """Where a breaker's state lives: in this process, or in Redis."""

    name: str
    here: bool  # nothing is awaited: async code may use the sync methods

    def acquire(self) -> Permit: ...

    async def aacquire(self) -> Permit: ...

    def succeed(self, permit: Permit) -> bool:
        """`settle` with SUCCESS: the everyday path."""

    def settle(self, permit: Permit, verdict: Verdict) -> bool: ...

    async def asettle(self, permit: Permit, verdict: Verdict) -> bool: ...

    def look(self) -> str: ...

    async def alook(self) -> str: ...

    def command(self, target: str) -> None: ...

    async def acommand(self, target: str) -> None: ...


def call_was_cancelled() -> bool:
    """Whether the code that asks runs because its call was cancelled or is being torn down."""
    handled = sys.exception()
    if handled is not None and not isinstance(handled, Exception):
        return True
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


class Permit:
    """The right to make one call. Give it back with exactly one verdict; the first one wins.

    Each verdict returns whether it counted: False when the permit was already given back, when the
    breaker has moved on since (another state, another round, the probe's lease is over), or when
    there was nothing to tell. The `a…` forms are for a breaker shared through Redis, in async code.
    """

    __slots__ = ("_core", "_done", "_era", "_left", "_slot", "_started")

    def __init__(self, core: Core, era: object, slot: int = 0, started: float = 0.0) -> None:
        self._core = core
        self._era = era
        self._slot = slot
        self._started = started
        self._done = False
        self._left = False  # the block that took it is over

    def success(self) -> bool:
        """The endpoint did its work."""
        return self._core.succeed(self)

    def failure(self) -> bool:
        """The endpoint is ill: it failed, timed out, or answered what can't be understood."""
        return self._core.settle(self, Verdict.FAILURE)

    def release(self) -> bool:
        """Nothing was learned: the slot goes back, no count changes."""
        return self._core.settle(self, Verdict.RELEASE)

    def release_as_success(self) -> bool:
        """The endpoint answered; that the task failed is no illness (S1).

        Counts for a half-open probe alone. From a cancelled call it is refused: the slot goes back
        and False is returned, since ending a call proves nothing about the other side (S1).
        """
        if call_was_cancelled():
            self._core.settle(self, Verdict.RELEASE)
            return False
        return self._core.settle(self, Verdict.ANSWERED)

    async def asuccess(self) -> bool:
        return await self._core.asettle(self, Verdict.SUCCESS)

    async def afailure(self) -> bool:
        return await self._core.asettle(self, Verdict.FAILURE)

    async def arelease(self) -> bool:
        return await self._core.asettle(self, Verdict.RELEASE)

    async def arelease_as_success(self) -> bool:
        if call_was_cancelled():
            await self._core.asettle(self, Verdict.RELEASE)
            return False
        return await self._core.asettle(self, Verdict.ANSWERED)


class ProbePermit(Permit):
    """A half-open permit. One that is dropped without a verdict comes back with its lease."""

    __slots__ = ()

    def __del__(self) -> None:
        # No slot is freed here: a collector may run while the breaker's own lock is held.
        if not self._done:
            warnings.warn(
                f"a probe permit of the breaker {self._core.name!r} was dropped without a verdict; "
                "its slot stays taken until its lease ends",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )
