"""The circuit breaker: it answers one question, whether the endpoint is ill (S1)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError as FutureCancelled
from types import TracebackType
from typing import Any, cast
from weakref import WeakKeyDictionary

from retrysafe.breaker_blocks import enter, leave
from retrysafe.breaker_local import LocalCore
from retrysafe.breaker_permit import Core, Permit
from retrysafe.breaker_policy import FIELDS, BreakerPolicy
from retrysafe.breaker_shared import SharedCore
from retrysafe.breaker_states import Verdict
from retrysafe.classify import Classification, Outcome, classify
from retrysafe.errors import BreakerOpen, ReceiptError
from retrysafe.events import Event, emit
from retrysafe.stores.base import Store

__all__ = ["BreakerPolicy", "CircuitBreaker", "Permit", "named"]

Classify = Callable[[Any], "Classification | Outcome"]


_VERDICTS = {
    Outcome.SUCCESS: Verdict.SUCCESS,
    Outcome.NOT_READY: Verdict.ANSWERED,
    Outcome.REJECTED: Verdict.ANSWERED,
    Outcome.THROTTLED: Verdict.RELEASE,
    Outcome.TRANSIENT: Verdict.FAILURE,
    Outcome.PROTOCOL: Verdict.FAILURE,
    Outcome.UNKNOWN: Verdict.FAILURE,
}

_REJECTED = {True: Verdict.ANSWERED, None: Verdict.RELEASE, False: Verdict.FAILURE}

# Said by this library about itself or about another endpoint; and by a future that never ran.
_NOT_ITS_FAULT = (BreakerOpen, ReceiptError, FutureCancelled)

_memory: WeakKeyDictionary[Any, dict[str, LocalCore]] = WeakKeyDictionary()
_names: dict[str, CircuitBreaker] = {}
_guard = threading.Lock()


class CircuitBreaker:
    """Refuses calls to an endpoint that is ill, and finds out by probes when it is well again.

    `with breaker:` and `async with breaker:` take a permit and judge the block's end; one object
    serves any number of threads and tasks at once. A block that ends with an exception is
    classified: REJECTED and NOT_READY are proof of health (`release_as_success`); PROTOCOL,
    TRANSIENT and UNKNOWN are failures; THROTTLED, a cancelled call, any `BaseException` that is no
    `Exception`, and this library's own refusals (`BreakerOpen`, `StoreUnavailable`, …) teach
    nothing (`release`). The exception itself always passes untouched, also the one that trips it.

    A generator that may be closed from another task should use `acquire()`, not a block.

    name: what it guards; in Redis, breakers of one name are one breaker.
    policy: `BreakerPolicy`; by default that of the settings.
    shared: a store; the state is then shared through Redis (with a `memory://` store: by name in
        this process). See `retrysafe.breaker_shared` for what is shared and when.
    classify: judges exceptions in place of `retrysafe.classify`: returns an `Outcome` or a
        `Classification`. One that raises counts as a release, and its error is noted and chained.
    clock, rng: seconds that never go back, and random numbers in [0, 1); for tests.
    """

    def __init__(
        self,
        name: str,
        policy: BreakerPolicy | None = None,
        shared: Store | None = None,
        classify: Classify | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a breaker's name is a text of one character or more, not {name!r}")
        if policy is not None and not isinstance(policy, BreakerPolicy):
            raise TypeError(f"policy takes a BreakerPolicy, not {policy!r}")
        self.name = name
        self.policy = policy or BreakerPolicy()
        self.shared = shared
        self._classify = classify
        local = LocalCore(name, self.policy, clock, rng)
        self._core: Core = local
        if shared is not None:
            here = shared.url.startswith("memory:")
            self._core = _in_memory(shared, local) if here else SharedCore(shared, local)

    def acquire(self) -> Permit:
        """Take a permit for one call. With a shared breaker this may ask Redis, blocking.

        Raises BreakerOpen, whose `retry_after` says in how many seconds to ask again.
        """
        return self._core.acquire()

    async def aacquire(self) -> Permit:
        """The same for async code. Cancelled on the way, it leaves no permit behind."""
        return await self._core.aacquire()

    @property
    def state(self) -> str:
        """`closed`, `open`, `half-open`, `forced-open` or `disabled`, as the next call would meet
        it; reading changes nothing. Shared: as last heard of (asked for where that is too old)."""
        return self._core.look()

    async def astate(self) -> str:
        """`state` for async code with a shared breaker."""
        return await self._core.alook()

    def force_open(self) -> None:
        """Refuse every call until `reset` (or `disable`)."""
        self._core.command("forced-open")

    def disable(self) -> None:
        """Let every call through and learn nothing until `reset` (or `force_open`)."""
        self._core.command("disabled")

    def reset(self) -> None:
        """Closed, with an empty window. Permits given before are stale."""
        self._core.command("closed")

    async def aforce_open(self) -> None:
        await self._core.acommand("forced-open")

    async def adisable(self) -> None:
        await self._core.acommand("disabled")

    async def areset(self) -> None:
        await self._core.acommand("closed")

    def __enter__(self) -> Permit:
        permit = self._core.acquire()
        enter(permit)
        return permit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permit = leave(self._core)
        if permit is None or permit._done:
            return
        if error is None:
            permit._core.succeed(permit)
        else:
            permit._core.settle(permit, self.judge(error))

    async def __aenter__(self) -> Permit:
        core = self._core
        permit = core.acquire() if core.here else await core.aacquire()
        enter(permit)
        return permit

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        permit = leave(self._core)
        if permit is None or permit._done:
            return
        core = permit._core
        if error is None and core.here:
            core.succeed(permit)
        else:
            await core.asettle(permit, Verdict.SUCCESS if error is None else self.judge(error))

    async def asettle(self, permit: Permit, error: BaseException) -> bool:
        """Give back a permit with what `error`, which ended its call, says about the endpoint."""
        return await permit._core.asettle(permit, self.judge(error))

    def judge(self, error: BaseException) -> Verdict:
        """What an exception that ended a call says about the endpoint."""
        if not isinstance(error, Exception) or isinstance(error, _NOT_ITS_FAULT):
            return Verdict.RELEASE
        return self._verdict(self._classify or classify, error)

    def judge_result(self, result: object, classify_result: Classify) -> Verdict:
        """What a returned value says about the endpoint, by the caller's own rule."""
        return self._verdict(classify_result, result)

    def _verdict(self, rule: Classify, subject: object) -> Verdict:
        try:
            word = rule(subject)
            if isinstance(word, Outcome):
                return _VERDICTS[word]
            if word.outcome is Outcome.REJECTED:
                # A definite no is an answer, unless it came from this side (a bug, a certificate
                # that isn't trusted), or from a server that says it is down.
                return _REJECTED[cast("bool | None", word.proves_health)]
            if word.proves_health is True and word.outcome is not Outcome.SUCCESS:
                return Verdict.ANSWERED  # the task failed, not the endpoint, retryable or not
            return _VERDICTS[word.outcome]
        except Exception as fault:
            emit(Event("breaker-classifier-failed", key=self.name, detail=type(fault).__name__))
            if isinstance(subject, BaseException):
                _chain(subject, fault)
            return Verdict.RELEASE

    def __repr__(self) -> str:
        return f"CircuitBreaker({self.name!r})"


