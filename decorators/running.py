"""The work of a receipt that is ours: once in each colour, each path ends the receipt once.

A result is finished, an exception releases, what interrupts (a cancelled task, KeyboardInterrupt,
SystemExit) leaves the receipt abandoned: whether the work took effect is unknown.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from retrysafe.decorators.plan import Plan
from retrysafe.policy import Recovered
from retrysafe.receipts import AsyncHeld, AsyncReceipts, Call, Held, Receipts


def work(
    plan: Plan, receipts: Receipts, call: Call, held: Held, function: Callable[[], Any]
) -> Any:
    """Do the work on the caller's own thread, and record what comes of it."""
    ttl = receipts.policy.ttl_for(None)
    try:
        recovered = _recovered(plan.recover(receipts.policy, held))
    except BaseException:
        held.interrupt()  # still nobody knows what the dead call did
        raise
    try:
        if recovered is not None:
            value = recovered.result
        else:
            with held.working():
                value = function()
            if inspect.isawaitable(value):
                _close(value)
                raise TypeError(
                    f"{plan.owner} is no async function but returned an awaitable: decorate the "
                    "async function itself"
                )
    except Exception as error:
        if not plan.errors.wants(error):
            held.release()
            raise
        won = held.finish(plan.pack_error(held, error), ttl)
        if won is None:
            raise
        return plan.answer(receipts, call, won)
    except BaseException:
        held.interrupt()
        raise
    if held.control.decision is False:
        held.release()
        return value
    payload, answer = plan.pack(held, value)
    won = held.finish(payload, ttl)
    return answer if won is None else plan.answer(receipts, call, won)


async def work_async(
    plan: Plan,
    receipts: AsyncReceipts,
    call: Call,
    held: AsyncHeld,
    function: Callable[[], Awaitable[Any]],
) -> Any:
    """Do the work in the caller's own task, and record what comes of it."""
    ttl = receipts.policy.ttl_for(None)
    try:
        recovered = plan.recover(receipts.policy, held)
        if inspect.isawaitable(recovered):
            recovered = await recovered
        recovered = _recovered(recovered)
    except BaseException:
        await held.interrupt()  # still nobody knows what the dead call did
        raise
    try:
        if recovered is not None:
            value = recovered.result
        else:
            with held.working():
                value = await function()
    except Exception as error:
        if not plan.errors.wants(error):
            await held.release()
            raise
        won = await held.finish(plan.pack_error(held, error), ttl)
        if won is None:
            raise
        return plan.answer(receipts, call, won)
    except BaseException:
        await held.interrupt()
        raise
    if held.control.decision is False:
        await held.release()
        return value
    payload, answer = plan.pack(held, value)
    won = await held.finish(payload, ttl)
    return answer if won is None else plan.answer(receipts, call, won)


def _recovered(answer: Any) -> Recovered | None:
    if answer is None or isinstance(answer, Recovered):
        return answer
    _close(answer)
    raise TypeError(f"on_abandoned takes Recovered(result) or None, not {answer!r}")


def _close(awaitable: Any) -> None:
    if inspect.iscoroutine(awaitable):
        awaitable.close()
