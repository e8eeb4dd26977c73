"""The steps of a saga as they are declared, checked before anything runs (S2: steps that can't be
undone come last)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrysafe.codec import NO_ANNOTATION, ResultCodec
from retrysafe.retrying import RetryPolicy
from retrysafe.saga_data import annotation_or_none, annotations_of, value_codec
from retrysafe.units import check_duration

__all__ = ["Plan", "SagaStep", "is_async", "made_step"]


@dataclass(frozen=True, slots=True)
class SagaStep:
    """One step, as declared. See `Saga.step`."""

    name: str
    do: Callable[..., Any]
    undo: Callable[..., Any] | None
    pivot: bool
    retry: RetryPolicy
    tolerant: bool
    fails: Callable[[Any], bool] | None
    reserves: str | None
    hold: float | None
    codec: ResultCodec = field(repr=False)
    arguments: Mapping[str, Any] = field(repr=False)

    @property
    def final(self) -> bool:
        """Once it is done, the saga can't go back."""
        return self.pivot or self.undo is None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def made_step(
    do: Any,
    *,
    name: str | None,
    undo: Any,
    pivot: bool,
    retry: RetryPolicy,
    tolerant: bool,
    fails: Any,
    reserves: str | None,
    hold: float | None,
    local: Mapping[str, Any],
) -> SagaStep:
    """A checked step. Raises TypeError, ValueError, or NotEncodable for a result that can't be
    stored."""
    _callable("a step", do)
    name = getattr(do, "__name__", "") if name is None else name
    if not isinstance(name, str) or not name or name == "<lambda>":
        raise TypeError(f"a step has a name: @saga.step(name=…), not {name!r}")
    if undo is not None:
        _callable(f"the undo of step {name!r}", undo)
        _binds(undo, 2, f"the undo of step {name!r} is called as undo(ctx, data)")
    for what, flag in (("pivot", pivot), ("tolerant", tolerant)):
        if not isinstance(flag, bool):
            raise TypeError(f"{what} of step {name!r} takes True or False, not {flag!r}")
    if not isinstance(retry, RetryPolicy):
        raise TypeError(f"retry of step {name!r} takes a RetryPolicy, not {retry!r}")
    if fails is not None:
        _callable(f"fails of step {name!r}", fails)
    if (reserves is None) != (hold is None):
        raise ValueError(
            f"step {name!r}: reserves= and hold= (seconds) go together: what is scarce is not held "
            "without an end"
        )
    if hold is not None:
        hold = check_duration(hold)
        if not isinstance(reserves, str) or not reserves:
            raise TypeError(f"reserves of step {name!r} names what it holds, not {reserves!r}")
    found = annotations_of(do, local)
    return SagaStep(
        name=name,
        do=do,
        undo=undo,
        pivot=pivot,
        retry=retry,
        tolerant=tolerant,
        fails=fails,
        reserves=reserves,
        hold=hold,
        codec=value_codec(annotation_or_none(found, "return")),
        arguments=found,
    )


class Plan:
    """All steps of a saga."""

    def __init__(self, saga: str) -> None:
        self.saga = saga
        self.steps: list[SagaStep] = []
        self._codecs: dict[int, ResultCodec] = {}
        self._annotations: dict[int, Any] = {}

    def add(self, step: SagaStep) -> None:
        """Raises ValueError for a step that can't stand where it is."""
        if any(each.name == step.name for each in self.steps):
            raise ValueError(f"saga {self.saga!r} has two steps named {step.name!r}: name= one")
        if step.undo is not None:
            stuck = [each for each in self.steps if each.undo is None and not each.pivot]
            if stuck:
                raise ValueError(
                    f"step {step.name!r} can be undone and comes after {stuck[0].name!r}, which "
                    "can't: put steps without an undo last, or say pivot=True there (once it is "
                    "done the saga only goes forward)"
                )
        positions = self._positions(step)
        for at, annotation in positions.items():
            known = self._annotations.get(at, NO_ANNOTATION)
            if known is not NO_ANNOTATION and known != annotation:
                raise TypeError(
                    f"step {step.name!r} takes {annotation!r} as argument {at + 1}, another step "
                    f"takes {known!r}: all steps get the same arguments"
                )
        codecs = {at: value_codec(annotation) for at, annotation in positions.items()}
        self._holds_end(step)
        self._annotations.update(positions)
        self._codecs.update(codecs)
        self.steps.append(step)

    def codec(self, at: int) -> ResultCodec:
        """How the argument at this position (from 0) is stored."""
        return self._codecs.get(at) or value_codec(NO_ANNOTATION)

    def check_call(self, args: Sequence[Any], colour: bool) -> None:
        """Raises before anything runs: ValueError for no steps, TypeError for other arguments, or
        an async step where there is no event loop."""
        if not self.steps:
            raise ValueError(f"saga {self.saga!r} has no steps: add some by @saga.step")
        for step in self.steps:
            _binds(step.do, 1 + len(args), f"step {step.name!r} can't be called so")
        self.check_colour(colour)

    def check_colour(self, colour: bool) -> None:
        """Raises TypeError for an async step or undo where there is no event loop (False)."""
        if colour:
            return
        for step in self.steps:
            if is_async(step.do) or (step.undo is not None and is_async(step.undo)):
                raise TypeError(
                    f"step {step.name!r} of saga {self.saga!r} is async: await run(…), "
                    "resume(…) or recover() in place of their sync forms"
                )

    def _positions(self, step: SagaStep) -> dict[int, Any]:
        parameters = list(inspect.signature(step.do).parameters.values())[1:]
        found: dict[int, Any] = {}
        for at, each in enumerate(parameters):
            if each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
                break
            annotation = annotation_or_none(step.arguments, each.name)
            if annotation is not NO_ANNOTATION:
                found[at] = annotation
        return found

    def _holds_end(self, step: SagaStep) -> None:
        # S2: long waits are fine as long as nothing scarce is held meanwhile.
        longest = step.retry.deadline
        for at, each in enumerate(self.steps):
            if each.hold is None:
                continue
            waits = [later.retry.deadline for later in self.steps[at + 1 :]] + [longest]
            total = sum(wait for wait in waits if wait is not None)
            if None in waits or total > each.hold:
                raise ValueError(
                    f"step {each.name!r} holds {each.reserves!r} for {each.hold:g} s, and the "
                    f"retries up to step {step.name!r} may take "
                    f"{'for ever' if None in waits else f'{total:g} s'}: shorten their "
                    "RetryPolicy.deadline, or reserve later"
                )


def _callable(what: str, function: Any) -> None:
    if not callable(function) or isinstance(function, type | classmethod | staticmethod):
        raise TypeError(f"{what} is a function, not {function!r}")
    for each in (function, getattr(function, "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise TypeError(f"{what} is a generator: return the result in place of yielding it")


def _binds(function: Callable[..., Any], count: int, what: str) -> None:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None
    except ValueError:
        return  # a builtin that has no signature
