"""Every error of retrysafe: picklable, its facts as attributes, its message says what to do."""

from __future__ import annotations

from typing import Any


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


class ResultTimeout(RetrySafeError, TimeoutError):
    """No result within `timeout` seconds; `store_errors` look-ups failed on the way."""

    job_id: str
    timeout: float
    store_errors: int

    def __init__(self, job_id: str, timeout: float, store_errors: int = 0) -> None:
        super().__init__(job_id=job_id, timeout=timeout, store_errors=store_errors)

    def describe(self) -> str:
        return f"no result within {self.timeout:g} s ({self.store_errors} look-ups failed)"
