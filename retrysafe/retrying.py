"""Retries: classify the failure, then decide; every policy ends (S2).

The decisions are `retrysafe.calls.Call`'s; here are the policy and the loops: sync, async, and
those that people write by hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, ParamSpec, TypeVar

from retrysafe.attempt import Attempt
from retrysafe.attempt_history import AttemptFact, attempts_of
from retrysafe.calls import Call, current_attempt
from retrysafe.outcomes import Classification
from retrysafe.retry_policy import PolicyFields, RetryRules

__all__ = [
    "Attempt",
    "AttemptFact",
    "Call",
    "PolicyFields",
    "RetryPolicy",
    "attempts_of",
    "current_attempt",
]

P = ParamSpec("P")
R = TypeVar("R")

_LAZY = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})


class RetryPolicy(RetryRules):
    __doc__ = RetryRules.__doc__
    __slots__ = ()

    def decide(self, verdict: Classification, repeatable: bool) -> bool:
        """Whether this kind of failure is retried at all; attempts, time and budget left aside."""
        return self.important and verdict.retryable(repeatable)

    def begin(self, name: str = "call") -> Call:
        """For clients that run their own loop: `enter` and `leave` around each attempt, then
        `succeeded()`, or `failed(error or answer, repeatable)` and a sleep of what it returns.
        `name` says what is called; derived keys count the calls of one name."""
        return Call(self, name)

    def but(self, **fields: Any) -> RetryPolicy:
        """A copy with other fields."""
        return replace(self, **fields)

    def call(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a sync function, and again while it fails in a way that may pass.

        Raises the last attempt's own exception (see `attempts_of`); TypeError where `fn` is async.
        """
        result = retried(self, fn)(*args, **kwargs)
        if isinstance(result, CoroutineType):
            result.close()
            raise TypeError("this function is async: `await policy.acall(function, …)` retries it")
        return result

    async def acall(self, fn: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for an async function; the waits leave the event loop free."""
        return await aretried(self, fn)(*args, **kwargs)

    def __iter__(self) -> Iterator[Attempt]:
        """`for attempt in policy:` with `with attempt:` as its whole body."""
        call = Call(self, "block")
        attempt: Attempt | None = Attempt(call, 1)
        while attempt is not None:
            yield attempt
            following = attempt._next()
            if following is not None:
                call.sleep(attempt.delay)
            attempt = following

    async def __aiter__(self) -> AsyncIterator[Attempt]:
        """`async for attempt in policy:` with `with attempt:` as its whole body."""
        call = Call(self, "block")
        attempt: Attempt | None = Attempt(call, 1)
        while attempt is not None:
            yield attempt
            following = attempt._next()
            if following is not None:
                await call.asleep(attempt.delay)
            attempt = following


# The loops. They are made once for a function that is decorated: what they need is at hand then.


def retried(
    policy: RetryPolicy,
    fn: Callable[P, R],
    later: Callable[[Any, tuple[Any, ...], dict[str, Any]], R] | None = None,
) -> Callable[P, R]:
    """A sync function that calls `fn`, and again while it fails in a way that may pass.

    later: what is to be done with a result that is work not yet done, and the call's arguments.
    """
    counts = policy.budget is not None

    def retried(*args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(policy, fn)
        while True:
            call.enter()
            try:
                result = fn(*args, **kwargs)
            except Exception as error:
                delay = call.failed(error)
                if delay is None:
                    raise
            else:
                if counts or call.number > 1:
                    call.succeeded()
                if type(result) in _LAZY and later is not None:
                    break
                return result
            finally:
                call.leave()
            call.sleep(delay)
        return later(result, args, kwargs)

    return retried


def aretried(
    policy: RetryPolicy, fn: Callable[P, Awaitable[R]]
) -> Callable[P, Coroutine[Any, Any, R]]:
    """The same for an async function."""
    counts = policy.budget is not None

    async def retried(*args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(policy, fn)
        while True:
            call.enter()
            try:
                result = await fn(*args, **kwargs)
            except Exception as error:
                delay = call.failed(error)
                if delay is None:
                    raise
            else:
                if counts or call.number > 1:
                    call.succeeded()
                return result
            finally:
                call.leave()
            await call.asleep(delay)

    return retried
