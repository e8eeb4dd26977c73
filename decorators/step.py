"""`step`: a part of keyed work that is recorded by itself, and skipped when the work runs again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, overload

from retrysafe.codec import NO_ANNOTATION, Codec, ResultCodec, codec_for, custom_codec
from retrysafe.context import RequestContext
from retrysafe.decorators.annotations import locals_of_caller
from retrysafe.decorators.plan import Options, Plan
from retrysafe.decorators.running import work, work_async
from retrysafe.decorators.wrapping import FunctionWrapper
from retrysafe.errors import NotEncodable, RecordCorrupt, ResultNotKept
from retrysafe.events import Event, emit
from retrysafe.receipts import AsyncHeld, Call, Held
from retrysafe.records import Record
from retrysafe.steps import (
    async_step_receipts,
    check_arguments,
    keyed_work,
    step_call,
    step_receipts,
)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Step(Generic[T]):
    """One step in one run. `done`: an earlier run did it, and `result` is what that one set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self.result: T = None  # type: ignore[assignment]  # what a step without a result records


class StepManager(Generic[T]):
    """What `step(name)` returns: a context manager of both colours, and a decorator."""

    def __init__(self, name: str, codec: ResultCodec | None) -> None:
        self._name = name
        self._own_codec = codec
        self._codec = codec or codec_for(NO_ANNOTATION)
        self._step: Step[T] | None = None
        self._held: Any = None
        self._ttl = 0.0
        self._working: AbstractContextManager[RequestContext] | None = None

    # As a context manager.

    def __enter__(self) -> Step[T]:
        self._refuse_reentry()
        context = keyed_work(self._name)
        if context is None:
            return self._entered(None, 0.0)
        receipts = step_receipts(context)
        held = receipts.begin(step_call(context, self._name))
        return self._entered(held, receipts.policy.ttl_for(None))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        step, held = self._left()
        if held is None:
            return
        if error is None:
            won = held.finish(self._payload(step, held), self._ttl)
            if won is not None:
                self._read(step, won)
        elif isinstance(error, Exception):
            held.release()
        else:
            held.interrupt()

    async def __aenter__(self) -> Step[T]:
        self._refuse_reentry()
        context = keyed_work(self._name)
        if context is None:
            return self._entered(None, 0.0)
        receipts = async_step_receipts(context)
        held = await receipts.begin(step_call(context, self._name))
        return self._entered(held, receipts.policy.ttl_for(None))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        step, held = self._left()
        if held is None:
            return
        if error is None:
            won = await held.finish(self._payload(step, held), self._ttl)
            if won is not None:
                self._read(step, won)
        elif isinstance(error, Exception):
            await held.release()
        else:
            await held.interrupt()

    def _refuse_reentry(self) -> None:
        if self._step is not None:
            raise RuntimeError(f"step {self._name!r} is entered already: make one for each block")

    def _entered(self, held: Held | AsyncHeld | Record | None, ttl: float) -> Step[T]:
        step: Step[T] = Step(self._name)
        if isinstance(held, Record):
            self._read(step, held)
        elif held is not None:
            self._held, self._ttl = held, ttl
            self._working = held.working()
            self._working.__enter__()
        self._step = step
        return step

    def _left(self) -> tuple[Step[T], Any]:
        step, held, working = self._step, self._held, self._working
        self._step = self._held = self._working = None
        if working is not None:
            working.__exit__(None, None, None)
        assert step is not None
        return step, held

    def _payload(self, step: Step[T], held: Held | AsyncHeld) -> bytes | None:
        try:
            payload, step.result = self._codec.pack(step.result)
        except NotEncodable as error:
            emit(Event("result-not-kept", held.name, detail=error.what))
            return None
        return payload

    def _read(self, step: Step[T], record: Record) -> None:
        if record.payload is None:
            raise ResultNotKept()
        try:
            step.result = self._codec.unpack(record.payload)
        except NotEncodable as error:
            raise RecordCorrupt("", error.what) from error
        step.done = True

    # As a decorator.

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        plan = Plan(function, Options(), locals_of_caller(1), self._own_codec)
        run = _run_async if plan.is_async else _run
        return FunctionWrapper(function, functools.partial(run, self._name, plan))


def _call_of(
    name: str, plan: Plan, context: RequestContext, instance: Any, args: Any, kwargs: Any
) -> Call:
    if plan.receiver is not None and instance is not None:
        args = (instance, *args)
    try:
        key = plan.call((*plan.leading, *args), kwargs).key
    except NotEncodable:
        key = "?"  # what can't be compared isn't
    check_arguments(context, name, key)
    return step_call(context, name)


def _run(name: str, plan: Plan, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    context = keyed_work(name)
    if context is None:
        return wrapped(*args, **kwargs)
    call = _call_of(name, plan, context, instance, args, kwargs)
    receipts = step_receipts(context)
    held = receipts.begin(call)
    if isinstance(held, Record):
        return plan.answer(receipts, call, held)
    return work(plan, receipts, call, held, functools.partial(wrapped, *args, **kwargs))


async def _run_async(
    name: str, plan: Plan, wrapped: Any, instance: Any, args: Any, kwargs: Any
) -> Any:
    context = keyed_work(name)
    if context is None:
        return await wrapped(*args, **kwargs)
    call = _call_of(name, plan, context, instance, args, kwargs)
    receipts = async_step_receipts(context)
    held = await receipts.begin(call)
    if isinstance(held, Record):
        return plan.answer(receipts, call, held)
    return await work_async(plan, receipts, call, held, functools.partial(wrapped, *args, **kwargs))


@overload
def step(name: str, /, *, codec: Codec | None = None) -> StepManager[Any]: ...


@overload
def step(name: str, /, *, type: type[T]) -> StepManager[T]: ...


def step(name: str, /, *, type: Any = NO_ANNOTATION, codec: Codec | None = None) -> Any:
    """A part of keyed work (an idempotent function, the handler of a request with a key) that has
    a receipt of its own, under `<key>/<name>`. When the work runs again, a step that was done is
    not: its recorded result is used.

    As a decorator (the result by the function's annotation; a step that was done isn't called)::

        @step("charge")
        async def charge(order: Order) -> Charge: ...

    As a block. Python can't skip a block, so it asks whether it was done::

        async with step("charge", type=Charge) as s:
            if not s.done:
                s.result = await bank.charge(order)
        print(s.result)

    name: one for each step of the work: two steps of one name are one step. In a loop, name them
        apart: `step(f"charge-{order.id}")`. A decorated step that is called twice in one run with
        different arguments raises FingerprintMismatch.
    type: what `s.result` is. Without it: JSON-like results.
    codec: an object with `encode` and `decode`, in place of the type.

    An exception in it releases the step, as it does the work. Raises NoKeyedWork outside keyed
    work, ResultNotKept where the step is done and its result couldn't be stored, and what
    `@idempotent` raises; NotEncodable (here) for a type that can't be stored.
    """
    if not isinstance(name, str) or not name:
        raise TypeError('a step has a name: step("charge")')
    own: ResultCodec | None = None
    if codec is not None:
        own = custom_codec(codec)
    elif type is not NO_ANNOTATION:
        own = codec_for(type)
    return StepManager(name, own)
