"""What the flow of a saga asks its driver for. The flow decides, the driver acts and waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from retrysafe.backoff import Backoff
from retrysafe.context import RequestContext

__all__ = ["Act", "Eval", "Fenced", "Flow", "Halt", "Owned", "Release", "Renew", "Rules", "Sleep"]

T = TypeVar("T")


class Fenced(Exception):
    """Another process owns the saga now: nothing was written, and nothing more may be done."""


@dataclass(slots=True)
class Halt:
    """`asked`: the caller wants it to end (cancellation, an interrupt). `aborted`: it waits no
    longer. `cause`: what to raise in the end, where the driver's own task was not cancelled."""

    asked: bool = False
    aborted: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """How a saga is kept and undone. Seconds; see `Saga`."""

    lease: float
    ttl: float
    unfinished_ttl: float
    undo_backoff: Backoff
    undo_attempts: int
    stay: float
    stop: bool

    @property
    def lease_us(self) -> int:
        return max(1, round(self.lease * 1e6))

    def ttl_ms(self, over: bool) -> int:
        return max(1, round((self.ttl if over else self.unfinished_ttl) * 1000))


@dataclass(slots=True)
class Owned:
    """A saga that this run owns. `number` counts its writes, `lost`: its lease is another's."""

    key: str
    list_key: str
    id: str
    token: str
    digest: str
    number: int
    rules: Rules
    lost: bool = False

    def renewal(self, lease_us: int | None = None) -> Eval:
        """Lengthen its lease; 0: end it."""
        lease = self.rules.lease_us if lease_us is None else lease_us
        return Eval("saga_renew", self.key, (self.token, lease, self.rules.ttl_ms(False)))


@dataclass(frozen=True, slots=True)
class Eval:
    """Run a script; the answer is its reply, or StoreUnavailable is thrown in."""

    script: str
    key: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Act:
    """Call a step or an undo; the answer is ("ok", result), ("error", exception), or
    ("interrupted", exception). `breakable`: a cancellation reaches it."""

    call: Callable[[], Any]
    is_async: bool
    request: RequestContext
    breakable: bool


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait so many seconds. `breakable`: a cancellation ends it."""

    seconds: float
    breakable: bool


@dataclass(frozen=True, slots=True)
class Renew:
    """Keep renewing a lease from now on."""

    owned: Owned


@dataclass(frozen=True, slots=True)
class Release:
    """Stop renewing it."""

    owned: Owned


Request = Eval | Act | Sleep | Renew | Release
Flow = Generator[Request, Any, T]
