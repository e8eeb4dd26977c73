"""Which request, and which keyed work, the running code belongs to: one context variable.

It reaches everything below by itself: tasks, `asyncio.to_thread`, Starlette's thread pool,
asgiref's `sync_to_async`. Executors and bare threads don't copy it: wrap what they run in `carry`.
"""

from __future__ import annotations

import contextvars
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Where an ASGI scope carries its context. The context variable alone can't tell: a server may
# start the next request of a connection from within the task of the one before (pipelining).
SCOPE_KEY = "retrysafe.request"
_CHAIN = 20  # how far a chain of exceptions is followed

__all__ = [
    "SCOPE_KEY",
    "ReceiptControl",
    "RequestContext",
    "carry",
    "context_of",
    "current_request",
    "enter",
    "entered",
    "leave",
    "new_request_id",
    "request_id",
    "request_id_of_error",
    "stamp_error",
]


class ReceiptControl:
    """The running work's word on its own result: it wins over the policy's `keep`.

    `decision`: True keep, False discard, None leave it to the policy. The last word counts.
    """

    __slots__ = ("decision",)

    def __init__(self) -> None:
        self.decision: bool | None = None

    def keep(self) -> None:
        """Record this result: retries are answered with it, whatever its status."""
        self.decision = True

    def discard(self) -> None:
        """Don't record this result: the next retry runs the work again."""
        self.decision = False


class _Unheard(ReceiptControl):
    """Outside keyed work: there is no result to have a word on."""

    __slots__ = ()

    def keep(self) -> None:
        """Without effect."""

    def discard(self) -> None:
        """Without effect."""


_UNHEARD = _Unheard()


@dataclass(slots=True)
class RequestContext:
    """What is known of the request, or of the keyed work, that the running code belongs to.

    `key` is the digest (hex) of the idempotency key, None outside keyed work; the key's text is
    never here. `held` are the digests this work holds (a call that asks for one of them would wait
    for itself). Outside keyed work `receipt` is there too, and its word has no effect. `receipts`
    is the engine that runs this work: steps are recorded through it.
    """

    request_id: str
    key: str | None = None
    scope: str = field(default="", repr=False)
    receipt: ReceiptControl = field(default=_UNHEARD, repr=False)
    held: frozenset[bytes] = field(default=frozenset(), repr=False)
    traceparent: str | None = None
    receipts: Any = field(default=None, repr=False)
    _counts: dict[str, int] | None = field(default=None, init=False, repr=False, compare=False)

    def next_call(self, name: str) -> int:
        """The number (1, 2, …) of this call among the calls of that name. Any thread may ask.

        A re-run of the same work counts the same way: that makes derived keys stable.
        """
        with _counting:
            counts = self._counts = self._counts or {}
            count = counts[name] = counts.get(name, 0) + 1
            return count


# One for all: it is held for a look-up.
_counting = threading.Lock()
_current: ContextVar[RequestContext | None] = ContextVar("retrysafe_request", default=None)


def current_request() -> RequestContext | None:
    """The request, or the keyed work, that is being handled here; None outside of one."""
    return _current.get()


def request_id() -> str | None:
    """The ID of the request that is being handled here; None outside of one."""
    context = _current.get()
    return None if context is None else context.request_id


def context_of(scope: Mapping[str, Any]) -> RequestContext | None:
    """The context that an outer middleware made for this very ASGI scope; None if there is none."""
    context = scope.get(SCOPE_KEY)
    return context if isinstance(context, RequestContext) else None


def enter(context: RequestContext | None) -> Token[RequestContext | None]:
    """Make `context` the current one. Hand the token to `leave`, in the same task or thread.

    None: outside of any request, whatever was current (a request that a server started from
    within another one's task must not go on in that one's context).
    """
    return _current.set(context)


def leave(token: Token[RequestContext | None]) -> None:
    """Go back to what was current before `enter`."""
    _current.reset(token)


class entered:
    """`context` is the current one within the block, whatever ends it."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: RequestContext) -> None:
        self._context = context

    def __enter__(self) -> RequestContext:
        self._token = _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that it sees the context variables of here and now, wherever it runs.

    For executors and threads: `pool.submit(carry(work), order)`. Each call runs in a copy of its
    own, so one carried function may run in many threads at once.
    """
    snapshot = contextvars.copy_context()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        return snapshot.copy().run(function, *args, **kwargs)

    return carried


def stamp_error(error: BaseException, request_id: str) -> None:
    """Note on an error in which request it was raised: servers log it after the request's end."""
    # An exception class may refuse attributes (a frozen dataclass): its log line goes without.
    with suppress(AttributeError, TypeError):
        error._retrysafe_request_id = request_id  # type: ignore[attr-defined]


def request_id_of_error(error: BaseException | None) -> str | None:
    """The request in which `error`, or what it was raised from, was raised; None if unknown."""
    for _ in range(_CHAIN):
        if error is None:
            return None
        found = getattr(error, "_retrysafe_request_id", None)
        if isinstance(found, str):
            return found
        error = error.__cause__ or error.__context__
    return None


class _Clock7:
    """UUIDv7 (RFC 9562, 5.7; monotonic by 6.2, method 2): 48 bits of ms, 74 random ones.

    Within one ms, and while the host's clock stands or goes back, the random part grows by a
    random step: IDs of one process sort in the order they were made and stay unguessable.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ms = 0
        self._tail = 0

    def next(self) -> str:
        entropy = int.from_bytes(os.urandom(10), "big")
        now = time.time_ns() // 1_000_000
        with self._lock:
            if now > self._ms:
                self._ms, self._tail = now, entropy >> 7  # the top bit is left for growth
            else:
                self._tail += 1 + (entropy & 0xFFFFFFFF)
                if self._tail >> 74:
                    self._ms, self._tail = self._ms + 1, entropy >> 7
            ms, tail = self._ms, self._tail
        number = ms << 80 | 7 << 76 | tail >> 62 << 64 | 2 << 62 | tail & ((1 << 62) - 1)
        text = f"{number:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_clock7 = _Clock7()


def _after_fork() -> None:
    # The parent may have held the lock, and two children must not count on from one value.
    global _clock7, _counting
    _clock7 = _Clock7()
    _counting = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def new_request_id() -> str:
    """A new UUIDv7 as text: globally unique, sortable by the time it was made."""
    return _clock7.next()
