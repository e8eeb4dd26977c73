"""Sagas in the store: begun once, taken on by one process, found again after a crash.

A saga is one key; a second one lists those that are not over, by when to look at them again. Each
script touches one of the two. A saga is listed before its first step is registered and taken off
after it is over: a crash in between leaves a name too many, which whoever looks at it removes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from retrysafe.errors import (
    FingerprintMismatch,
    InFlight,
    NotEncodable,
    RecordCorrupt,
    SagaChanged,
    SagaFailed,
    SagaNotFound,
    SagaStepError,
    StoreUnavailable,
)
from retrysafe.events import Event, emit
from retrysafe.keys import digest, fingerprint
from retrysafe.saga_data import pack, unpack
from retrysafe.saga_flow import SagaRun
from retrysafe.saga_plan import Plan
from retrysafe.saga_requests import Eval, Fenced, Flow, Halt, Owned, Release, Renew, Rules
from retrysafe.saga_settling import settle
from retrysafe.saga_state import (
    VERSION,
    Document,
    Documents,
    SagaStatus,
    StepRecord,
    StepState,
    Stored,
)

__all__ = ["Keeping", "SagaInfo"]

_PAGE = 500
_LOOK_AGAIN = 60.0  # seconds: a saga that this program can't go on with

Word = tuple[str, Any]

_GONE, _OWNED, _ELSEWHERE, _OVER, _MISMATCH, _NOT_DUE = range(6)


@dataclass(frozen=True, slots=True)
class SagaInfo:
    """Where a saga is. `status`: running, waiting, undoing, parked, done or undone.

    done, undone, parked, pending: see `SagaFailed`; while it goes forward, `pending` are the steps
    that may be acting. errors: what failing steps said last. owned: a process runs it now. due:
    seconds until it is gone on with. problem: why this program can't go on with it, "" where it
    can.
    """

    id: str
    status: str
    done: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    parked: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    failed: str = ""
    errors: tuple[tuple[str, str], ...] = ()
    owned: bool = False
    due: float = 0.0
    problem: str = ""


class Keeping:
    """What a `Saga` does, as flows."""

    def __init__(
        self,
        plan: Plan,
        namespace: str,
        documents: Documents,
        rules: Rules,
        receipts: Callable[[bool], Any],
        check: Callable[[Owned], None],
        acheck: Callable[[Owned], Any],
    ) -> None:
        self._plan = plan
        self._namespace = namespace
        self._documents = documents
        self._rules = rules
        self._receipts = receipts
        self._check, self._acheck = check, acheck
        self._list_key = f"{namespace}:sagas:{plan.saga}"

    def _digest(self, id: str) -> str:
        return digest(self._namespace, f"saga:{self._plan.saga}", id).hex()

    def _key(self, id: str) -> str:
        return f"{self._namespace}:saga:{self._plan.saga}:{self._digest(id)}"

    # One saga

    def run(self, halt: Halt, id: str, args: tuple[Any, ...]) -> Flow[dict[str, Any]]:
        """See `Saga.run`."""
        packed = [pack(self._plan.codec(at), each) for at, each in enumerate(args)]
        stored = [each for each, _ in packed]
        document = Document(
            version=VERSION,
            saga=self._plan.saga,
            id=id,
            args=stored,
            steps=[StepRecord(step.name) for step in self._plan.steps],
        )
        mark = fingerprint("arguments", *(_flat(each) for each in stored)).hex()
        token, reply = yield from self._begin(
            id, "run", mark, self._documents.write(self._digest(id), document)
        )
        answer = reply[0]
        if answer == _MISMATCH:
            raise FingerprintMismatch(self._digest(id))
        if answer == _OWNED:
            given = tuple(value for _, value in packed)
            run = yield from self._own(halt, id, "run", token, reply, given)
            return self._result(run, halt)
        return self._settled(id, reply)

    def resume(self, halt: Halt, id: str, word: Word | None = None) -> Flow[dict[str, Any]]:
        """See `Saga.resume`, `Saga.settle`. `word`: a step, and what a person says of it."""
        token, reply = yield from self._begin(id, "resume")
        if reply[0] == _GONE:
            raise SagaNotFound(self._plan.saga, id)
        if reply[0] == _OWNED:
            run = yield from self._own(halt, id, "resume", token, reply, word=word)
            return self._result(run, halt)
        return self._settled(id, reply)

    def _begin(
        self, id: str, mode: str, mark: str = "", document: bytes = b""
    ) -> Flow[tuple[str, list[Any]]]:
        token = os.urandom(16).hex()
        rules = self._rules
        args = (token, mode, mark, rules.lease_us, rules.ttl_ms(False), document)
        reply = yield Eval("saga_begin", self._key(id), args)
        return token, reply

    def _own(
        self,
        halt: Halt,
        id: str,
        mode: str,
        token: str,
        reply: list[Any],
        args: tuple[Any, ...] | None = None,
        word: Word | None = None,
    ) -> Flow[SagaRun]:
        rules, name = self._rules, self._digest(id)
        owned = Owned(self._key(id), self._list_key, id, token, name, int(reply[5]), rules)
        listing = (id, rules.lease_us, rules.ttl_ms(False))
        yield Renew(owned)
        try:
            try:
                # Nothing has acted yet: to die before this line loses nothing.
                yield Eval("saga_list", self._list_key, listing)
                run = self._made(halt, owned, reply, args, turns=mode == "run")
                if word is not None:
                    settle(run, *word)
                    emit(Event("saga-settled", key=name, detail=f"{self._plan.saga}: {word[0]}"))
                if mode == "resume":
                    _again(run.document)
            except (SagaChanged, RecordCorrupt, ValueError, NotEncodable):
                yield owned.renewal(0)
                raise
            emit(Event("saga-begun" if mode == "run" else "saga-resumed", key=name))
            yield from run.go()
        except Fenced:
            yield Release(owned)
            raise InFlight(name, rules.lease) from None
        except Exception:
            yield Release(owned)
            raise
        yield Release(owned)
        return run

    def _made(
        self,
        halt: Halt,
        owned: Owned,
        reply: list[Any],
        args: tuple[Any, ...] | None,
        *,
        turns: bool,
    ) -> SagaRun:
        document = self._document(owned.id, reply[4])
        values, stored = self._typed(document)
        return SagaRun(
            {step.name: step for step in self._plan.steps},
            owned,
            document,
            stored if args is None else args,
            values,
            halt,
            documents=self._documents,
            turns=turns,
            receipts=self._receipts,
            check=lambda: self._check(owned),
            acheck=lambda: self._acheck(owned),
        )

    def _document(self, id: str, data: Any) -> Document:
        try:
            document = self._documents.read(self._digest(id), data)
        except ValueError as error:
            raise RecordCorrupt(self._digest(id), str(error)) from None
        if document.id != id or document.saga != self._plan.saga:
            raise RecordCorrupt(self._digest(id), "the document of another saga")
        return document

    def _typed(self, document: Document) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Results and arguments as the program has their types now. Raises SagaChanged."""
        steps = {step.name: step for step in self._plan.steps}
        stored = [record.name for record in document.steps]
        if not document.back and stored != list(steps):
            raise self._changed(document, f"its steps were {', '.join(stored)}")
        for record in document.steps:
            step = steps.get(record.name)
            touched = record.state not in (StepState.NEW, StepState.REFUSED, StepState.UNDONE)
            if document.back and touched and (step is None or step.undo is None):
                raise self._changed(document, f"step {record.name!r} has no undo here")
        try:
            values = {
                record.name: unpack(steps[record.name].codec, record.data)
                for record in document.steps
                if record.data is not None and record.name in steps
            }
            args = tuple(
                unpack(self._plan.codec(at), each) for at, each in enumerate(document.args)
            )
        except NotEncodable as error:
            raise self._changed(document, error.what) from None
        return values, args

    def _changed(self, document: Document, reason: str) -> SagaChanged:
        return SagaChanged(self._plan.saga, document.id, reason)

    # Its end

    def _result(self, run: SagaRun, halt: Halt) -> dict[str, Any]:
        if halt.asked:
            raise halt.cause or asyncio.CancelledError()
        return self._outcome(run.document, run.status, run.values, run.cause)

    def _settled(self, id: str, reply: list[Any]) -> dict[str, Any]:
        """The answer of a saga that isn't ours to run."""
        if reply[0] == _ELSEWHERE:
            raise InFlight(self._digest(id), max(0.001, reply[2] / 1e6))
        document = self._document(id, reply[4])
        values, _ = self._typed(document)
        return self._outcome(document, SagaStatus(_text(reply[3])), values, None)

    def _outcome(
        self,
        document: Document,
        status: SagaStatus,
        values: dict[str, Any],
        cause: BaseException | None,
    ) -> dict[str, Any]:
        if status is SagaStatus.DONE:
            return {record.name: values[record.name] for record in document.steps}
        if cause is None and document.cause is not None:
            cause = SagaStepError(document.failed, *document.cause)
        facts = _facts(document, status)
        raise SagaFailed(
            document.saga,
            document.id,
            document.failed,
            results=values,
            errors={step.name: step.error for step in document.steps if step.error},
            cause=cause,
            **facts,
        )

    # All of them

    def recover(self, halt: Halt, limit: int) -> Flow[list[SagaInfo]]:
        """See `Saga.recover`."""
        done: list[SagaInfo] = []
        found = yield Eval("saga_due", self._list_key, ("due", 0, limit))
        for id, seen in _pairs(found):
            if halt.asked:
                break
            info = yield from self._recover(halt, id, seen)
            if info is not None:
                done.append(info)
        if halt.asked:
            raise halt.cause or asyncio.CancelledError()
        return done

    def _recover(self, halt: Halt, id: str, seen: str) -> Flow[SagaInfo | None]:
        token, reply = yield from self._begin(id, "recover")
        answer, status = reply[0], _text(reply[3])
        ttl = self._rules.ttl_ms(False)
        if answer == _OWNED:
            try:
                run = yield from self._own(halt, id, "recover", token, reply)
            except InFlight:
                return None
            except StoreUnavailable as fault:
                if not isinstance(fault, RecordCorrupt):
                    raise
                problem = str(fault)
            except SagaChanged as fault:
                problem = str(fault)
            else:
                return _info(run.document, run.status)
            emit(Event("saga-stuck", key=self._digest(id), detail=self._plan.saga))
            later = (id, round(_LOOK_AGAIN * 1e6), ttl)
            yield Eval("saga_list", self._list_key, later)
            return SagaInfo(id, status, problem=problem)
        if answer == _OVER and status == SagaStatus.PARKED.value:
            yield Eval("saga_list", self._list_key, (id, -1, ttl))
        elif answer in (_GONE, _OVER):
            yield Eval("saga_unlist", self._list_key, (id, seen))
        else:
            yield Eval("saga_list", self._list_key, (id, int(reply[2]), ttl))
        return None

    def look(self, halt: Halt, id: str) -> Flow[SagaInfo]:
        """See `Saga.look`."""
        info = yield from self._look(id)
        if info is None:
            raise SagaNotFound(self._plan.saga, id)
        return info

    def unfinished(self, halt: Halt, status: SagaStatus | None = None) -> Flow[list[SagaInfo]]:
        """See `Saga.unfinished`, `Saga.parked`."""
        names: list[str] = []
        while True:
            found = yield Eval("saga_due", self._list_key, ("all", len(names), _PAGE))
            page = [id for id, _ in _pairs(found)]
            names += page
            if len(page) < _PAGE:
                break
        infos: list[SagaInfo] = []
        for id in dict.fromkeys(names):
            info = yield from self._look(id)
            if info is not None and not SagaStatus(info.status).over:
                infos.append(info)
        return [each for each in infos if status is None or each.status == status.value]

    def _look(self, id: str) -> Flow[SagaInfo | None]:
        reply = yield Eval("saga_look", self._key(id), (self._rules.ttl_ms(False),))
        if not reply[0]:
            return None
        status = SagaStatus(_text(reply[1]))
        try:
            document = self._document(id, reply[2])
        except RecordCorrupt as fault:
            return SagaInfo(id, status.value, problem=str(fault))
        return _info(document, status, reply[3] > 0, reply[4] / 1e6)


