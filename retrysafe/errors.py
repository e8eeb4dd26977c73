"""Every error of retrysafe: picklable, its facts as attributes, its message says what to do."""

from __future__ import annotations

import pickle
from typing import Any

_MOST_LOOKED_AT = 1000


def _rebuild(cls: type[RetrySafeError], facts: dict[str, Any]) -> RetrySafeError:
    error = cls.__new__(cls)
    error.__dict__.update(facts)
    error.args = (error.describe(),)
    return error


class RetrySafeError(Exception):
    """Base of all errors. `retryable` says whether the same call may succeed later."""

    retryable: bool = False

    def __init__(self, **facts: Any) -> None:
        self.__dict__.update(facts)
        super().__init__(self.describe())

    def describe(self) -> str:
        return "retrysafe failed"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.__dict__)


class SettingsError(RetrySafeError, ValueError):
    """Settings that can't be used. `faults` lists each: its name, what it holds, what it takes."""

    faults: list[str]

    def __init__(self, faults: list[str]) -> None:
        super().__init__(faults=list(faults))

    def describe(self) -> str:
        return "settings can't be used:\n" + "\n".join(f"  - {fault}" for fault in self.faults)


class KeyInvalid(RetrySafeError, ValueError):
    """An idempotency key that breaks the syntax (RFC 8941 string or bare, 1-255 visible ASCII)."""

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(reason=reason)

    def describe(self) -> str:
        return f"the idempotency key can't be used: {self.reason}"


class KeyMissing(RetrySafeError, ValueError):
    """A keyed call came without a key where one is required."""

    header: str

    def __init__(self, header: str) -> None:
        super().__init__(header=header)

    def describe(self) -> str:
        return f"this call needs an idempotency key: send the header {self.header}"


class ReceiptError(RetrySafeError):
    """What a receipt answers in place of a result. `key` is the key's digest, never its text."""

    key: str

    def __init__(self, key: str = "", **facts: Any) -> None:
        super().__init__(key=key, **facts)


class InFlight(ReceiptError):
    """The first call with this key is still running; ask again after `retry_after` seconds."""

    retryable = True
    retry_after: float

    def __init__(self, key: str = "", retry_after: float = 1.0) -> None:
        super().__init__(key, retry_after=retry_after)

    def describe(self) -> str:
        return (
            f"a call with the same key is still running; retry in {self.retry_after:g} s "
            "with the same key to get its result"
        )


class Reentered(InFlight):
    """A call waits for itself: it was made, with the same key, from inside its own work."""

    retryable = False

    def describe(self) -> str:
        return (
            "this call was made from inside the work of the same key and would wait for itself; "
            "give the inner call a key of its own"
        )


class Abandoned(ReceiptError):
    """The call that held this key died; whether it took effect is unknown (policy `refuse`)."""

    def describe(self) -> str:
        return (
            "the call that held this key died and its outcome is unknown; check what it did, "
            "then forget the receipt or use a new key"
        )


class FingerprintMismatch(ReceiptError):
    """The key was first used with another payload."""

    def describe(self) -> str:
        return "this key was already used with other arguments; use a new key for another call"


class ResultNotKept(ReceiptError):
    """The work is done, its result isn't stored; it is not run again."""

    def describe(self) -> str:
        return "the work of this key is done but its result was not kept; it is not run again"


class StoreUnavailable(ReceiptError):
    """The store can't be reached or can't answer: nothing was run. Retry after `retry_after` s."""

    retryable = True
    reason: str
    retry_after: float

    def __init__(self, key: str = "", reason: str = "", retry_after: float = 1.0) -> None:
        super().__init__(key, reason=reason, retry_after=retry_after)

    def describe(self) -> str:
        return f"the receipt store is unavailable ({self.reason}); nothing was run, retry later"


class RecordCorrupt(StoreUnavailable):
    """Our key holds a value that isn't ours, or of a newer version. It is never overwritten."""

    def describe(self) -> str:
        return (
            f"the store holds a value that is no receipt of this version ({self.reason}); "
            "nothing was run and nothing was overwritten; inspect the key and delete it by hand"
        )


class RecordSealed(RecordCorrupt):
    """A record that the encryption keys of this process don't open. It is never overwritten."""

    def describe(self) -> str:
        return (
            f"the stored record can't be opened ({self.reason}); nothing was run and nothing was "
            "overwritten; give this process the keys it was written with, or look into who "
            "changed it"
        )


class NotEncodable(RetrySafeError, TypeError):
    """A type or value that can't be stored and read back as itself."""

    what: str

    def __init__(self, what: str) -> None:
        super().__init__(what=what)

    def describe(self) -> str:
        return self.what


