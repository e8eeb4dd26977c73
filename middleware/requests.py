"""Retries for requests: an adapter to mount.

session.mount("https://", RetryAdapter())
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from requests.exceptions import UnrewindableBodyError
from requests.utils import rewind_body

from retrysafe.answers import body_may_say
from retrysafe.middleware.outbound import BreakerChoice, Exchange, Outbound, is_one_shot
from retrysafe.retrying import RetryPolicy

__all__ = ["RetryAdapter"]


class RetryAdapter(HTTPAdapter):
    """Sends a request, and again where that is safe and may help.

    policy: by default that of the settings. breaker: True for one per host, a `CircuitBreaker`, or
    a function of `host:port`. adapter: arguments of `HTTPAdapter`. The last answer is returned
    whatever its status; the last error is raised as it is.

    Raises TypeError for `max_retries`: two layers of retries would multiply.
    """

    def __init__(
        self,
        *,
        policy: RetryPolicy | None = None,
        breaker: BreakerChoice = None,
        **adapter: Any,
    ) -> None:
        if adapter.get("max_retries"):
            raise TypeError("RetryAdapter retries by its policy: leave out max_retries")
        self._outbound = Outbound(policy, breaker)
        super().__init__(**adapter)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a RetryAdapter can't be pickled: its state is one process's")

    def send(
        self,
        request: PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Response:
        request = request.copy()  # the caller's may be sent again, as another call
        url = urlsplit(request.url or "")
        port = url.port or (443 if url.scheme == "https" else 80)
        exchange = Exchange(
            self._outbound,
            request.method or "GET",
            f"{url.hostname}:{port}",
            url.path,
            request.headers,
            lambda: _replay(request),
        )
        send = super().send

        def once() -> Response:
            limited = _limited(timeout, exchange.timeout())
            response = send(request, stream, limited, *args, **kwargs)
            if not stream and body_may_say(response.status_code, response.headers):
                _ = response.content  # read ahead, for the producer's word in it
            return response

        return exchange.send(once, lambda old: old.close())


def _limited(timeout: Any, left: float | None) -> Any:
    """No timeout of an attempt is longer than the `deadline()` around it has left."""
    if left is None or not (timeout is None or isinstance(timeout, int | float | tuple)):
        return timeout
    connect_read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    return tuple(left if each is None else min(each, left) for each in connect_read)


def _replay(request: PreparedRequest) -> bool:
    """Make the body ready to be sent again; False: that can't be."""
    body: Any = request.body
    if body is None or isinstance(body, bytes | str):
        return True
    if hasattr(body, "read"):
        # requests noted where the file stood when the request was made.
        try:
            rewind_body(request)
        except UnrewindableBodyError:
            return False
        return True
    return not is_one_shot(body)
