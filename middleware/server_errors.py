"""The 500 for an exception nobody handled, with the request's ID on it.

Starlette and FastAPI answer it in a layer that is always outside of every added middleware, with
the server's own `send`: nothing wrapped inside can reach that answer. Sending a 500 from the
inside instead would take the answer away from the user's own handler (`Exception`, 500, debug
page) and from error middleware in between. So that one layer's answers are wrapped, in place.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from inspect import iscoroutinefunction
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrysafe.context import (
    SCOPE_KEY,
    RequestContext,
    context_of,
    entered,
    new_request_id,
    request_id,
    request_id_of_error,
    stamp_error,
)

__all__ = ["answer_server_error", "with_header"]

logger = logging.getLogger("retrysafe")

# Openings of a response, of HTTP and of a websocket (accepted, or denied with a response).
_OPENINGS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_MAX_LAYERS = 100


def with_header(send: Send, name: bytes, value: str) -> Send:
    """`send`, with the header `name` (lower case) set to `value`, once, on whatever opens a
    response."""
    line = (name, value.encode("ascii"))

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] in _OPENINGS:
            headers = message.get("headers") or ()
            others = [pair for pair in headers if pair[0].lower() != name]
            message = {**message, "headers": [*others, line]}
        return send(message)

    return sending


async def answer_server_error(
    outer_app: Any, header: bytes, scope: Scope, receive: Receive, send: Send
) -> None:
    """See to it that the 500 has the header: by whoever answers it outside, else from here.

    `outer_app` is the Starlette or FastAPI app around us, if there is one. `send` sets the header.
    """
    layer = _error_layer(outer_app)
    if layer is None:
        await PlainTextResponse("Internal Server Error", 500)(scope, receive, send)
    elif not isinstance(layer.handler, _Handler):
        _wrap(layer, header)


def _error_layer(outer_app: Any) -> ServerErrorMiddleware | None:
    layer = getattr(outer_app, "middleware_stack", None)
    for _ in range(_MAX_LAYERS):
        if layer is None or isinstance(layer, ServerErrorMiddleware):
            return layer
        layer = getattr(layer, "app", None)  # instrumentation likes to wrap the whole stack
    return None


def _wrap(layer: ServerErrorMiddleware, header: bytes) -> None:
    handler = _Handler(layer, header)
    debug_response = layer.debug_response

    def debugging(request: Request, error: Exception) -> Any:
        return handler.tagged(debug_response(request, error), request, error)

    layer.handler = handler
    layer.debug_response = debugging  # type: ignore[method-assign, assignment]


class _Handler:
    """The layer's handler of before, run in the context of the request that failed."""

    def __init__(self, layer: ServerErrorMiddleware, header: bytes) -> None:
        self.before: Any = layer.handler or layer.error_response
        self.header = header

    async def __call__(self, request: Request, error: Exception) -> Any:
        with entered(_context(request, error)):
            try:
                response = await self._respond(request, error)
            except Exception as failure:
                # Else the server's own bare 500 would follow. The failure goes on after ours.
                logger.exception("the app's handler of server errors failed")
                response = _Failed(failure)
        return self.tagged(response, request, error)

    def tagged(self, response: ASGIApp, request: Request, error: Exception) -> ASGIApp:
        """`response`, sent with the ID on it, and in the request's context (for access logs)."""
        context = _context(request, error)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            with entered(context):
                await response(scope, receive, with_header(send, self.header, context.request_id))

        return respond

    async def _respond(self, request: Request, error: Exception) -> Any:
        is_async = iscoroutinefunction(self.before) or iscoroutinefunction(
            getattr(self.before, "__call__", None)  # noqa: B004  (an object with async __call__)
        )
        if is_async:
            return await self.before(request, error)
        return await run_in_threadpool(self.before, request, error)


class _Failed:
    """A plain 500, then the failure of the handler that should have answered."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stamp_error(self.failure, request_id() or "")
        await PlainTextResponse("Internal Server Error", 500)(scope, receive, send)
        raise self.failure


def _context(request: Request, error: Exception) -> RequestContext:
    """Of the request that failed; a new one where it failed before it reached our middleware."""
    context = context_of(request.scope)
    if context is None:
        context = RequestContext(request_id_of_error(error) or new_request_id())
        request.scope[SCOPE_KEY] = context
    return context