class NoKeyedWork(RetrySafeError, RuntimeError):
    """A step outside keyed work: there is no key to record it under, and nothing was run."""

    step: str

    def __init__(self, step: str = "") -> None:
        super().__init__(step=step)

    def describe(self) -> str:
        return (
            f"the step {self.step!r} is outside keyed work: call it from an @idempotent function "
            "or from the handler of a request that carries a key"
        )


class SagaStepError(RetrySafeError):
    """What failed a saga's step, as it was recorded: the error's type by name, and its text.

    It stands for the error where that is no longer at hand: in another process, or later.
    """

    step: str
    type: str
    text: str

    def __init__(self, step: str = "", type: str = "", text: str = "") -> None:
        super().__init__(step=step, type=type, text=text)

    def describe(self) -> str:
        return f"step {self.step!r} failed with {self.type}: {self.text}"


class SagaFailed(RetrySafeError):
    """A saga that did not come to its end. Each of its steps is in one of these, in order:

    done: its effect stands. undone: its effect was taken back (or its undo ran because nobody
    knows whether there was one). parked: its undo, or a step after the point of no return, went on
    failing: a person must look at it, then `resume(id)`. pending: it is still to be undone, or
    done: `recover()` goes on with it. `step` failed, by `cause` (also `__cause__`); `results` are
    those of the steps that had one, `errors` what each failing step, or its undo, said last.
    """

    saga: str
    id: str
    step: str
    done: tuple[str, ...]
    undone: tuple[str, ...]
    parked: tuple[str, ...]
    pending: tuple[str, ...]
    results: dict[str, Any]
    errors: dict[str, str]
    cause: BaseException | None

    def __init__(
        self,
        saga: str = "",
        id: str = "",
        step: str = "",
        *,
        done: tuple[str, ...] = (),
        undone: tuple[str, ...] = (),
        parked: tuple[str, ...] = (),
        pending: tuple[str, ...] = (),
        results: dict[str, Any] | None = None,
        errors: dict[str, str] | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(
            saga=saga,
            id=id,
            step=step,
            done=done,
            undone=undone,
            parked=parked,
            pending=pending,
            results=results or {},
            errors=errors or {},
            cause=cause,
        )
        self.__cause__ = cause

    def describe(self) -> str:
        what = f"saga {self.saga!r} failed at step {self.step!r}"
        if self.cause is not None:
            what += f" ({type(self.cause).__name__})"
        if self.parked:
            return (
                f"{what}; {', '.join(self.parked)} went on failing and is parked: see to it, then "
                "call resume(error.id)"
            )
        if self.pending:
            return f"{what}; {', '.join(self.pending)} is not settled yet: recover() goes on"
        return f"{what}; what was done is undone: {', '.join(self.undone) or 'nothing was'}"

    def __reduce__(self) -> tuple[Any, ...]:
        facts = dict(self.__dict__)
        try:
            pickle.loads(pickle.dumps(self.cause))
        except Exception as fault:  # the cause's own code runs in here
            text = f"{self.cause} (can't be pickled: {type(fault).__name__})"
            facts["cause"] = SagaStepError(self.step, type(self.cause).__qualname__, text)
        try:
            pickle.loads(pickle.dumps(self.results))
        except Exception:  # a result's own code runs in here
            facts["results"] = {}
        return _rebuild, (type(self), facts)


class SagaNotFound(RetrySafeError, LookupError):
    """No saga of this id: it was never run, or it ended longer ago than it is kept."""

    saga: str
    id: str

    def __init__(self, saga: str = "", id: str = "") -> None:
        super().__init__(saga=saga, id=id)

    def describe(self) -> str:
        return f"saga {self.saga!r} has no run of this id; call run(id, …) to start one"


class SagaChanged(RetrySafeError):
    """A stored saga that the steps of this program can't go on with. Nothing was run."""

    saga: str
    id: str
    reason: str

    def __init__(self, saga: str = "", id: str = "", reason: str = "") -> None:
        super().__init__(saga=saga, id=id, reason=reason)

    def describe(self) -> str:
        return (
            f"a stored run of saga {self.saga!r} was begun by another version of it "
            f"({self.reason}); resume it with that version, or add what is missing"
        )


class OutOfStock(RetrySafeError):
    """A reservation asked for more of an item than is left. Nothing is held."""

    item: str
    asked: int
    left: int

    def __init__(self, item: str = "", asked: int = 0, left: int = 0) -> None:
        super().__init__(item=item, asked=asked, left=left)

    def describe(self) -> str:
        return f"{self.asked} of {self.item!r} were asked for and {self.left} are left"


class ReservationExpired(RetrySafeError):
    """A hold that is no more: it expired, or was released. Its quantity is back in stock."""

    item: str
    holder: str

    def __init__(self, item: str = "", holder: str = "") -> None:
        super().__init__(item=item, holder=holder)

    def describe(self) -> str:
        return f"the hold on {self.item!r} expired or was released; hold it anew, then confirm"


class ReservationConfirmed(RetrySafeError):
    """A hold that can't be released: it was confirmed, and is no hold any more."""

    item: str
    holder: str

    def __init__(self, item: str = "", holder: str = "") -> None:
        super().__init__(item=item, holder=holder)

    def describe(self) -> str:
        return (
            f"what was held of {self.item!r} is confirmed; to give it back, add it under an id of "
            "that return"
        )


class UnknownItem(RetrySafeError, LookupError):
    """No stock was ever said for this item, or it was not touched for longer than it is kept."""

    item: str

    def __init__(self, item: str = "") -> None:
        super().__init__(item=item)

    def describe(self) -> str:
        return f"nothing is known of the stock of {self.item!r}; say how much there is: stock(…)"


class BreakerOpen(RetrySafeError):
    """The breaker refuses the call; the next one may be let through after `retry_after` s."""

    retryable = True
    name: str
    retry_after: float

    def __init__(self, name: str = "", retry_after: float = 0.0) -> None:
        super().__init__(name=name, retry_after=retry_after)

    def describe(self) -> str:
        return f"the breaker {self.name!r} is open; ask again in {self.retry_after:g} s"


class StepFailed(RetrySafeError):
    """The producer said that the step failed. `retryable` is its own word; None: it has none."""

    step: str
    server: str
    message: str
    retryable: bool | None  # type: ignore[assignment]  # None: the producer didn't say

    def __init__(self, step: str, server: str, message: str, retryable: bool | None = None) -> None:
        super().__init__(step=step, server=server, message=message, retryable=retryable)

    def describe(self) -> str:
        return f"step {self.step!r} failed on {self.server!r}: {self.message}"


class ProtocolError(RetrySafeError):
    """A payload that breaks the contract. `raw` (bytes) is untrusted: it is in no message."""

    step: str
    server: str
    reason: str
    raw: bytes

    def __init__(self, step: str, server: str, reason: str, raw: bytes = b"") -> None:
        super().__init__(step=step, server=server, reason=reason, raw=raw)

    def describe(self) -> str:
        return f"the result of step {self.step!r} from {self.server!r} is malformed: {self.reason}"

    def __repr__(self) -> str:
        return f"ProtocolError({self.describe()!r})"


class AlreadyTaken(RetrySafeError):
    """Another reader took this result; it can't be read twice in mode `take`."""

    job_id: str

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id=job_id)

    def describe(self) -> str:
        return "the result was already taken by another reader"


