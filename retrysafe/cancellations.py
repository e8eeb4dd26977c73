"""Whether an error is what the work made of its own cancellation."""

from __future__ import annotations

import asyncio

__all__ = ["was_cancelled"]

_CHAIN = 20  # how far a chain of exceptions is followed


def was_cancelled(error: BaseException, handled: int) -> bool:
    """Whether `error` was raised in answer to a cancellation of the running task that still
    stands: then it is not to be retried, whatever its type.

    handled: the `id` of the exception that the caller was handling before the work began: cleaning
        up after a cancellation may retry.
    """
    at: BaseException | None = error
    for _ in range(_CHAIN):
        if at is None or id(at) == handled:
            return False
        if isinstance(at, asyncio.CancelledError):
            # A timeout within the work takes its cancellation back; one from outside stays.
            return _cancelling()
        at = at.__context__ or at.__cause__
    return False


def _cancelling() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return False
    return task is not None and task.cancelling() > 0
