"""Waiting for a result that arrives out of band: the loop, written once for both colours.

Look, subscribe, look again, then wait for a nudge or the next poll. The first look answers what is
there already without a subscription; the second sees what came while it was being made.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from retrysafe.classify import classify
from retrysafe.errors import AlreadyTaken, ProtocolError, ResultTimeout, StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.outcomes import Outcome

__all__ = ["Ask", "Join", "Look", "Pause", "waiting"]

FIRST_POLL = 0.25
LAST_POLL = 5.0
# Without a subscription polls are all there is (seconds).
LAST_POLL_DEAF = 1.0
_CONFIRM = 1.0
# The last look, at the deadline or on cancellation (seconds); less where the store was out.
LAST_LOOK = 0.5
LAST_LOOK_OUT = 0.1

# What an oversize payload leaves in ProtocolError.raw (bytes).
KEPT = 64 * 1024


class State(enum.IntEnum):
    """What a look found; the script's numbers."""

    ABSENT = 0
    HERE = 1
    TAKEN = 2
    TOO_LARGE = 3
    NO_STRING = 4


@dataclass(frozen=True, slots=True)
class Ask:
    """One wait. `token` names it: a look that is sent again finds what it took before."""

    job_id: str
    key: str
    channel: bytes
    step: str
    server: str
    mode: str
    timeout: float
    token: bytes
    ttl_ms: int
    max_size: int

    @property
    def script_args(self) -> tuple[Any, ...]:
        """The arguments of `result_look`."""
        return self.mode, self.token, self.ttl_ms, self.max_size, KEPT


@dataclass(frozen=True, slots=True)
class Look:
    """Run `result_look`, for at most so many seconds -> its reply, or StoreUnavailable."""

    limit: float


@dataclass(frozen=True, slots=True)
class Join:
    """Subscribe -> whether it was confirmed within so many seconds."""

    limit: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Sleep for so many seconds, or until a nudge."""

    seconds: float


Effect = Look | Join | Pause


def found(ask: Ask, seen: Any) -> bytes | None:
    """The payload a look found; None: not there yet. The one place where a wait is judged.

    Raises what ends the wait: AlreadyTaken, ProtocolError; StoreUnavailable, which doesn't.
    """
    if isinstance(seen, StoreUnavailable):
        raise seen
    state, payload = State(seen[0]), bytes(seen[1])
    if state is State.ABSENT:
        return None
    if state is State.TAKEN:
        raise AlreadyTaken(ask.job_id)
    if state is State.TOO_LARGE:
        raise ProtocolError(ask.step, ask.server, f"larger_than:{ask.max_size}", payload)
    if state is State.NO_STRING:
        raise ProtocolError(ask.step, ask.server, "not_a_string", b"")
    return payload


def waiting(ask: Ask) -> Generator[Effect, Any, bytes]:
    """The payload. Raises AlreadyTaken, ProtocolError, ResultTimeout."""
    end = time.monotonic() + ask.timeout
    errors = 0
    poll = FIRST_POLL
    joined: bool | None = None
    out = False
    while True:
        left = end - time.monotonic()
        last = left <= 0
        limit = (LAST_LOOK_OUT if out else LAST_LOOK) if last else left
        try:
            payload = found(ask, (yield Look(limit)))
        except Exception as error:
            # Not ready and transient wait on, all else ends the wait at once (S1).
            if classify(error).outcome is not Outcome.TRANSIENT:
                raise
            errors += 1
            out = True
            emit(Event("result-look-failed", outcome=type(error).__name__))
        else:
            if payload is not None:
                return payload
            out = False
        if last:
            raise ResultTimeout(ask.job_id, ask.timeout, errors)
        left = end - time.monotonic()
        if joined is None and left > 0:
            joined = yield Join(min(left, _CONFIRM))
            continue
        pause = min(poll, LAST_POLL if joined and not out else LAST_POLL_DEAF)
        poll = min(poll * 2, LAST_POLL)
        if left > 0:
            yield Pause(min(pause, left))
