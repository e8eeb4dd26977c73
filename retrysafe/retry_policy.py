"""The rules of a retry policy: one validated, immutable value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

from retrysafe.backoff import Backoff, parse_backoff
from retrysafe.budget import RetryBudget
from retrysafe.outcomes import Classification, Outcome
from retrysafe.settings import Settings

__all__ = ["PolicyFields", "RetryRules"]

Classify = Callable[[Any], "Classification | Outcome | bool"]

_LARGEST = sys.float_info.max  # an int beyond it is no float


class PolicyFields(TypedDict, total=False):
    """The fields of a `RetryPolicy`, as keywords."""

    attempts: int | None
    deadline: float | None
    backoff: Backoff | str
    classify: Classify | None
    budget: RetryBudget | None
    max_retry_after: float
    important: bool
    nested: bool
    retry_on_open: bool
    idempotent: bool


def _setting(name: str) -> Any:
    """A default read from the settings (`RETRYSAFE_RETRY_*`) when a policy is built."""
    return field(default_factory=lambda: getattr(Settings.from_env(), name))


def _refuse(name: str, value: object, takes: str) -> ValueError:
    return ValueError(f"RetryPolicy.{name} takes {takes}, not {value!r}")


def _seconds(name: str, value: object, takes: str, *, zero: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= _LARGEST
        or (value == 0 and not zero)
    ):
        raise _refuse(name, value, f"a finite number of seconds{takes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """When a failed call is made again, and when no more. Durations are seconds.

    attempts: how many calls at most, the first one counted; None: the deadline or budget ends it.
    deadline: no attempt starts later than so long after the first; None: no such limit. A delay
        that would reach it ends the retries at once. A slow attempt can use all of it: give each
        attempt a timeout of its own, at most `attempt.remaining()`, or there may be no retry.
    backoff: the delay before each retry: a strategy of `retrysafe.backoff`, or its text, such as
        `"full-jitter:100ms..10s"`.
    classify: judges exceptions (and answers) in place of `retrysafe.classify`: returns a
        Classification, an Outcome, or whether to retry. One that raises ends the retries; the
        call's own error is raised.
    budget: a `RetryBudget`, shared with other policies or not.
    max_retry_after: the longest wait that another side may ask for (`Retry-After`). When more is
        asked for there is no retry: the failure is raised at once.
    important: False: fails fast, no retry at all (S2).
    nested: False: inside an attempt of another policy this one runs the call once, so that
        retries of several layers don't multiply. True: they multiply, as 3 · 3 · 3 = 27.
    retry_on_open: wait for an open breaker, for as long as it says and the deadline allows.
        It costs no budget. False: its refusal ends the retries.
    idempotent: running the work twice does no harm, so that it is run again also where it may
        have run before. To decorate a function says so; False: only where its error says that
        nothing was done is it run again. The error speaks of the request that failed, so let such
        work make one. HTTP clients decide it by method and key instead.

    Raises ValueError, naming the field, for what can't be used, and for a policy without an end.
    """

    attempts: int | None = _setting("retry_attempts")
    deadline: float | None = _setting("retry_deadline")
    backoff: Backoff = field(
        default_factory=lambda: parse_backoff(Settings.from_env().retry_backoff)
    )
    classify: Classify | None = None
    budget: RetryBudget | None = None
    max_retry_after: float = 60.0
    important: bool = True
    nested: bool = False
    retry_on_open: bool = False
    idempotent: bool = True

    def __post_init__(self) -> None:
        if self.attempts is not None and (
            isinstance(self.attempts, bool)
            or not isinstance(self.attempts, int)
            or self.attempts < 1
        ):
            raise _refuse("attempts", self.attempts, "a whole number of 1 or more, or None")
        if self.deadline is not None:
            _seconds("deadline", self.deadline, " above 0, or None for no deadline")
        if isinstance(self.backoff, str):
            try:
                object.__setattr__(self, "backoff", parse_backoff(self.backoff))
            except ValueError as error:
                takes = f"a strategy such as 'full-jitter:100ms..10s' ({error})"
                raise _refuse("backoff", self.backoff, takes) from None
        if isinstance(self.backoff, type) or not isinstance(self.backoff, Backoff):
            raise _refuse("backoff", self.backoff, "a strategy such as FullJitter(0.1)")
        if self.classify is not None and not callable(self.classify):
            raise _refuse("classify", self.classify, "a function")
        if self.budget is not None and not isinstance(self.budget, RetryBudget):
            raise _refuse("budget", self.budget, "a RetryBudget")
        _seconds("max_retry_after", self.max_retry_after, ", 0 or more", zero=True)
        for name in ("important", "nested", "retry_on_open", "idempotent"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, getattr(self, name), "True or False")
        if self.attempts is None and self.deadline is None and self.budget is None:
            raise ValueError(
                "this RetryPolicy has no end: give it attempts=, deadline= (seconds) or budget="
            )
