"""One classification for the whole library: what does the end of this call mean?

Retries, the circuit breaker and the waiting for results all judge by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from retrysafe import errors
from retrysafe.answers import answer_of, classify_status
from retrysafe.known_failures import chain, known
from retrysafe.outcomes import Classification, Outcome

__all__ = ["Classification", "Outcome", "as_classification", "classify"]

_LEAVES = 100  # how many exceptions of a group are looked at

Word = Classification | Outcome
Fn = Callable[[Any], "Word | None"]

# The most telling member of a group decides: what must not be retried, then what may have run.
_WEIGHT = {
    outcome: weight
    for weight, outcome in enumerate(
        (
            Outcome.SUCCESS,
            Outcome.NOT_READY,
            Outcome.TRANSIENT,
            Outcome.THROTTLED,
            Outcome.UNKNOWN,
            Outcome.PROTOCOL,
            Outcome.REJECTED,
        )
    )
}


def as_classification(word: Any) -> Classification:
    """What a user's classifier returned: a Classification, an Outcome, or a bool (retry or not).

    Raises TypeError for anything else.
    """
    if isinstance(word, Classification):
        return word
    if isinstance(word, Outcome):
        return Classification(word, reason="custom")
    if isinstance(word, bool):
        outcome = Outcome.TRANSIENT if word else Outcome.REJECTED
        return Classification(outcome, reason="custom")
    raise TypeError(f"a classifier returns a Classification, an Outcome or a bool, not {word!r}")


class _Classifier:
    """See `classify`."""

    __slots__ = ("_added",)

    def __init__(self) -> None:
        self._added: dict[type, Fn] = {}

    def register(self, kind: type, fn: Fn) -> Callable[[], None]:
        """Judge exceptions or responses of this type (and its subclasses) by `fn`.

        `fn` returns a Classification or an Outcome, or None for "as usual". The nearest type
        wins, and wins over what the library knows. Returns the function that takes it back.
        """
        if not isinstance(kind, type):
            raise TypeError(f"register takes a type, not {kind!r}")
        if issubclass(kind, BaseException) and not issubclass(kind, Exception):
            raise TypeError(f"{kind.__name__} is no Exception: it is never classified nor retried")
        if not callable(fn):
            raise TypeError(f"register takes a function, not {fn!r}")
        self._added = {**self._added, kind: fn}

        def take_back() -> None:
            self._added = {k: f for k, f in self._added.items() if (k, f) != (kind, fn)}

        return take_back

    def __call__(self, subject: Any, /) -> Classification:
        if isinstance(subject, BaseException):
            return self._error(subject)
        if (found := self._registered(subject)) is not None:
            return found
        answer = answer_of(subject)
        if answer is not None:
            return classify_status(*answer, subject)
        return Classification(Outcome.SUCCESS)

    def _registered(self, subject: object) -> Classification | None:
        if self._added:
            for cls in type(subject).__mro__:
                fn = self._added.get(cls)
                word = None if fn is None else fn(subject)
                if word is not None:
                    return as_classification(word)
        return None

    def _error(self, error: BaseException) -> Classification:
        explicit, before = True, error
        for each in chain(error):
            explicit = explicit and (each is before or each is before.__cause__)
            before = each
            if not isinstance(each, Exception):
                if each is error:
                    raise TypeError(f"{type(error).__name__} is never classified: let it pass")
                break
            found = self._registered(each) or _own(each) or known(each)
            if found is None and isinstance(each, ExceptionGroup):
                found = self._group(each)
            if found is not None:
                # What was merely being handled when `error` was raised may be older than the call,
                # or another call's failure (a fallback): no proof that this one didn't run.
                return found if explicit else replace(found, sent=True, may_have_run=True)
        return Classification(Outcome.UNKNOWN, reason="not recognised", recognised=False)

    def _group(self, group: ExceptionGroup[Exception]) -> Classification | None:
        found = [self._error(leaf) for leaf in _leaves(group)]
        worst = max(found, key=lambda each: (not each.recognised, _WEIGHT[each.outcome]))
        waits = [each.retry_after for each in found if each.retry_after is not None]
        return Classification(
            worst.outcome,
            max(waits, default=None),
            worst.reason,
            sent=any(each.sent for each in found),
            may_have_run=any(each.may_have_run for each in found),
            recognised=all(each.recognised for each in found),
            proves_health=worst.proves_health,
        )


def _leaves(group: ExceptionGroup[Exception]) -> Iterable[Exception]:
    waiting: list[Exception] = list(group.exceptions)
    for _ in range(_LEAVES):
        if not waiting:
            return
        each = waiting.pop()
        if isinstance(each, ExceptionGroup):
            waiting.extend(each.exceptions)
        else:
            yield each
    yield Exception("too many to look at")  # not recognised: such a group is not retried


def _own(error: Exception) -> Classification | None:
    """This library's own errors, and any exception that says by itself whether to retry."""
    wait = getattr(error, "retry_after", None)
    if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait < 1e300:
        wait = None
    if isinstance(error, errors.RetrySafeError):
        name = type(error).__name__
        if isinstance(error, errors.ProtocolError | errors.RecordCorrupt):
            return Classification(Outcome.PROTOCOL, None, name)
        if isinstance(error, errors.ResultTimeout):
            return Classification(Outcome.UNKNOWN, None, name)
        if not error.retryable:
            return Classification(Outcome.REJECTED, wait, name)
        if isinstance(error, errors.StepFailed):  # answered by an endpoint that is well (S1)
            return Classification(Outcome.TRANSIENT, wait, name, proves_health=True)
        if isinstance(error, errors.InFlight):
            return Classification(Outcome.NOT_READY, wait, name)
        nothing_ran = isinstance(error, errors.BreakerOpen | errors.StoreUnavailable)
        return Classification(Outcome.TRANSIENT, wait, name, sent=not nothing_ran)
    word = getattr(error, "retryable", None)
    if isinstance(word, bool):
        base = known(error) or Classification(Outcome.UNKNOWN, wait)
        return base.told(word, f"retryable: {str(word).lower()}")
    return None


# An instance, not a function, for the sake of `classify.register`.
classify = _Classifier()
"""`classify(exception or response) -> Classification`.

An exception is judged by, in this order: what was registered for its type; its own `retryable`
(a bool); what is known of its type; the same for what it was raised from, or while handling
(the latter never proves that the call didn't run: `may_have_run` is then true). Of a group the
member that forbids most decides. A response (anything with `status_code` or `status`) is judged by
`retrysafe.answers.classify_status`; any other value is a SUCCESS. What nothing is known about is
UNKNOWN with `recognised=False`, and not retried.

Raises TypeError for a `BaseException` that is no `Exception`: a cancellation, an interrupt and an
exit are no outcome of a call.
"""
