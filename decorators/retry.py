"""`@retry`: a function that is called again while it fails in a way that may pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CoroutineType, FunctionType, GeneratorType
from typing import Any, TypeVar, Unpack, cast, overload

from retrysafe.decorators.wrapping import FunctionWrapper
from retrysafe.retrying import PolicyFields, RetryPolicy, aretried, retried

__all__ = ["retry"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def retry(policy: F, /) -> F: ...


@overload
def retry(
    policy: RetryPolicy | None = None, **fields: Unpack[PolicyFields]
) -> Callable[[F], F]: ...


def retry(policy: Any = None, **fields: Any) -> Any:
    """Retry a sync or async function or method: `@retry`, `@retry(attempts=3)`, `@retry(policy)`.

    policy: a `RetryPolicy`; by default that of the settings. `fields` are fields of it, and win
    over the policy's.

    To decorate a function says that running it twice does no harm (`idempotent=False` takes that
    back). Only failures that are classified as passing are retried: connections, timeouts,
    throttling; not an error of the program, nor one that nothing is known about (`classify=`, or
    `retrysafe.classify.register`, say more).

    The call raises the last attempt's own exception. Decorating raises TypeError for a generator:
    its work would run outside the retries.
    """
    if callable(policy) or isinstance(policy, classmethod | staticmethod):
        if fields:
            raise TypeError("give the fields alone: @retry(attempts=3)")
        return _decorated(policy, RetryPolicy())
    if policy is not None and not isinstance(policy, RetryPolicy):
        raise TypeError(
            f"@retry takes a RetryPolicy or its fields, such as attempts=3, not {policy!r}"
        )
    chosen = RetryPolicy(**fields) if policy is None else policy.but(**fields)
    return lambda function: _decorated(function, chosen)


def _decorated(function: F, policy: RetryPolicy) -> F:
    target = function.__func__ if isinstance(function, classmethod | staticmethod) else function
    for each in (target, getattr(target, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(
                f"{getattr(target, '__qualname__', target)!s} is a generator: its work would run "
                "outside the retries, and repeat what was delivered; loop inside it instead: "
                "`for attempt in policy: with attempt: …`"
            )
    is_async = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        getattr(target, "__call__", None)  # noqa: B004
    )
    make = _async_form if is_async else _sync_form
    if isinstance(function, FunctionType):
        return cast(F, functools.wraps(function)(make(policy, function)))

    def work(function: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return make(policy, function)(*args, **kwargs)

    return cast(F, FunctionWrapper(function, work))


def _async_form(policy: RetryPolicy, function: Callable[..., Any]) -> Callable[..., Any]:
    return aretried(policy, function)


def _sync_form(policy: RetryPolicy, function: Callable[..., Any]) -> Callable[..., Any]:
    def later(result: Any, args: Any, kwargs: Any) -> Any:
        return _later(policy, result, function, args, kwargs)

    return retried(policy, function, later)


def _later(policy: RetryPolicy, result: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """A plain function answered with work not yet done: retry a coroutine, refuse a generator."""
    if not isinstance(result, CoroutineType):
        if isinstance(result, GeneratorType):
            result.close()
        raise TypeError(
            "the decorated function returned a generator, whose work would run outside the "
            "retries; loop inside it instead: `for attempt in policy: with attempt: …`"
        )
    first = [result]

    def again() -> Any:
        return first.pop() if first else function(*args, **kwargs)

    return policy.acall(again)
