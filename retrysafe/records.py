"""The receipt as stored: one string, a fixed head and a payload.

Head, in bytes: `r1` version · state · 16 owner token · 16 fence · 16 fingerprint. The fence is
decimal server microseconds. Then, while the work runs: 16 lease end (decimal µs, server clock),
16 fence of the abandoned predecessor (zeros: none), two length-prefixed request IDs (own,
predecessor's), and the 16-byte inboxes of waiting processes. Once it is done: the length-prefixed
request ID and the payload.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from retrysafe.values import Value

VERSION = b"r1"
TOKEN_SIZE = FENCE_SIZE = FINGERPRINT_SIZE = INBOX_SIZE = 16
HEAD_SIZE = 3 + TOKEN_SIZE + FENCE_SIZE + FINGERPRINT_SIZE
# Server microseconds up to here (the year 2255) are exact in the scripts' numbers, which are
# doubles, and have 16 digits with the next one too.
LATEST = 9_000_000_000_000_000
_NO_FENCE = b"0" * FENCE_SIZE
# How a payload begins that was encrypted (retrysafe.stores.sealed): as no result of ours does.
SEALED = b"\xc1sealed1"
# Why this process can't read such a one.
NO_KEYS = "it is encrypted, and RETRYSAFE_ENCRYPTION_KEYS is not set in this process"


class State(StrEnum):
    """States of a receipt (the states that are stored; `abandoned` is derived)."""

    RUNNING = "R"
    INTERRUPTED = "I"
    DONE = "D"
    NOT_KEPT = "N"


class CorruptRecord(ValueError):
    """Bytes under our key that are no receipt of this version."""


class Record(Value, frozen=True):
    """A finished receipt. `payload` is None where the result was not kept."""

    secret: ClassVar[frozenset[str]] = frozenset({"payload"})

    fingerprint: bytes
    token: bytes
    fence: int
    request_id: str
    payload: bytes | None

    @property
    def sealed(self) -> bool:
        """Whether the payload is encrypted still: this process has no keys to open it."""
        return self.payload is not None and self.payload.startswith(SEALED)


class Running(Value, frozen=True):
    """A receipt whose work runs, or ran until its owner died. `lease_end` is server µs."""

    fingerprint: bytes
    token: bytes
    fence: int
    request_id: str
    lease_end: int
    interrupted: bool
    previous: AbandonedReceipt | None
    inboxes: tuple[bytes, ...]


class AbandonedReceipt(Value, frozen=True):
    """What is known of a call whose owner died: handed to a recovery function.

    `key` is the text of the caller's key, `started` the server's clock in seconds.
    """

    secret: ClassVar[frozenset[str]] = frozenset({"key", "scope"})

    key: str
    scope: str
    fence: int
    request_id: str

    @property
    def started(self) -> float:
        return self.fence / 1e6


def short(text: str) -> bytes:
    """A length-prefixed ASCII text of at most 255 bytes."""
    data = text.encode("ascii", "replace")[:255]
    return bytes((len(data),)) + data


def encode_done(record: Record) -> bytes:
    """The stored form of a finished receipt."""
    state = b"N" if record.payload is None else b"D"
    head = VERSION + state + record.token + b"%016d" % record.fence + record.fingerprint
    return head + short(record.request_id) + (record.payload or b"")


def encode_running(running: Running) -> bytes:
    """The stored form of a receipt at work."""
    previous = running.previous
    return b"".join(
        (
            VERSION,
            b"I" if running.interrupted else b"R",
            running.token,
            b"%016d" % running.fence,
            running.fingerprint,
            b"%016d" % running.lease_end,
            b"%016d" % (previous.fence if previous else 0),
            short(running.request_id),
            short(previous.request_id if previous else ""),
            *running.inboxes,
        )
    )


def decode(value: bytes) -> Record | Running:
    """Read a stored receipt.

    Raises CorruptRecord where the bytes are no receipt of this version: never a guess.
    """
    if len(value) < HEAD_SIZE or value[:2] != VERSION:
        raise CorruptRecord("unknown version or too short")
    state = value[2:3]
    token, fence_text, fingerprint = value[3:19], value[19:35], value[35:51]
    if not fence_text.isdigit():
        raise CorruptRecord("the fence is no number")
    fence = int(fence_text)
    if fence > LATEST:
        raise CorruptRecord("the fence is no time")
    if state in (b"D", b"N"):
        request_id, at = _short_at(value, HEAD_SIZE)
        payload = value[at:] if state == b"D" else None
        return Record(fingerprint, token, fence, request_id, payload)
    if state not in (b"R", b"I"):
        raise CorruptRecord("unknown state")
    lease_text, previous_text = value[51:67], value[67:83]
    if not (lease_text.isdigit() and previous_text.isdigit() and len(previous_text) == FENCE_SIZE):
        raise CorruptRecord("the lease is no number")
    request_id, at = _short_at(value, 83)
    previous_id, at = _short_at(value, at)
    if previous_id and previous_text == _NO_FENCE:
        raise CorruptRecord("a predecessor without a fence")
    rest = value[at:]
    if len(rest) % INBOX_SIZE:
        raise CorruptRecord("the inboxes are cut")
    previous = (
        AbandonedReceipt("", "", int(previous_text), previous_id)
        if previous_text != _NO_FENCE
        else None
    )
    return Running(
        fingerprint=fingerprint,
        token=token,
        fence=fence,
        request_id=request_id,
        lease_end=int(lease_text),
        interrupted=state == b"I",
        previous=previous,
        inboxes=tuple(rest[i : i + INBOX_SIZE] for i in range(0, len(rest), INBOX_SIZE)),
    )


def payload_at(value: bytes) -> int | None:
    """Where the payload of a finished receipt begins; None for what has none (one at work, one
    whose result was not kept, no receipt at all). Raises CorruptRecord where it is cut."""
    if value[:3] != VERSION + b"D":
        return None
    return _short_at(value, HEAD_SIZE)[1]


def mismatched(stored: bytes, asked: bytes) -> bool:
    """Whether two fingerprints of one scheme differ. Other schemes can't be compared: the key
    alone decides then, so that a change of policy never runs work a second time."""
    return stored[:1] == asked[:1] and stored != asked


def _short_at(value: bytes, at: int) -> tuple[str, int]:
    if at >= len(value):
        raise CorruptRecord("cut inside a request ID")
    end = at + 1 + value[at]
    if end > len(value):
        raise CorruptRecord("cut inside a request ID")
    try:
        return value[at + 1 : end].decode("ascii"), end
    except UnicodeDecodeError:
        raise CorruptRecord("a request ID is not ASCII") from None
