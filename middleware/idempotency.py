"""`IdempotencyMiddleware`: one execution per Idempotency-Key, around any ASGI app.

Header and semantics follow draft-ietf-httpapi-idempotency-key-header; the flow is S2's: has this
key been received, is its result known, wait for it or run and record.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, MutableMapping
from hashlib import blake2b
from typing import Any

from starlette.requests import Request

from retrysafe.context import context_of, current_request, enter, leave
from retrysafe.errors import SettingsError
from retrysafe.middleware.responder import Responder, interrupt_works
from retrysafe.middleware.routes import Marks, Patterns
from retrysafe.policy import IdempotencyPolicy, ResolvedPolicy
from retrysafe.receipts import AsyncReceipts
from retrysafe.settings import Settings
from retrysafe.steps import unprotected
from retrysafe.stores import Store, open_store

logger = logging.getLogger("retrysafe")

Scope = MutableMapping[str, Any]
ScopeOf = Callable[[Request], Any]

_HANDLED = "retrysafe.handled"
# How long (seconds) work whose request has ended may still take at shutdown.
GRACE = 2.0


class IdempotencyMiddleware:
    """Answers a retried request from the record of the first.

    - `policy`: an IdempotencyPolicy; what it leaves open comes from the `RETRYSAFE_*` settings
    - `store`: from `open_store(url)`; else by `RETRYSAFE_REDIS_URL`
    - `scope`: who is calling, a callable of the request (sync or async) that returns text; by
      default the authenticated user, else a digest of the Authorization header. None is the
      anonymous caller: all of them share one scope, told apart by key and payload alone
    - `routes`: path templates (`/orders/{id}`) that are keyed; by default every path

    Pure ASGI. Raises SettingsError where a setting or an argument can't be used.
    """

    def __init__(
        self,
        app: Any,
        *,
        policy: IdempotencyPolicy | None = None,
        store: Store | None = None,
        scope: ScopeOf | None = None,
        routes: Iterable[str] | None = None,
    ) -> None:
        self.settings = settings = Settings.from_env()
        faults: list[str] = []
        if policy is not None and not isinstance(policy, IdempotencyPolicy):
            faults.append(f"policy holds {policy!r}; it takes an IdempotencyPolicy")
        if scope is not None and not callable(scope):
            faults.append(f"scope holds {scope!r}; it takes a callable of the request")
        if faults:
            raise SettingsError(faults)
        self.app = app
        self.store = store if store is not None else open_store(settings.redis_url)
        self.key_header = settings.key_header.lower().encode("ascii")
        self.id_header = settings.request_id_header.lower().encode("ascii")
        self.scope_of = scope or default_scope
        self._methods = settings.methods
        self._disabled = settings.disabled
        self._patterns = Patterns(routes) if routes is not None else None
        self._marks = Marks(settings.methods)
        self._receipts: dict[IdempotencyPolicy, AsyncReceipts] = {}
        self._default = self._receipts_of(policy or IdempotencyPolicy())
        if self._disabled:
            logger.warning("RETRYSAFE_DISABLED is set: no request is protected")

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" and (faults := self._faults(scope)):
            await _refuse_startup(faults, receive, send)
            return
        if scope["type"] == "lifespan":
            await self.app(scope, _interrupting(receive), send)
            return
        if scope["type"] != "http" or scope["method"] not in self._methods or _HANDLED in scope:
            await self._pass(scope, receive, send)
            return
        if self._disabled:
            with unprotected():
                await self.app(scope, receive, send)
            return
        header = self.key_header
        keys = [value for name, value in scope["headers"] if name == header]
        receipts = self._receipts_for(scope)
        if receipts is None or not (keys or receipts.policy.require_key):
            await self._pass(scope, receive, send)
            return
        scope = {**scope, _HANDLED: True}
        await Responder(self, receipts, scope, receive, send).respond(keys)

    async def _pass(self, scope: Scope, receive: Any, send: Any) -> None:
        """Let a request by, untouched, but not in another one's context (see Responder)."""
        if current_request() is None or scope["type"] == "lifespan" or context_of(scope):
            await self.app(scope, receive, send)
            return
        token = enter(None)
        try:
            await self.app(scope, receive, send)
        finally:
            leave(token)

    async def caller(self, scope: Scope) -> str:
        """Whose request this is. Raises whatever the user's callable raises."""
        if self.scope_of is default_scope:
            return _default_scope(scope)
        found = self.scope_of(Request(scope))
        if inspect.isawaitable(found):
            found = await found
        return "" if found is None else f"own:{_name(found, 'the scope callable returned')}"

    def _routed(self, scope: Scope) -> Any:
        """The app whose routes are looked through: the one we are mounted in, else ours."""
        return scope.get("app") or self.app

    def _faults(self, scope: Scope) -> list[str]:
        """Marks that can have no effect."""
        return [] if self._disabled else self._marks.faults(self._routed(scope))

    def _receipts_for(self, scope: Scope) -> AsyncReceipts | None:
        """The receipts of the request's policy; None where it isn't keyed."""
        marked = self._marks.policy_for(self._routed(scope), scope)
        if marked is not None:
            return self._receipts_of(marked)
        if self._patterns is not None and not self._patterns.match(scope):
            return None
        applies = self._default.policy.applies
        if applies is not None and not applies(scope):
            return None
        return self._default

    def _receipts_of(self, policy: IdempotencyPolicy) -> AsyncReceipts:
        found = self._receipts.get(policy)
        if found is None:
            resolved: ResolvedPolicy = policy.resolve(self.settings)
            found = AsyncReceipts(self.store, resolved, self.settings.max_waiters)
            self._receipts[policy] = found
        return found


def default_scope(request: Request) -> str:
    """The authenticated user of Starlette's AuthenticationMiddleware, else a digest of the
    Authorization header, else the anonymous caller.

    Raises TypeError for an authenticated user whom nothing names.
    """
    return _default_scope(request.scope)


def _default_scope(scope: Scope) -> str:
    user = scope.get("user")
    if getattr(user, "is_authenticated", False):
        for name in ("identity", "display_name", "username"):
            try:
                identity = getattr(user, name, None)
            except NotImplementedError:  # Starlette's BaseUser leaves these to its subclasses
                continue
            if identity:
                return f"user:{identity}"
        return f"user:{_name(user, 'the authenticated user is')}"
    credentials = [value for name, value in scope["headers"] if name == b"authorization"]
    if not credentials:
        return ""
    digest = blake2b(b"\0".join(credentials), digest_size=16)
    return f"auth:{digest.hexdigest()}"


def _name(found: Any, what: str) -> str:
    """The text of what stands for a caller. Raises TypeError where it has none of its own.

    `object`'s text is an address: another for each request, so that no retry finds its receipt,
    and sooner or later that of somebody else, so that it finds theirs.
    """
    kind: Any = type(found)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise TypeError(
            f"{what} a {kind.__name__}, which has no text that tells callers apart: "
            "pass scope= a callable that returns the caller's ID"
        )
    return str(found)


def _interrupting(receive: Any) -> Any:
    """The `receive` of a lifespan: at shutdown, work whose client had left is marked abandoned at
    once. Servers may end the process right after, without a cancellation."""

    async def received() -> Any:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            await interrupt_works(GRACE)
        return message

    return received


async def _refuse_startup(faults: list[str], receive: Any, send: Any) -> None:
    """Fail the server's start: a raised error would pass for an app without lifespan."""
    error = SettingsError(faults)
    logger.error("%s", error)
    await receive()
    await send({"type": "lifespan.startup.failed", "message": str(error)})
