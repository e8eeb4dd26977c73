"""What keyed work makes of its key: the receipts of its steps, the keys of its outbound calls.

A step's receipt is `<key>/<step>`: one for each name in one keyed work. It is the surrounding
work's receipt that decides whether the work runs again, so a step whose owner died is simply run
again when the work is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from retrysafe import keys
from retrysafe.context import RequestContext, current_request
from retrysafe.errors import FingerprintMismatch, NoKeyedWork
from retrysafe.receipts import AsyncReceipts, Call, Receipts

STEP_SCOPE = "retrysafe:step"

_PROTECTED: Any = object()
# The context in which work runs that the user let run without protection.
_unprotected: ContextVar[Any] = ContextVar("retrysafe_unprotected", default=_PROTECTED)


@contextmanager
def unprotected() -> Iterator[None]:
    """Work within the block runs without a receipt, by the user's choice (`on_store_error="run"`,
    `RETRYSAFE_DISABLED`): its steps run too, and are not recorded."""
    token = _unprotected.set(current_request())
    try:
        yield
    finally:
        _unprotected.reset(token)


def keyed_work(step: str) -> RequestContext | None:
    """The keyed work that a step belongs to; None in work that runs unprotected.

    Raises NoKeyedWork where there is none: a step that nobody records would run twice unnoticed.
    """
    context = current_request()
    if _unprotected.get() is context:
        return None
    if context is None or context.key is None or context.receipts is None:
        raise NoKeyedWork(step)
    return context


def step_call(context: RequestContext, step: str) -> Call:
    """What a step asks of its receipt."""
    return Call(f"{context.key}/{step}", STEP_SCOPE, request_id=context.request_id)


def check_arguments(context: RequestContext, step: str, arguments: str) -> None:
    """Refuse a second call of one step, in one run, with other arguments: it would be answered
    with the first one's result. Raises FingerprintMismatch."""
    if context.next_call(f"step {step}") != context.next_call(f"step {step} {arguments}"):
        raise FingerprintMismatch(keys.derive(context.key or "", step))


def step_receipts(context: RequestContext) -> Receipts:
    """The receipts of the surrounding work's steps, for threads."""
    around = context.receipts
    return Receipts(around.store, _policy(around.policy), around.max_waiters)


def async_step_receipts(context: RequestContext) -> AsyncReceipts:
    """The receipts of the surrounding work's steps, for coroutines."""
    around = context.receipts
    return AsyncReceipts(around.store, _policy(around.policy), around.max_waiters)


def outbound_key(context: RequestContext, name: str) -> str | None:
    """The idempotency key of an outbound call made in keyed work; None outside of it.

    `name` says which call it is (method and URL, say). Calls of one name are counted in their
    order, so a re-run sends the same keys. Ask once for a call, not once for each attempt.
    """
    if context.key is None:
        return None
    return keys.derive(context.key, "call", name, context.next_call(f"call {name}"))


def _policy(policy: Any) -> Any:
    # A recovery function knows the work, not its steps.
    return replace(policy, on_abandoned="rerun") if callable(policy.on_abandoned) else policy
