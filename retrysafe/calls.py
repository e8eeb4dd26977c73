"""One logical call that may take several attempts: its state, and every decision about it.

`Call.failed` is the retry logic, written once: it answers with the delay before the next attempt,
or None to stop. The loops around it only run the work and sleep (`retrysafe.retrying`).
"""

from __future__ import annotations

import math
import sys
import threading
import uuid
from contextvars import ContextVar, Token
from typing import Any

from retrysafe import units
from retrysafe.attempt import Attempt
from retrysafe.attempt_history import HISTORY, AttemptFact, record, shown
from retrysafe.cancellations import was_cancelled
from retrysafe.classify import Classification, as_classification, classify
from retrysafe.context import current_request
from retrysafe.deadlines import current_deadline
from retrysafe.errors import BreakerOpen, ProtocolError
from retrysafe.events import Event, emit
from retrysafe.keys import derive
from retrysafe.outcomes import Outcome
from retrysafe.retry_policy import RetryRules
from retrysafe.timing import monotonic, timing

__all__ = ["Attempt", "Call", "current_attempt"]

_LONGEST_SLEEP = 86400.0  # seconds; what a strategy of the user's may ask for at most
_UNRECOGNISED = Classification(Outcome.UNKNOWN, reason="classifier failed", recognised=False)

# Threads of one attempt never make two keys for it, nor one for two calls. Taken for a first look
# only, and again by an outer call's key.
_keys = threading.RLock()

_current: ContextVar[Call | None] = ContextVar("retrysafe_attempt", default=None)


def current_attempt() -> Attempt | None:
    """The attempt that the running code belongs to; None outside of one."""
    call = _current.get()
    return None if call is None or not call.live else call.attempt