def _again(document: Document) -> None:
    """A person resumes it: parked undos are tried anew."""
    if document.back:
        for record in document.steps:
            if record.state is StepState.PARKED:
                record.state, record.undo_attempts = StepState.UNDOING, 0


def _facts(document: Document, status: SagaStatus) -> dict[str, tuple[str, ...]]:
    done, pending = document.names(StepState.DONE), (StepState.UNDOING, StepState.REGISTERED)
    waiting = document.names(*pending)
    if status is SagaStatus.UNDOING:
        waiting, done = document.names(*pending, StepState.DONE), ()
    return {
        "done": done,
        "undone": document.names(StepState.UNDONE),
        "parked": document.names(StepState.PARKED),
        "pending": waiting,
    }


def _info(
    document: Document, status: SagaStatus, owned: bool = False, due: float = 0.0
) -> SagaInfo:
    facts = _facts(document, status)
    return SagaInfo(
        document.id,
        status.value,
        facts["done"],
        facts["undone"],
        facts["parked"],
        facts["pending"],
        failed=document.failed,
        errors=tuple((step.name, step.error) for step in document.steps if step.error),
        owned=owned,
        due=due,
    )


def _flat(stored: Stored) -> bytes:
    body = bytes(stored.json[0]) if stored.json else stored.base64
    return stored.how.encode() + body


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pairs(found: list[Any]) -> list[tuple[str, str]]:
    words = [_text(each) for each in found]
    return list(zip(words[::2], words[1::2], strict=True))
