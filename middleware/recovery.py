"""The answer that a recovery function gives for a call whose worker died."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

from asgiref.sync import sync_to_async
from starlette.responses import Response

from retrysafe.policy import Recovered
from retrysafe.records import AbandonedReceipt


async def ask_recovery(function: Callable[..., Any], receipt: AbandonedReceipt) -> Any:
    """What a user's recovery function says, sync or async; a sync one runs in a thread, since it
    may block."""
    if inspect.iscoroutinefunction(function):
        return await function(receipt)
    found = await sync_to_async(function, thread_sensitive=False)(receipt)
    return await found if inspect.isawaitable(found) else found


async def answer_recovered(found: Any, scope: MutableMapping[str, Any], send: Any) -> None:
    """Send `Recovered(response)`: a Starlette response, or `(status, headers, body)`.

    Raises TypeError for anything else: a recovery that can't be read must not pass for "not done".
    """
    if not isinstance(found, Recovered):
        raise TypeError(
            f"on_abandoned returned {type(found).__name__}; it returns Recovered(response), "
            "or None where the work was not done"
        )
    result = found.result
    if isinstance(result, tuple) and len(result) == 3:
        status, headers, body = result
        result = Response(body, status, dict(headers))
    if not isinstance(result, Response):
        raise TypeError("Recovered holds a Starlette response or (status, headers, body)")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    await result(scope, receive, send)
