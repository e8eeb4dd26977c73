"""`@circuit_breaker("name")`: every call of one function goes through a breaker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType
from typing import Any, TypeVar, cast

from retrysafe.breaker import BreakerPolicy, CircuitBreaker, named
from retrysafe.breaker_local import LocalCore
from retrysafe.breaker_permit import Permit
from retrysafe.breaker_states import Verdict
from retrysafe.decorators.wrapping import FunctionWrapper

__all__ = ["circuit_breaker"]

F = TypeVar("F", bound=Callable[..., Any])

_LAZY = frozenset({CoroutineType, GeneratorType, AsyncGeneratorType})


def circuit_breaker(
    name: str = "",
    policy: BreakerPolicy | None = None,
    *,
    breaker: CircuitBreaker | None = None,
    shared: Any = None,
    classify: Callable[[Any], Any] | None = None,
    classify_result: Callable[[Any], Any] | None = None,
    **fields: Any,
) -> Callable[[F], F]:
    """Guard a sync or async function (or method) with the breaker of that name in this process.

    The same name is the same breaker everywhere in the process. The first use brings its policy
    (a `BreakerPolicy`, or its fields as keywords, seconds and shares); a later one may leave it
    out. `breaker=` takes a `CircuitBreaker` in place of a name. `classify` judges exceptions and
    `classify_result` returned values: each returns an `Outcome` or a `Classification`.

    The call raises BreakerOpen while the breaker refuses. Decorating raises TypeError for a
    generator (its work would run outside the guard), ValueError where the name already has another
    policy.
    """
    if breaker is None:
        if not isinstance(name, str) or not name:
            raise TypeError('name the breaker: @circuit_breaker("payments")')
        breaker = named(name, policy, shared=shared, classify=classify, **fields)
    elif name or policy is not None or shared is not None or classify is not None or fields:
        raise TypeError("breaker= brings its own name, policy, store and classifier: give it alone")
    guard = _Guard(breaker, classify_result)

    def decorate(function: F) -> F:
        _refuse_generators(function)
        make = guard.around_async if _is_async(function) else guard.around
        if isinstance(function, FunctionType):
            return cast(F, functools.wraps(function)(make(function)))

        def work(function: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            return make(function)(*args, **kwargs)

        return cast(F, FunctionWrapper(function, work))

    return decorate


class _Guard:
    """Runs calls between a permit and its verdict."""

    def __init__(
        self, breaker: CircuitBreaker, classify_result: Callable[[Any], Any] | None
    ) -> None:
        self._breaker = breaker
        self._classify_result = classify_result

    @property
    def _quick(self) -> LocalCore | None:
        """The core of a breaker whose permits, while it is free, say nothing but their era: then
        one is made only where there is something to tell."""
        core = self._breaker._core
        if (
            isinstance(core, LocalCore)
            and core.policy.slow_call is None
            and self._classify_result is None
        ):
            return core
        return None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A sync function, guarded."""
        quick, acquire = self._quick, self._breaker._core.acquire

        def guarded(*args: Any, **kwargs: Any) -> Any:
            permit = era = None
            if quick is None or not (era := quick._state).free:
                permit = acquire()
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self._failed(permit or Permit(self._breaker._core, era), error)
                raise
            if permit is None and quick is not None:
                if quick._state is era and era.calm and type(result) not in _LAZY:
                    return result
                permit = Permit(quick, era)
            assert permit is not None
            if type(result) in _LAZY:
                return self._lazy(result, permit)
            self._settle(permit, result)
            return result

        return guarded

    def around_async(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """An async function, guarded."""
        core, quick = self._breaker._core, self._quick

        async def guarded(*args: Any, **kwargs: Any) -> Any:
            if not core.here:
                permit = await core.aacquire()
                return await self._finish(function(*args, **kwargs), permit)
            held = era = None
            if quick is None or not (era := quick._state).free:
                held = core.acquire()
            try:
                result = await function(*args, **kwargs)
            except BaseException as error:
                self._failed(held or Permit(core, era), error)
                raise
            if held is None and quick is not None and quick._state is era and era.calm:
                return result
            self._settle(held or Permit(core, era), result)
            return result

        return guarded

    def _failed(self, permit: Permit, error: BaseException) -> None:
        permit._core.settle(permit, self._breaker.judge(error))

    async def _finish(self, work: Coroutine[Any, Any, Any], permit: Permit) -> Any:
        try:
            result = await work
        except BaseException as error:
            await permit._core.asettle(permit, self._breaker.judge(error))
            raise
        await permit._core.asettle(permit, self._judge(result))
        return result

    def _settle(self, permit: Permit, result: object) -> None:
        if self._classify_result is None:
            permit._core.succeed(permit)
        else:
            permit._core.settle(permit, self._judge(result))

    def _judge(self, result: object) -> Verdict:
        if self._classify_result is None:
            return Verdict.SUCCESS
        return self._breaker.judge_result(result, self._classify_result)

    def _lazy(self, result: Any, permit: Permit) -> Any:
        """A plain function that answers with work not yet done: guard a coroutine to its end,
        refuse a generator."""
        permit.release()
        if isinstance(result, CoroutineType):
            return self._later(result)
        if isinstance(result, GeneratorType):
            result.close()
        raise TypeError(
            "the guarded function returned a generator, whose work would run outside the breaker; "
            "use breaker.acquire() inside the generator"
        )

    async def _later(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            permit = await self._breaker.aacquire()
        except BaseException:
            work.close()
            raise
        return await self._finish(work, permit)


def _target(function: Any) -> Any:
    return function.__func__ if isinstance(function, classmethod | staticmethod) else function


def _is_async(function: Any) -> bool:
    target = _target(function)
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(target.__call__)


def _refuse_generators(function: Any) -> None:
    target = _target(function)
    for each in (target, target.__call__):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(
                f"{getattr(target, '__qualname__', target)!s} is a generator: its work would run "
                "outside the breaker; use breaker.acquire() inside it instead"
            )