class JobTaken(RetrySafeError):
    """Another consumer goes on with this job's step, as attempt `attempt`: leave it alone."""

    job_id: str
    step: str
    attempt: int

    def __init__(self, job_id: str, step: str, attempt: int) -> None:
        super().__init__(job_id=job_id, step=step, attempt=attempt)

    def describe(self) -> str:
        return (
            f"step {self.step!r} of job {self.job_id!r} is at attempt {self.attempt}, in other "
            "hands: acknowledge the message and leave the job to them"
        )


class JobGivenUp(RetrySafeError):
    """The job's step failed for good before; it is not tried again."""

    job_id: str
    step: str

    def __init__(self, job_id: str, step: str) -> None:
        super().__init__(job_id=job_id, step=step)

    def describe(self) -> str:
        return f"step {self.step!r} of job {self.job_id!r} was given up; it is not tried again"


class ResultTimeout(RetrySafeError, TimeoutError):
    """No result within `timeout` seconds; `store_errors` look-ups failed on the way."""

    job_id: str
    timeout: float
    store_errors: int

    def __init__(self, job_id: str, timeout: float, store_errors: int = 0) -> None:
        super().__init__(job_id=job_id, timeout=timeout, store_errors=store_errors)

    def describe(self) -> str:
        return f"no result within {self.timeout:g} s ({self.store_errors} look-ups failed)"


def is_terminal(error: BaseException) -> bool:
    """Whether a result did arrive, or was taken: waiting longer can't help.

    Looks at what `error` was raised from, or while handling, and into exception groups. True for
    StepFailed, ProtocolError, AlreadyTaken (S1).
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left and len(seen) < _MOST_LOOKED_AT:
        at = left.pop()
        if at is None or id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, StepFailed | ProtocolError | AlreadyTaken):
            return True
        left += [at.__context__ if not at.__suppress_context__ else None, at.__cause__]
        if isinstance(at, BaseExceptionGroup):
            left += at.exceptions
    return False
