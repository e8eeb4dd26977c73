"""How a call can end, as this library sees it: seven outcomes, and the facts beside them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

__all__ = ["RETRIED", "Classification", "Outcome"]


class Outcome(enum.Enum):
    """What the end of a call means (S1, S2)."""

    SUCCESS = "success"
    NOT_READY = "not-ready"  # being worked on: ask again
    TRANSIENT = "transient"  # will pass
    THROTTLED = "throttled"  # come back later
    REJECTED = "rejected"  # a definite failure: the same call fails again
    PROTOCOL = "protocol"  # an answer that can't be understood
    UNKNOWN = "unknown"  # it may have run


RETRIED = frozenset({Outcome.NOT_READY, Outcome.TRANSIENT, Outcome.THROTTLED, Outcome.UNKNOWN})

_HEALTH = {
    Outcome.SUCCESS: True,
    Outcome.NOT_READY: True,
    Outcome.REJECTED: True,
    Outcome.THROTTLED: None,
    Outcome.TRANSIENT: False,
    Outcome.PROTOCOL: False,
    Outcome.UNKNOWN: False,
}


@dataclass(frozen=True, slots=True)
class Classification:
    """The outcome of one call.

    retry_after: the wait that the other side asked for, seconds; None: it didn't ask.
    reason: what it was judged by, a few words, never the text of the error.
    sent: False where the request surely never left this process.
    may_have_run: the call may have had its effect; always true of UNKNOWN.
    recognised: False where nothing is known about this kind of error. It counts as UNKNOWN and is
        not retried: only what is classified is.
    proves_health: what this says about the endpoint: True it is well, False it is ill, None
        nothing. Where it is not given it follows from the outcome.
    """

    outcome: Outcome
    retry_after: float | None = None
    reason: str = ""
    sent: bool = True
    may_have_run: bool = False
    recognised: bool = True
    proves_health: bool | str | None = "by outcome"

    def __post_init__(self) -> None:
        if self.outcome is Outcome.UNKNOWN:
            object.__setattr__(self, "may_have_run", True)
        if self.proves_health == "by outcome":
            object.__setattr__(self, "proves_health", _HEALTH[self.outcome])

    def retryable(self, repeatable: bool) -> bool:
        """Whether a retry may help and is safe. `repeatable`: the call is idempotent by its
        method, or carries a key, so that running it twice does no harm."""
        if self.outcome not in RETRIED or not self.recognised:
            return False
        return repeatable or not self.may_have_run

    def told(self, retryable: bool, reason: str) -> Classification:
        """The same, after the producer's explicit word: it wins over whatever was concluded."""
        if not retryable:
            return Classification(
                Outcome.REJECTED, self.retry_after, reason, proves_health=self.proves_health
            )
        outcome = self.outcome
        if outcome not in (Outcome.NOT_READY, Outcome.THROTTLED):
            outcome = Outcome.TRANSIENT
        return replace(self, outcome=outcome, reason=reason, may_have_run=False, recognised=True)
