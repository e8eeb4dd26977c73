"""Retries for httpx2 and httpx: transports that wrap a transport of either library.

    client = httpx2.Client(transport=RetryTransport())

Requests and answers are met by what they have in common, so a transport serves the library of the
client it is given to. Without a transport to wrap, one is made of the library of the first request.
"""

from __future__ import annotations

import importlib
import sys
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from retrysafe.answers import PEEKED, body_may_say
from retrysafe.middleware.outbound import BreakerChoice, Exchange, Outbound, is_one_shot
from retrysafe.retrying import RetryPolicy

__all__ = ["AsyncRetryTransport", "RetryTransport"]

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport as _AsyncBase
    from httpx2 import BaseTransport as _Base
else:
    try:
        _library = importlib.import_module("httpx2")
    except ImportError:
        _library = importlib.import_module("httpx")
    _Base, _AsyncBase = _library.BaseTransport, _library.AsyncBaseTransport


class RetryTransport(_Base):
    """Sends a request, and again where that is safe and may help.

    transport: of httpx2 or httpx; None: that library's own `HTTPTransport`. policy: by default
    that of the settings. breaker: True for one per host, a `CircuitBreaker`, or a function of
    `host:port`. The last answer is returned whatever its status; the last error is raised as it is.
    """

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: RetryPolicy | None = None,
        breaker: BreakerChoice = None,
    ) -> None:
        self._outbound = Outbound(policy, breaker)
        self._transport = transport
        self._lock = Lock()

    def handle_request(self, request: Any) -> Any:
        transport = self._transport
        if transport is None:
            with self._lock:
                transport = self._transport = self._transport or _own(request, "HTTPTransport")
        request = _copy(request)
        exchange = _exchange(self._outbound, request)

        def once() -> Any:
            _limit(request, exchange.timeout())
            return _peek(transport.handle_request(request))

        return exchange.send(once, lambda old: old.close())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def __enter__(self) -> RetryTransport:
        if self._transport is not None:
            self._transport.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._transport is not None:
            self._transport.__exit__(exc_type, exc_value, traceback)


class AsyncRetryTransport(_AsyncBase):
    """`RetryTransport` for async clients."""

    def __init__(
        self,
        transport: Any = None,
        *,
        policy: RetryPolicy | None = None,
        breaker: BreakerChoice = None,
    ) -> None:
        self._outbound = Outbound(policy, breaker)
        self._transport = transport

    async def handle_async_request(self, request: Any) -> Any:
        transport = self._transport
        if transport is None:
            transport = self._transport = _own(request, "AsyncHTTPTransport")
        request = _copy(request)
        exchange = _exchange(self._outbound, request)

        async def once() -> Any:
            _limit(request, exchange.timeout())
            return await _apeek(await transport.handle_async_request(request))

        return await exchange.asend(once, lambda old: old.aclose())

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()

    async def __aenter__(self) -> AsyncRetryTransport:
        if self._transport is not None:
            await self._transport.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._transport is not None:
            await self._transport.__aexit__(exc_type, exc_value, traceback)


def _own(request: Any, name: str) -> Any:
    """A transport of the library that made the request."""
    return getattr(_library_of(request), name)()


def _library_of(made: Any) -> Any:
    """The library that a request or an answer is of."""
    for cls in type(made).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in ("httpx", "httpx2"):
            return sys.modules[root]
    raise TypeError(f"RetryTransport takes requests of httpx2 or httpx, not {type(made)!r}")


def _copy(request: Any) -> Any:
    """A request of our own to complete: the caller's may be sent again, as another call."""
    copy = type(request)(
        request.method,
        request.url,
        headers=request.headers,
        stream=request.stream,
        extensions=dict(request.extensions),
    )
    if hasattr(request, "_content"):
        copy.read()  # was read: whoever looks at `request.content` finds it so
    return copy


def _limit(request: Any, left: float | None) -> None:
    """No timeout of an attempt is longer than the `deadline()` around it has left."""
    if left is not None:
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            kind: left if given.get(kind) is None else min(given[kind], left)
            for kind in ("connect", "read", "write", "pool")
        }


def _peek(response: Any) -> Any:
    """Read a problem document ahead, for the producer's word in it; it can be read again."""
    if _is_worth_reading(response):
        source = response.stream
        try:
            _put_back(response, b"".join(source))
        finally:
            source.close()
    return response


async def _apeek(response: Any) -> Any:
    if _is_worth_reading(response):
        source = response.stream
        try:
            _put_back(response, b"".join([part async for part in source]))
        finally:
            await source.aclose()
    return response


def _is_worth_reading(response: Any) -> bool:
    return body_may_say(response.status_code, response.headers) and not hasattr(
        response, "_content"
    )


def _put_back(response: Any, body: bytes) -> None:
    setattr(response, PEEKED, body)
    response.stream = _library_of(response).ByteStream(body)


def _exchange(outbound: Outbound, request: Any) -> Exchange:
    url = request.url
    port = url.port or {"http": 80, "https": 443}.get(url.scheme, 0)
    replay = _Replay(request.stream)
    return Exchange(
        outbound, request.method, f"{url.host}:{port}", url.path, request.headers, replay
    )


class _Replay:
    """Whether the body of a request can be sent again, and its files rewound to where they were."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        source = getattr(stream, "_stream", None)
        self._file = source if hasattr(source, "read") or hasattr(source, "aread") else None
        self._start = _position(self._file)

    def __call__(self) -> bool:
        stream = self._stream
        if self._file is not None:
            if self._start is None:
                return False
            self._file.seek(self._start)
            return True
        fields = getattr(stream, "fields", None)
        if isinstance(fields, list):
            # Multipart rewinds the files itself, each time it is sent.
            files = [getattr(field, "file", b"") for field in fields]
            return all(isinstance(f, bytes | str) or _position(f) is not None for f in files)
        source = getattr(stream, "_stream", None)
        # Bytes, or an iterable of the caller's. A stream class of their own may be anything.
        return source is not None and not is_one_shot(source)


def _position(file: Any) -> int | None:
    """Where a file stands; None: it can't be rewound."""
    try:
        if file is not None and file.seekable():
            at = file.tell()
            return at if isinstance(at, int) else None
    except (AttributeError, OSError, ValueError):
        return None
    return None
