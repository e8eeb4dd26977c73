"""The history of a call that failed: on the error itself, as facts and as one note."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from retrysafe.outcomes import Outcome

__all__ = ["HISTORY", "AttemptFact", "attempts_of", "record", "shown"]

HISTORY = 100  # how many attempts an error remembers, the latest ones
_SHOWN = 5  # how many of them its note lists
_MARK = "retrysafe: "
_FACTS = "_retrysafe_attempts"


@dataclass(frozen=True, slots=True)
class AttemptFact:
    """One failed attempt. It holds types and outcomes, never a message, which may be secret.

    number: from 1. error: the name of the exception's type, or `status <n>`. outcome: as
    classified. duration: seconds the attempt took. retry_after: seconds the other side asked for.
    delay: seconds waited after it, None where it was the last. target: which target it went to,
    where the call said so.
    """

    number: int
    error: str
    outcome: Outcome
    duration: float
    retry_after: float | None = None
    delay: float | None = None
    target: str | None = None


def attempts_of(error: BaseException) -> tuple[AttemptFact, ...]:
    """The failed attempts that ended in `error`, oldest first (the latest 100); empty where no
    retry policy saw it."""
    found = getattr(error, _FACTS, ())
    return found if isinstance(found, tuple) else ()


def record(error: BaseException, facts: Sequence[AttemptFact], number: int, why: str) -> None:
    """Put the history of a call on the error that ends it; a note where there is more to say than
    its own traceback does. `why`: why there is no further attempt."""
    # An exception class may refuse attributes (a frozen dataclass): it goes without.
    with suppress(AttributeError, TypeError):
        setattr(error, _FACTS, tuple(facts))
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list):
            notes[:] = [n for n in notes if not (isinstance(n, str) and n.startswith(_MARK))]
        if number > 1 or why:
            error.add_note(_MARK + _told(facts, number, why))


def _told(facts: Sequence[AttemptFact], number: int, why: str) -> str:
    shown = [f"{name_of(fact.error)} ({fact.outcome.value})" for fact in facts[-_SHOWN:]]
    if number > len(shown):
        shown.insert(0, "…")
    attempts = "1 attempt" if number == 1 else f"{number} attempts"
    return f"{attempts}: {', '.join(shown)}" + (f"; {why}" if why else "")


def name_of(name: str) -> str:
    """A type's name, fit to be shown: dynamic types may be called anything."""
    clean = "".join(char for char in name if char.isalnum() or char in "_. ")
    return clean[:60] or "error"


def shown(target: object) -> str:
    """A target in the history; whatever its own `__str__` does."""
    try:
        return str(target)[:200]
    except Exception:
        return type(target).__name__