def named(
    name: str,
    policy: BreakerPolicy | None = None,
    *,
    shared: Store | None = None,
    classify: Classify | None = None,
    **rules: Any,
) -> CircuitBreaker:
    """This process's breaker of that name, made on first use. `rules` are `BreakerPolicy` fields.

    Raises ValueError where the name is taken by a breaker with other rules, another store or
    another classifier: two that differ can't be one.
    """
    if unknown := rules.keys() - FIELDS:
        raise TypeError(f"BreakerPolicy has no field {', '.join(sorted(unknown))}")
    if rules:
        if policy is not None:
            raise TypeError("give a policy or its fields, not both")
        policy = BreakerPolicy(**rules)
    with _guard:
        breaker = _names.get(name)
        if breaker is None:
            breaker = _names[name] = CircuitBreaker(name, policy, shared, classify)
            return breaker
    for what, given, has in (
        ("policy", policy, breaker.policy),
        ("store", shared, breaker.shared),
        ("classifier", classify, breaker._classify),
    ):
        if given is not None and given != has:
            raise ValueError(
                f"the breaker {name!r} exists with another {what}; "
                f"use another name, or give the {what} in one place"
            )
    return breaker


def _in_memory(store: Store, local: LocalCore) -> LocalCore:
    """The one core of this name in a memory store."""
    with _guard:
        core = _memory.setdefault(store, {}).setdefault(local.name, local)
    if core.policy != local.policy:
        raise ValueError(f"the store already has a breaker {local.name!r} with another policy")
    return core


def _chain(error: BaseException, fault: Exception) -> None:
    """Note the classifier's fault on the error that is on its way, at the end of its causes."""
    fault.__context__ = None
    error.add_note(f"the breaker's classifier failed on this: {fault!r}")
    seen = {id(error), id(fault)}
    last = error
    while last.__context__ is not None and id(last.__context__) not in seen:
        last = last.__context__
        seen.add(id(last))
    if last.__context__ is None and last is not fault:
        last.__context__ = fault