class Call:
    """One logical call, from its first attempt to its end. For clients; see `RetryPolicy.begin`."""

    # Defaults of the class, for most calls succeed at once and need none of it.
    number = 0
    live = False
    outer: Call | None = None
    last: BaseException | None = None
    tried: tuple[Any, ...] = ()
    _garbled: tuple[Any, ...] = ()
    target: Any = None
    _counts: dict[str, int] | None = None
    _key: str | None = None
    _facts: list[AttemptFact] | None = None
    _token: Token[Call | None]

    def __init__(self, policy: RetryRules, work: Any = "call") -> None:
        self.policy = policy
        self._work = work
        self._context = current_request()
        # Its id alone: to hold it would keep its frames alive. It lives as long as it is handled.
        handled = sys.exception()
        self._handled = 0 if handled is None else id(handled)
        self._started = self._began = monotonic()

    @property
    def name(self) -> str:
        """What is called."""
        work = self._work
        return work if isinstance(work, str) else getattr(work, "__qualname__", "call")

    def enter(self) -> None:
        """An attempt begins. Each is followed by `leave`, in the same task or thread."""
        if self.number:
            self._began = monotonic()
            self.target = None
            self._counts = None
            self.number += 1
        else:
            outer = _current.get()
            if outer is not None and outer.live:
                self.outer = outer
            self.number = 1
        self.live = True
        self._token = _current.set(self)

    def leave(self) -> None:
        """The attempt is over, however it ended."""
        self.live = False
        try:
            _current.reset(self._token)
        except ValueError:
            # Entered in another context, which still has it: a generator that was closed from
            # elsewhere. `live` is what counts.
            return

    @property
    def attempt(self) -> Attempt:
        """The attempt that runs, or ran last."""
        return Attempt(self, self.number)

    @property
    def key(self) -> str:
        """The idempotency key of this call: the same on every attempt, made when first asked for.

        Inside keyed work, and inside another call's attempt, it is derived from theirs and from
        the order of the calls of one name there: their re-runs send the same keys.
        """
        if self._key is None:
            with _keys:
                self._key = self._key or self._new_key()
        return self._key

    def _new_key(self) -> str:
        outer, work = self.outer, self._context
        if outer is not None and (outer._context is work or work is None or work.key is None):
            count = outer._next_call(self.name)
            return derive(outer.key.encode().hex(), "attempt", self.name, count)
        if work is not None and work.key is not None:
            name = f"retry:{self.name}"
            return derive(work.key, name, work.next_call(name))
        return str(uuid.uuid4())

    def _next_call(self, name: str) -> int:
        # Begins anew in each attempt, for each makes the same calls again.
        if self._counts is None:
            self._counts = {}
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return count

    @property
    def history(self) -> tuple[AttemptFact, ...]:
        """The failed attempts so far, oldest first."""
        return tuple(self._facts or ())

    def ends(self) -> float:
        """When time is up for this call, on the monotonic clock; infinity: never."""
        own, around = self.policy.deadline, current_deadline()
        ends = math.inf if own is None else self._started + own
        return ends if around is None else min(ends, around)

    def succeeded(self) -> None:
        """The call is over, and well."""
        self.last = None
        budget = self.policy.budget
        if budget is not None and self.number == 1 and self.outer is None:
            budget.deposit()

    def failed(self, subject: Any, repeatable: bool | None = None) -> float | None:
        """An attempt failed, with an exception or an answer that is a failure. Returns the delay
        in seconds before the next one, or None: give `subject` to the caller.

        repeatable: running the call twice does no harm (an idempotent method, or it carries a
        key); by default as the policy says. Never raises: whatever fails in here ends the retries
        and leaves the call's own error.
        """
        policy = self.policy
        if self.outer is not None and not policy.nested:
            return None
        error = subject if isinstance(subject, BaseException) else None
        if error is not None and was_cancelled(error, self._handled):
            return None
        now = monotonic()
        if repeatable is None:
            repeatable = policy.idempotent
        delay, why, verdict = None, "", _UNRECOGNISED
        try:
            verdict = as_classification((policy.classify or classify)(subject))
            if self.target is not None and self.target not in self.tried:
                self.tried = (*self.tried, self.target)
            delay, why = self._decide(subject, verdict, repeatable, now)
        except Exception as fault:
            why = f"deciding on a retry failed: {type(fault).__name__}"
            self._tell("retry-decision-failed", outcome=type(fault).__name__)
        self._note(error, verdict, now, delay)
        if error is not None and delay is None:
            self._end(error, why)
        # At the end nothing is held: the error's traceback leads back here.
        self.last = None if delay is None else error
        if delay is not None:
            self._tell("retry-attempt", verdict.outcome.value, verdict.reason, delay)
        elif why:
            kind = "budget-denied" if why == "budget exhausted" else "retry-gave-up"
            self._tell(kind, verdict.outcome.value, why)
        return delay

    def _decide(
        self, subject: Any, verdict: Classification, repeatable: bool, now: float
    ) -> tuple[float | None, str]:
        """(delay, "") or (None, why not; "" where the failure itself says it all)."""
        policy = self.policy
        refusal = _raised_by(subject, BreakerOpen)
        if refusal and not policy.retry_on_open:
            return None, ""
        if not verdict.retryable(repeatable) and not self._may_go_elsewhere(
            subject, verdict, repeatable
        ):
            if verdict.recognised and verdict.retryable(True):
                return None, (
                    "its outcome is unknown: it may have run, and is not repeated without "
                    "an idempotency key"
                )
            return None, ""
        if not policy.important:
            return None, ""
        attempts = _least(policy.attempts, timing().attempts)
        if attempts is not None and self.number >= attempts:
            return None, "attempts used up" if attempts > 1 else ""
        asked = verdict.retry_after
        longest = units.LONGEST if refusal else policy.max_retry_after
        if asked is not None and asked > min(longest, units.LONGEST):
            return None, f"asked to wait {asked:g} s, more than max_retry_after"
        delay = self._delay(asked)
        if now + delay >= self.ends():
            return None, "the next attempt would pass the deadline"
        if policy.budget is not None and not refusal and not policy.budget.spend():
            return None, "budget exhausted"
        return delay, ""

    def _may_go_elsewhere(self, subject: Any, verdict: Classification, repeatable: bool) -> bool:
        """An answer that can't be understood is an illness of its node (S1): where the call says
        which one that was, another may be asked; once for each."""
        if (
            verdict.outcome is not Outcome.PROTOCOL
            or self.target is None
            or self.target in self._garbled
            or (verdict.may_have_run and not repeatable)
            or _raised_by(subject, ProtocolError)  # a result was read: that is final
        ):
            return False
        self._garbled = (*self._garbled, self.target)
        return True

    def _delay(self, asked: float | None) -> float:
        rng = timing().random
        if asked:
            # At least what was asked; spread, for all who were told the same come back together.
            return asked + rng() * min(asked / 10, 1.0)
        delay = self.policy.backoff.delay(self.number, rng)
        # A strategy of the user's may answer anything; a sleep takes neither NaN nor less than 0.
        return min(delay, _LONGEST_SLEEP) if delay >= 0 else 0.0

    def _note(
        self, error: BaseException | None, verdict: Classification, now: float, delay: float | None
    ) -> None:
        if self._facts is None:
            self._facts = []
        elif len(self._facts) >= HISTORY:
            del self._facts[0]
        self._facts.append(
            AttemptFact(
                self.number,
                verdict.reason if error is None else type(error).__name__,
                verdict.outcome,
                now - self._began,
                verdict.retry_after,
                delay,
                None if self.target is None else shown(self.target),
            )
        )

    def _end(self, error: BaseException, why: str) -> None:
        if isinstance(error, BreakerOpen) and error.__cause__ is None and self.last is not None:
            error.__cause__ = self.last  # what opened it says more than the refusal
        record(error, self._facts or (), self.number, why)

    def sleep(self, delay: float) -> None:
        """Wait for the next attempt. What interrupts it passes, with the history on it."""
        try:
            timing().sleep(delay)
        except BaseException as error:
            record(error, self._facts or (), self.number, "ended between attempts")
            raise

    async def asleep(self, delay: float) -> None:
        """The same; a cancellation ends it at once."""
        try:
            await timing().asleep(delay)
        except BaseException as error:
            record(error, self._facts or (), self.number, "ended between attempts")
            raise

    def _tell(
        self, kind: str, outcome: str, detail: str = "", duration: float | None = None
    ) -> None:
        work = current_request()
        emit(
            Event(
                kind,
                key=(work.key or "") if work else "",
                request_id=work.request_id if work else "",
                duration=duration,
                outcome=outcome,
                detail=f"{self.name}: attempt {self.number}: {detail}",
            )
        )


def _raised_by(subject: object, kind: type[Exception]) -> bool:
    """Whether this is such an error, also one that was raised again as one of the caller's own."""
    for _ in range(20):
        if not isinstance(subject, BaseException):
            return False
        if isinstance(subject, kind):
            return True
        subject = subject.__cause__
    return False


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
