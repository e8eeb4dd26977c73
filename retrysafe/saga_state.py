"""What is known of one saga: one JSON document, written before and after every act."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import msgspec

from retrysafe.errors import RecordSealed
from retrysafe.records import NO_KEYS, SEALED

__all__ = ["Document", "Documents", "SagaStatus", "StepRecord", "StepState", "Stored"]

VERSION = 1


class SagaStatus(enum.StrEnum):
    """Where a saga is.

    running: forward. waiting: forward, not before its due time (a step after the point of no
    return goes on failing). undoing: backward; some undo may not be due yet. done, undone: over.
    parked: a person must look at it; neither done nor undone.
    """

    RUNNING = "running"
    WAITING = "waiting"
    UNDOING = "undoing"
    DONE = "done"
    UNDONE = "undone"
    PARKED = "parked"

    @property
    def over(self) -> bool:
        """Whether nothing will ever change it again."""
        return self in (SagaStatus.DONE, SagaStatus.UNDONE)


class StepState(enum.StrEnum):
    """Where one step is. `registered`: it may have acted, or be acting now."""

    NEW = "new"
    REGISTERED = "registered"
    DONE = "done"
    REFUSED = "refused"  # it failed, and surely did nothing
    UNDOING = "undoing"
    UNDONE = "undone"
    PARKED = "parked"


class Stored(msgspec.Struct, omit_defaults=True):
    """A value: as JSON where JSON reads it back the same, else in base64. `how` is its codec's
    mark."""

    how: str
    json: list[msgspec.Raw] = msgspec.field(default_factory=list)
    base64: bytes = b""


class StepRecord(msgspec.Struct, omit_defaults=True):
    """One step. `maybe`: whether it acted is unknown. `attempts`, `rounds` (later tries of a step
    after the point of no return) and `undo_attempts` only grow, until a person resumes it."""

    name: str
    state: StepState = StepState.NEW
    data: Stored | None = None
    maybe: bool = False
    attempts: int = 0
    rounds: int = 0
    undo_attempts: int = 0
    error: str = ""


class Document(msgspec.Struct, omit_defaults=True):
    """One saga. `failed` is the step that turned it back, `cause` its error's type and text."""

    version: int
    saga: str
    id: str
    args: list[Stored]
    steps: list[StepRecord]
    back: bool = False
    failed: str = ""
    cause: tuple[str, str] | None = None

    def names(self, *states: StepState) -> tuple[str, ...]:
        """The steps in one of these states, in order."""
        return tuple(step.name for step in self.steps if step.state in states)


_HEAD = b"saga"
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Document)


class Seal(Protocol):
    """What encrypts: see `retrysafe.stores.sealed`."""

    def close_text(self, digest: bytes, head: bytes, text: bytes) -> bytes: ...

    def open_text(self, digest: bytes, head: bytes, text: bytes) -> bytes: ...


class Documents:
    """How the documents of one store are written and read. `seal`: where it encrypts them.

    `digest` (hex) is the saga's: a document that lies under another one's name can't be opened.
    """

    def __init__(self, seal: Seal | None = None) -> None:
        self._seal = seal

    def write(self, digest: str, document: Document) -> bytes:
        """The stored form."""
        text = _encoder.encode(document)
        if self._seal is None:
            return text
        return self._seal.close_text(bytes.fromhex(digest), _HEAD, text)

    def read(self, digest: str, data: Any) -> Document:
        """A stored document. Raises ValueError for what is none, or of another version, and
        RecordSealed for what can't be opened."""
        if not isinstance(data, bytes):
            raise ValueError(f"no document of a saga ({type(data).__name__})")
        if self._seal is not None:
            data = self._seal.open_text(bytes.fromhex(digest), _HEAD, data)
        elif data.startswith(SEALED):
            raise RecordSealed(digest, NO_KEYS)
        try:
            document = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(f"no document of a saga ({type(error).__name__})") from None
        if document.version != VERSION:
            raise ValueError(f"a document of version {document.version}, not {VERSION}")
        return document
