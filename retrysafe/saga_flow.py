"""One saga that this process owns, from where it stands to where it can go: written once.

Each attempt is registered before it acts, and recorded before the next one: whoever comes after a
crash knows what surely happened, what surely didn't, and what may have (S2; "register before act").
A registration is a fenced write, so a process that lost the saga acts no more; in particular no
step acts after its undo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from retrysafe.classify import as_classification, classify
from retrysafe.context import RequestContext, current_request, new_request_id
from retrysafe.errors import Abandoned, ResultNotKept, SagaStepError, StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.keys import derive
from retrysafe.outcomes import RETRIED, Classification, Outcome
from retrysafe.saga_context import StepContext
from retrysafe.saga_data import pack
from retrysafe.saga_plan import SagaStep, is_async
from retrysafe.saga_requests import Act, Eval, Fenced, Flow, Halt, Owned, Rules, Sleep
from retrysafe.saga_state import Document, Documents, SagaStatus, StepRecord, StepState
from retrysafe.sanitize import sanitize
from retrysafe.timing import timing

__all__ = ["SagaRun", "shown"]

_TEXT = 500  # characters of an error's text that are recorded
_WRITE_AGAIN = 0.2  # seconds

# What needs an undo when the saga goes back.
_STANDING = (StepState.DONE, StepState.REGISTERED, StepState.UNDOING)


def shown(error: BaseException) -> str:
    """An error for the record: its type and the beginning of its text."""
    return f"{type(error).__qualname__}: {_text(error)}"


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as fault:  # the error's own code runs in here
        text = f"its text can't be read ({type(fault).__name__})"
    return sanitize(text, _TEXT)


class SagaRun:
    """`document` is what is stored; `args` and `values` are its arguments and results, typed.

    turns: a cancellation turns the saga back; else it leaves it to `recover()`.
    receipts: makes the receipts of work inside a step, for coroutines or for threads.
    """

    def __init__(
        self,
        steps: dict[str, SagaStep],
        owned: Owned,
        document: Document,
        args: tuple[Any, ...],
        values: dict[str, Any],
        halt: Halt,
        *,
        documents: Documents,
        turns: bool,
        receipts: Callable[[bool], Any],
        check: Callable[[], None],
        acheck: Callable[[], Any],
    ) -> None:
        self.steps = steps
        self.owned = owned
        self.document = document
        self.values = values
        self.status = SagaStatus.RUNNING
        self.cause: BaseException | None = None
        self._args = args
        self._halt = halt
        self._documents = documents
        self._turns = turns
        self._receipts = receipts
        self._check, self._acheck = check, acheck
        self._until: float | None = None

    @property
    def _rules(self) -> Rules:
        return self.owned.rules

    def go(self) -> Flow[None]:
        """Go on until it is over, parked, or not due. Raises Fenced, StoreUnavailable."""
        if not self.document.back:
            yield from self._forward()
        if self.document.back:
            yield from self._backward()

    # Forward

    def _forward(self) -> Flow[None]:
        for record in self.document.steps:
            if record.state is StepState.DONE:
                continue
            if not (yield from self._step(record)):
                return
        yield from self._settle(SagaStatus.DONE)

    def _step(self, record: StepRecord) -> Flow[bool]:
        """Do a step; whether the next one is to be done."""
        step = self.steps[record.name]
        if record.state is not StepState.NEW:
            record.maybe = True  # registered by a process that told nothing more
        if record.state is StepState.PARKED:
            record.rounds = 0  # a person says: again
        call = step.retry.begin(step.name)
        while True:
            if self._halt.asked:
                yield from self._interrupted(record, step, self._halt.cause)
                return False
            record.state = StepState.REGISTERED
            record.attempts += 1
            yield from self._write(SagaStatus.RUNNING)
            call.enter()
            try:
                kind, value = yield self._act(step, record, undoing=False)
            finally:
                call.leave()
            bug = False
            if kind == "ok":
                try:
                    error = self._failure(step, value)
                    if error is None:
                        record.data, value = pack(step.codec, value)
                except Exception as fault:  # NotEncodable, or what `fails` of the user's raised
                    error = fault
                    record.maybe = True  # it acted, and nothing can be told of it
                if error is None:
                    call.succeeded()
                    yield from self._done(record, value)
                    return True
                again = False
            elif kind == "interrupted":
                # Who cancels wants it taken back; a pivot can't be.
                record.maybe = record.maybe or step.pivot
                record.error = shown(value)
                yield from self._interrupted(record, step, value)
                return False
            else:
                error = value
                verdict = _verdict(step, error)
                bug = _is_bug(verdict)
                record.maybe = record.maybe or _may_have_acted(error, verdict)
                again = verdict.outcome in RETRIED
                delay = call.failed(error) if isinstance(error, Exception) else None
                if delay is not None:
                    record.error = shown(error)
                    yield Sleep(delay, True)
                    continue
            record.error = shown(error)
            self._note_cause(record, error)
            if self._can_turn(record, step, bug):
                yield from self._turn(record, step, bug)
                return False
            record.rounds += 1
            if not again or record.rounds >= self._rules.undo_attempts:
                record.state = StepState.PARKED
                self._tell("saga-parked", step.name, record.error)
                yield from self._settle(SagaStatus.PARKED)
                return False
            wait = self._delay(record.rounds)
            if not self._stays(wait):
                yield from self._settle(SagaStatus.WAITING, wait)
                return False
            yield Sleep(wait, True)
            call = step.retry.begin(step.name)

    def _failure(self, step: SagaStep, value: Any) -> BaseException | None:
        if step.fails is not None and step.fails(value):
            return SagaStepError(step.name, "result", "it returned a value that means failure")
        return None

    def _done(self, record: StepRecord, value: Any) -> Flow[None]:
        record.state = StepState.DONE
        record.maybe = False
        record.error = ""
        self.values[record.name] = value
        self.document.failed, self.document.cause, self.cause = "", None, None
        yield from self._write(SagaStatus.RUNNING)
        self._tell("saga-step-done", record.name)

    def committed(self) -> bool:
        """Whether a step is done that can't be taken back: from there it only goes forward."""
        return any(
            record.state is StepState.DONE and self.steps[record.name].final
            for record in self.document.steps
        )

    def _can_turn(self, record: StepRecord, step: SagaStep, doubtful: bool) -> bool:
        if self.committed():
            return False
        if record.state is StepState.NEW:
            return True
        if step.undo is None:
            return not record.maybe
        return step.tolerant or not (record.maybe or doubtful)

    def _turn(self, record: StepRecord, step: SagaStep, doubtful: bool) -> Flow[None]:
        if record.state is StepState.REGISTERED:
            record.maybe = record.maybe or doubtful
            if step.undo is None or not record.maybe:
                record.state = StepState.REFUSED
        self.document.back = True
        self._tell("saga-turned-back", record.name, record.error)
        yield from self._write(SagaStatus.UNDOING)

    def _interrupted(
        self, record: StepRecord, step: SagaStep, cause: BaseException | None
    ) -> Flow[None]:
        self._halt.asked = True
        self._halt.cause = self._halt.cause or cause
        if self._turns and self._can_turn(record, step, True):
            self._note_cause(record, cause or SagaStepError(record.name, "cancelled", ""))
            yield from self._turn(record, step, True)
        else:
            yield from self._settle(SagaStatus.RUNNING)

    # Backward

    def _backward(self) -> Flow[None]:
        records = self.document.steps
        for record in reversed(records):
            if record.state in _STANDING:
                yield from self._undo(record)
                if self._halt.aborted:
                    break
            if self._rules.stop and record.state in (StepState.UNDOING, StepState.PARKED):
                break
        parked = any(record.state is StepState.PARKED for record in records)
        waits = [
            self._delay(record.undo_attempts)
            for record in records
            if record.state is StepState.UNDOING
        ]
        if self._halt.aborted:
            yield from self._settle(SagaStatus.UNDOING)
        elif waits:
            yield from self._settle(SagaStatus.UNDOING, min(waits))
        elif parked:
            yield from self._settle(SagaStatus.PARKED)
        else:
            yield from self._settle(SagaStatus.UNDONE)

    def _undo(self, record: StepRecord) -> Flow[None]:
        step = self.steps[record.name]
        record.state = StepState.UNDOING
        while True:
            record.undo_attempts += 1
            yield from self._write(SagaStatus.UNDOING)
            kind, value = yield self._act(step, record, undoing=True)
            if kind == "ok":
                record.state = StepState.UNDONE
                yield from self._write(SagaStatus.UNDOING)
                self._tell("saga-step-undone", record.name)
                return
            record.error = shown(value)
            if kind == "interrupted":
                self._halt.asked = self._halt.aborted = True
                self._halt.cause = value
                return
            if record.undo_attempts >= self._rules.undo_attempts:
                record.state = StepState.PARKED
                yield from self._write(SagaStatus.UNDOING)
                self._tell("saga-parked", record.name, record.error)
                return
            self._tell("saga-undo-failed", record.name, record.error)
            delay = self._delay(record.undo_attempts)
            if not self._stays(delay):
                return
            yield Sleep(delay, False)

    # Both ways

    def _act(self, step: SagaStep, record: StepRecord, *, undoing: bool) -> Act:
        key = derive(self.owned.digest, "saga", step.name, "undo" if undoing else "do")
        context = StepContext(
            saga=self.document.saga,
            saga_id=self.document.id,
            step=step.name,
            key=key,
            attempt=record.undo_attempts if undoing else record.attempts,
            undoing=undoing,
            maybe=record.maybe,
            args=self._args,
            results={
                name: self.values[name]
                for name in self.document.names(*_STANDING)
                if name in self.values and name != step.name
            },
            _check=self._check,
            _acheck=self._acheck,
        )
        function = step.undo if undoing else step.do
        assert function is not None
        given = (self.values.get(step.name),) if undoing else self._args
        colour = is_async(function)
        around = current_request()
        request = RequestContext(
            request_id=around.request_id if around else new_request_id(),
            key=key,
            held=around.held if around else frozenset(),
            traceparent=around.traceparent if around else None,
            receipts=self._receipts(colour),
        )
        return Act(functools.partial(function, context, *given), colour, request, not undoing)

    def _note_cause(self, record: StepRecord, error: BaseException) -> None:
        self.document.failed = record.name
        self.document.cause = (type(error).__qualname__, _text(error))
        self.cause = error

    def _delay(self, number: int) -> float:
        delay = self._rules.undo_backoff.delay(max(1, number), timing().random)
        return min(delay, 86400.0) if delay > 0 else 0.001

    def _stays(self, delay: float) -> bool:
        """Whether the caller is kept waiting so long: `stay` in all, from the first time on."""
        now = timing().monotonic()
        if self._until is None:
            self._until = now + self._rules.stay
        return now + delay <= self._until

    def _write(self, status: SagaStatus, due: float = 0.0, *, settle: bool = False) -> Flow[None]:
        """Store how far it is. Tried again while the lease may last. Raises Fenced."""
        if self.owned.lost:
            raise Fenced
        self.owned.number += 1
        self.status = status
        rules = self._rules
        request = Eval(
            "saga_write",
            self.owned.key,
            (
                self.owned.token,
                self.owned.number,
                status.value,
                self._documents.write(self.owned.digest, self.document),
                round(due * 1e6),
                0 if settle else rules.lease_us,
                rules.ttl_ms(status.over),
            ),
        )
        end = timing().monotonic() + rules.lease
        while True:
            try:
                reply = yield request
                break
            except StoreUnavailable:
                if self.owned.lost or timing().monotonic() + _WRITE_AGAIN >= end:
                    raise
            yield Sleep(_WRITE_AGAIN, False)
        if reply != 1:
            self.owned.lost = True
            raise Fenced

    def _settle(self, status: SagaStatus, due: float = 0.0) -> Flow[None]:
        """Let go of it: it is over, or waits."""
        yield from self._write(status, due, settle=True)
        self._tell(f"saga-{status.value}")
        try:
            if status.over:
                yield Eval("saga_unlist", self.owned.list_key, (self.document.id, ""))
            else:
                look = -1 if status is SagaStatus.PARKED else round(due * 1e6)
                ttl = self._rules.ttl_ms(False)
                yield Eval("saga_list", self.owned.list_key, (self.document.id, look, ttl))
        except StoreUnavailable as fault:
            # Harmless: it stays on the list, and whoever looks at it next puts that right.
            self._tell("saga-list-stale", detail=fault.reason)

    def _tell(self, kind: str, step: str = "", detail: str = "") -> None:
        # The text of an error may say anything: events name its type alone.
        what = f"{self.document.saga}: {step}".rstrip(": ")
        told = detail.partition(":")[0]
        emit(Event(kind, key=self.owned.digest, detail=f"{what}: {told}" if told else what))


def _verdict(step: SagaStep, error: BaseException) -> Classification:
    if not isinstance(error, Exception):
        return Classification(Outcome.UNKNOWN, reason="interrupted", recognised=False)
    try:
        return as_classification((step.retry.classify or classify)(error))
    except Exception:  # a classifier of the user's that fails says nothing
        return Classification(Outcome.UNKNOWN, reason="classifier failed", recognised=False)


def _may_have_acted(error: BaseException, verdict: Classification) -> bool:
    """Whether the act itself has an unknown outcome: a timeout, a cut connection, an answer that
    can't be read."""
    if isinstance(error, ResultNotKept | Abandoned):
        return True  # the work is done, or nobody knows
    return verdict.recognised and (verdict.may_have_run or verdict.outcome is Outcome.PROTOCOL)


def _is_bug(verdict: Classification) -> bool:
    """Errors that say nothing of the act: they may have struck before it or after it. The step's
    undo is called; a step without one is taken as not done."""
    return not verdict.recognised or verdict.reason == "error in the program"
