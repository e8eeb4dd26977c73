"""`@idempotent`: a function that runs once per key, and answers its retries from the record."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import wrapt

from retrysafe.codec import Codec
from retrysafe.decorators.annotations import locals_of_caller
from retrysafe.decorators.arguments import FingerprintSpec, KeySpec
from retrysafe.decorators.plan import Options, Plan
from retrysafe.decorators.running import work, work_async
from retrysafe.decorators.wrapping import FunctionWrapper
from retrysafe.errors import RecordCorrupt, StoreUnavailable
from retrysafe.policy import Recovered
from retrysafe.receipt import Receipt
from retrysafe.receipts import AsyncReceipts, Call, Receipts
from retrysafe.records import AbandonedReceipt, Record
from retrysafe.steps import unprotected
from retrysafe.stores import Store

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Self_ = TypeVar("Self_")

OnAbandoned = Callable[[AbandonedReceipt], Recovered | Awaitable[Recovered | None] | None]


class _Keyed:
    """What is asked of one function's receipts by the arguments that make the key."""

    def forget(self, *args: Any, **kwargs: Any) -> Any:
        """Delete the receipt of a call, whatever its state: the next call runs.

        Takes the arguments of the key (the others may be missing). Returns whether there was a
        receipt; to be awaited on async functions.
        """
        plan, args = self._plan_and_args(args)
        call = Call(plan.arguments.of_key(args, kwargs), plan.scope)
        return plan.receipts().forget(call)

    def receipt(self, *args: Any, **kwargs: Any) -> Any:
        """The receipt of a call, a `retrysafe.Receipt`, or None. Arguments as for `forget`."""
        plan, args = self._plan_and_args(args)
        call = Call(plan.arguments.of_key(args, kwargs), plan.scope)
        receipts = plan.receipts()
        if isinstance(receipts, AsyncReceipts):
            return Receipt.alook(receipts, call)
        return Receipt.look(receipts, call)

    def _plan_and_args(self, args: tuple[Any, ...]) -> tuple[Plan, tuple[Any, ...]]:
        raise NotImplementedError


class _BoundIdempotent(wrapt.BoundFunctionWrapper, _Keyed):  # type: ignore[type-arg]
    """An idempotent method, bound."""

    def _plan_and_args(self, args: tuple[Any, ...]) -> tuple[Plan, tuple[Any, ...]]:
        plan: Plan = self._self_parent._self_plan
        bound_to = getattr(self.__wrapped__, "__self__", None)
        if plan.receiver is not None and bound_to is not None:
            args = (bound_to, *args)
        return plan, (*plan.leading, *args)


class _Idempotent(FunctionWrapper, _Keyed):
    """An idempotent function: it looks like the function it wraps, and pickles by its name."""

    __bound_function_wrapper__ = _BoundIdempotent

    def __init__(self, function: Any, plan: Plan) -> None:
        run = _run_async if plan.is_async else _run
        super().__init__(function, functools.partial(run, plan))
        self._self_plan = plan

    def _plan_and_args(self, args: tuple[Any, ...]) -> tuple[Plan, tuple[Any, ...]]:
        plan: Plan = self._self_plan
        if plan.receiver == "cls" and not (args and isinstance(args[0], type)):
            args = (None, *args)  # Python 3.13 hands a classmethod's attributes out unbound
        return plan, (*plan.leading, *args)


def _call_of(plan: Plan, instance: Any, args: Any, kwargs: Any) -> Call:
    if plan.receiver is not None and instance is not None:
        args = (instance, *args)
    return plan.call((*plan.leading, *args), kwargs)


