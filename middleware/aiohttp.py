"""Retries for aiohttp: a client middleware (aiohttp 3.12 and later).

session = aiohttp.ClientSession(middlewares=(retry_middleware(),))
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from aiohttp import (
    ClientHandlerType,
    ClientMiddlewareType,
    ClientOSError,
    ClientRequest,
    ClientResponse,
    ServerDisconnectedError,
)

from retrysafe.answers import body_may_say
from retrysafe.middleware.outbound import BreakerChoice, Exchange, Outbound, is_one_shot
from retrysafe.retrying import RetryPolicy

__all__ = ["retry_middleware"]


# (timer, request, error) of the call that this task gave up last.
_given_up: ContextVar[tuple[object, object, Exception] | None] = ContextVar(
    "retrysafe_aiohttp_given_up", default=None
)


def retry_middleware(
    *, policy: RetryPolicy | None = None, breaker: BreakerChoice = None
) -> ClientMiddlewareType:
    """Make a middleware that sends a request, and again where that is safe and may help.

    policy: by default that of the settings. breaker: True for one per host, a `CircuitBreaker`, or
    a function of `host:port`. The last answer is returned whatever its status (the session's
    `raise_for_status` comes after); the last error is raised as it is. The session's `timeout`
    spans all attempts.
    """
    outbound = Outbound(policy, breaker)

    async def middleware(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        # aiohttp itself sends idempotent requests once more after a broken connection, through
        # this middleware: that would double the attempts. It does so with a request made anew,
        # under the one timer of the call; an outer middleware repeats the same request.
        timer = getattr(request, "_timer", None)
        if (before := _given_up.get()) is not None:
            _given_up.set(None)
            if before[0] is timer and before[1] is not request:
                raise before[2]
        body = _Body(request)

        async def once() -> ClientResponse:
            await body.prepare()
            # No attempt takes longer than the `deadline()` around it has left.
            async with asyncio.timeout(exchange.timeout()):
                response = await handler(request)
                if body_may_say(response.status, response.headers):
                    await response.read()  # ahead, for the producer's word in it; it is kept
                return response

        url = request.url
        exchange = Exchange(
            outbound,
            request.method,
            f"{url.host}:{url.port}",
            url.path,
            request.headers,
            body.replay,
        )
        try:
            return await exchange.asend(once, _discard)
        except (ClientOSError, ServerDisconnectedError) as error:
            if timer is not None:
                _given_up.set((timer, request, error))
            raise

    return middleware


async def _discard(response: ClientResponse) -> None:
    # Let go of it without reading: how much would come, and when, is not known.
    response.close()


class _Body:
    """The body of a request, and how it is sent again."""

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._again: Any = None
        self._sent = False

    def replay(self) -> bool:
        """Whether it can be sent again; `prepare` does what is needed for it."""
        body: Any = self._request.body
        if not body or not body.consumed:
            return True
        source = getattr(body, "_value", None)
        if hasattr(source, "__aiter__") and not is_one_shot(source):
            self._again = source
            return True
        return False

    async def prepare(self) -> None:
        if self._sent:
            await self._request.close()  # the writer of the attempt before has to be through
        self._sent = True
        again, self._again = self._again, None
        if again is not None:
            await self._request.update_body(again)
