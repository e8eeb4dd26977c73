"""`RequestIdMiddleware`: every request has an ID, here and in what it causes.

On the response, in a context variable (`retrysafe.request_id()`), in log records
(`retrysafe.logging.RequestIdFilter`), on outbound calls.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retrysafe import setting_kinds as kinds
from retrysafe.context import (
    SCOPE_KEY,
    RequestContext,
    context_of,
    entered,
    new_request_id,
    stamp_error,
)
from retrysafe.errors import SettingsError
from retrysafe.middleware.server_errors import answer_server_error, with_header
from retrysafe.settings import Settings

__all__ = ["RequestIdMiddleware", "new_context"]

logger = logging.getLogger("retrysafe")

_VALID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{1,256})?")

Trust = bool | Callable[[Scope], bool]


class RequestIdMiddleware:
    """ASGI middleware that gives each request (HTTP and websocket) its ID.

    A valid inbound ID (one header, 1-128 of `A-Za-z0-9._-`) is kept, anything else is replaced by
    a UUIDv7: what a client sent goes unchecked into no header and no log. The response carries the
    ID exactly once. Inside another middleware that has made the request's context, that one's ID
    stays.

    An exception from the app goes on unchanged, and the 500 for it carries the ID: the one that
    Starlette's own error middleware answers outside of this one, else a plain one sent from here.

    - `header`: its name, inbound and outbound; default `RETRYSAFE_REQUEST_ID_HEADER`
    - `trust`: whether to keep inbound IDs: a bool, or a callable of the ASGI scope (say, of the
      client's address); one that raises is logged and taken for no

    Raises SettingsError for settings, or a header name, that can't be used.
    """

    def __init__(self, app: ASGIApp, header: str | None = None, trust: Trust = True) -> None:
        self.app = app
        name = Settings.from_env().request_id_header if header is None else header
        faults: list[str] = []
        try:
            kinds.HEADER.check(name)
        except ValueError as error:
            faults.append(f"header holds {name!r} ({error}); it takes {kinds.HEADER.takes}")
        if not isinstance(trust, bool) and not callable(trust):
            faults.append(f"trust holds {trust!r}; it takes a bool or a callable of the scope")
        if faults:
            raise SettingsError(faults)
        self.header = name.lower().encode("ascii")
        self.trust = trust

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        context = context_of(scope)
        if context is not None:
            await _Responder(self.app, self.header, context, scope)(receive, send)
            return
        context = new_context(scope, self.header, trusted=self._trusts(scope))
        # Into the server's own scope, not a copy: outer layers read it, as they read the route.
        scope[SCOPE_KEY] = context
        with entered(context):
            await _Responder(self.app, self.header, context, scope)(receive, send)

    def _trusts(self, scope: Scope) -> bool:
        if isinstance(self.trust, bool):
            return self.trust
        try:
            return bool(self.trust(scope))
        except Exception:
            logger.exception("trust= of RequestIdMiddleware failed; the inbound ID is replaced")
            return False


def new_context(scope: Scope, header: bytes, *, trusted: bool) -> RequestContext:
    """The context of a request: its inbound ID where it is valid and trusted, else a new one."""
    ids: list[bytes] = []
    parents: list[bytes] = []
    for name, value in scope.get("headers") or ():
        name = name.lower()
        if name == header:
            ids.append(value)
        elif name == b"traceparent":
            parents.append(value)
    return RequestContext(
        request_id=(_only(ids, _VALID) if trusted else None) or new_request_id(),
        traceparent=_only(parents, _TRACEPARENT),
    )


def _only(values: list[bytes], valid: re.Pattern[bytes]) -> str | None:
    """The value of a header that came once and is valid."""
    if len(values) != 1 or not valid.fullmatch(values[0]):
        return None
    return bytes(values[0]).decode("ascii")


class _Responder:
    """One request: passes messages on, with the ID on those that open a response."""

    __slots__ = ("app", "context", "header", "outer_app", "scope", "send", "started")

    def __init__(self, app: ASGIApp, header: bytes, context: RequestContext, scope: Scope) -> None:
        self.app = app
        self.header = header
        self.context = context
        self.scope = scope
        # A mounted app replaces it in the scope on the way in.
        self.outer_app: Any = scope.get("app")
        self.started = False

    async def __call__(self, receive: Receive, send: Send) -> None:
        self.send = with_header(send, self.header, self.context.request_id)
        try:
            await self.app(self.scope, receive, self._watch)
        except Exception as error:
            stamp_error(error, self.context.request_id)
            if self.scope["type"] == "http" and not self.started:
                await self._answer(receive)
            raise

    async def _watch(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
        await self.send(message)

    async def _answer(self, receive: Receive) -> None:
        try:
            await answer_server_error(self.outer_app, self.header, self.scope, receive, self.send)
        except Exception:
            # The app's own exception must be the one that goes on.
            logger.info("the 500 could not be sent: the client is gone", exc_info=True)
