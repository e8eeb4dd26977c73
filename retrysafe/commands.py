"""What the flow asks of a store, and what a store answers: plain data.

Each command touches one key, is atomic, and may be sent again: it carries the owner's token.
Values hold results: no `repr` shows them. Durations are microseconds for leases and milliseconds
for TTLs, as the server counts them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar

from retrysafe.values import Value


def micros(seconds: float) -> int:
    """A lease, as the server counts it."""
    return int(seconds * 1e6)


def millis(seconds: float) -> int:
    """A TTL, as the server counts it: never 0, which the server refuses."""
    return max(1, int(seconds * 1e3))


class Answer(IntEnum):
    """The first word of a store's reply."""

    REFUSED = 0  # the token doesn't own the receipt (any more): nothing was changed
    OK = 1
    VANISHED = 2  # ours is gone (evicted, flushed) and nobody else has it
    DONE = 3
    RUNNING = 4
    MISMATCH = 5
    ABANDONED = 6
    CORRUPT = 7


class Reply(Value, frozen=True):
    """`number`: a fence (begin), lease µs left (running), or TTL ms left (done, to a begin).
    `value`: the stored receipt."""

    secret: ClassVar[frozenset[str]] = frozenset({"value"})

    answer: Answer
    number: int = 0
    value: bytes = b""


class Begin(Value, frozen=True):
    """Take the receipt, or read what is there and note `inbox` on it, in one step.

    `take_over`: whether an abandoned receipt is taken; else it is answered ABANDONED.
    OK carries the fence, and our running record where it names an abandoned predecessor; DONE the
    milliseconds that the record has left.
    """

    key: bytes
    token: bytes
    fingerprint: bytes
    lease_us: int
    ttl_ms: int
    inbox: bytes
    take_over: bool
    request_id: str


class Renew(Value, frozen=True):
    """Lengthen the lease: OK, REFUSED, VANISHED."""

    key: bytes
    token: bytes
    lease_us: int
    ttl_ms: int


class Finish(Value, frozen=True):
    """Record `value` and tell the noted inboxes: OK, VANISHED (recorded too), REFUSED, DONE
    (REFUSED because another's record `value` stands)."""

    secret: ClassVar[frozenset[str]] = frozenset({"value"})

    key: bytes
    token: bytes
    value: bytes
    ttl_ms: int


class Release(Value, frozen=True):
    """Give the receipt up, as if never received: OK, REFUSED."""

    key: bytes
    token: bytes


class Interrupt(Value, frozen=True):
    """Mark the work abandoned now: OK, REFUSED."""

    key: bytes
    token: bytes


class Forget(Value, frozen=True):
    """Delete whatever is there: OK, VANISHED (nothing was)."""

    key: bytes


class Look(Value, frozen=True):
    """Read without a change: VANISHED, DONE, RUNNING (number: lease µs left), CORRUPT."""

    key: bytes


Command = Begin | Renew | Finish | Release | Interrupt | Forget | Look

# A record of at most this many bytes rides inside the wake-up message; a larger one is fetched.
NUDGE_LIMIT = 4096