def _run(plan: Plan, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if plan.disabled():
        with unprotected():
            return wrapped(*args, **kwargs)
    call = _call_of(plan, instance, args, kwargs)
    receipts = plan.receipts()
    assert isinstance(receipts, Receipts)
    try:
        held = receipts.begin(call)
    except RecordCorrupt:
        raise
    except StoreUnavailable as error:
        plan.or_unprotected(receipts, call, error)
        with unprotected():
            return wrapped(*args, **kwargs)
    if isinstance(held, Record):
        return plan.answer(receipts, call, held)
    return work(plan, receipts, call, held, functools.partial(wrapped, *args, **kwargs))


async def _run_async(plan: Plan, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if plan.disabled():
        with unprotected():
            return await wrapped(*args, **kwargs)
    call = _call_of(plan, instance, args, kwargs)
    receipts = plan.receipts()
    assert isinstance(receipts, AsyncReceipts)
    try:
        held = await receipts.begin(call)
    except RecordCorrupt:
        raise
    except StoreUnavailable as error:
        plan.or_unprotected(receipts, call, error)
        with unprotected():
            return await wrapped(*args, **kwargs)
    if isinstance(held, Record):
        return plan.answer(receipts, call, held)
    return await work_async(plan, receipts, call, held, functools.partial(wrapped, *args, **kwargs))


if TYPE_CHECKING:

    class Idempotent(Generic[P, R_co]):
        """The type of an idempotent function: the function's own, with `forget` and `receipt`."""

        __name__: str
        __qualname__: str
        __wrapped__: Callable[P, R_co]

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

        @overload  # a classmethod, on the class and on an object
        def __get__(
            self: Idempotent[Concatenate[type[Self_], Q], R_co], instance: Any, owner: type[Self_]
        ) -> Idempotent[Q, R_co]: ...

        @overload
        def __get__(self, instance: None, owner: Any = None) -> Idempotent[P, R_co]: ...

        @overload
        def __get__(
            self: Idempotent[Concatenate[Self_, Q], R_co], instance: Self_, owner: Any = None
        ) -> Idempotent[Q, R_co]: ...

        def __get__(self, instance: Any, owner: Any = None) -> Any: ...

        def forget(self, *args: Any, **kwargs: Any) -> Any: ...

        def receipt(self, *args: Any, **kwargs: Any) -> Any: ...

else:
    Idempotent = _Idempotent


@overload
def idempotent(function: Callable[P, R], /) -> Idempotent[P, R]: ...


@overload
def idempotent(
    *,
    key: KeySpec = None,
    namespace: str | None = None,
    version: int | str | None = None,
    ttl: float | None = None,
    lease: float | None = None,
    wait: float | None = None,
    on_abandoned: str | OnAbandoned | None = None,
    on_store_error: str | None = None,
    store: Store | str | None = None,
    codec: Codec | None = None,
    keep_errors: type[Exception] | tuple[type[Exception], ...] = (),
    fingerprint: FingerprintSpec = None,
) -> Callable[[Callable[P, R]], Idempotent[P, R]]: ...


def idempotent(
    function: Any = None,
    /,
    *,
    key: KeySpec = None,
    namespace: str | None = None,
    version: int | str | None = None,
    ttl: float | None = None,
    lease: float | None = None,
    wait: float | None = None,
    on_abandoned: str | OnAbandoned | None = None,
    on_store_error: str | None = None,
    store: Store | str | None = None,
    codec: Codec | None = None,
    keep_errors: type[Exception] | tuple[type[Exception], ...] = (),
    fingerprint: FingerprintSpec = None,
) -> Any:
    """Run a function once per key; answer its other calls with the recorded result.

    Sync and async functions, methods and classmethods. Everything is checked when it is applied.

    key: what makes two calls the same: an argument's name, a dotted path (`"order.id"`), several
        of them, or a callable that gets the call's arguments. Without it: all arguments. `self` is
        not in the key unless it has `__retrysafe_key__()` or the key names it.
    namespace: names the key space in place of `module.qualname`; give one before a function is
        renamed or moved, or its earlier calls are forgotten.
    version: one more part of that name: another version shares nothing with this one.
    ttl: seconds that a result answers retries. lease: seconds a silent owner keeps its receipt.
        wait: seconds that a duplicate waits for the call in flight. Defaults: the settings'.
    on_abandoned: what happens to a call whose owner died: `"rerun"`, `"refuse"`, or a callable
        that gets an AbandonedReceipt and returns Recovered(result), or None to run again.
    on_store_error: `"refuse"` (StoreUnavailable) or `"run"` (unprotected, told in an event).
    store: a store, its URL, or None for the settings'.
    codec: an object with `encode` and `decode`, in place of the return annotation.
    keep_errors: exceptions that are results: recorded, and raised again for duplicates. Any other
        releases the receipt.
    fingerprint: what must be equal in two calls of one key: argument names, a callable, `"none"`;
        else all arguments outside the key.

    A call raises InFlight, Reentered, Abandoned, FingerprintMismatch, ResultNotKept,
    StoreUnavailable, RecordCorrupt, and NotEncodable (a TypeError) for an argument that can't be
    part of a key; with each of them nothing was run by this call.
    Raises TypeError, NotEncodable or ValueError when applied to what it can't protect.
    """
    options = Options(
        key=key,
        namespace=namespace,
        version=version,
        ttl=ttl,
        lease=lease,
        wait=wait,
        on_abandoned=on_abandoned,
        on_store_error=on_store_error,
        store=store,
        codec=codec,
        keep_errors=keep_errors,
        fingerprint=fingerprint,
    )
    if function is not None:
        return _Idempotent(function, Plan(function, options, locals_of_caller(1)))

    def apply(function: Any) -> Any:
        return _Idempotent(function, Plan(function, options, locals_of_caller(1)))

    return apply


__all__ = ["Idempotent", "OnAbandoned", "idempotent"]
