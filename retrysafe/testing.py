"""For the tests of programs that use retrysafe: no sleeping, a clock by hand, a store in memory,
and a client that sends everything twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from retrysafe.stores.memory import MemoryStore
from retrysafe.testing_clock import FakeClock, instant

__all__ = ["DuplicateClient", "FakeClock", "instant", "memory_store"]

_names = itertools.count()


def memory_store(clock: Callable[[], float] | None = None) -> MemoryStore:
    """An empty store of its own, in memory. `clock` returns seconds (a FakeClock will do)."""
    return MemoryStore(f"test-{next(_names)}", clock)


class DuplicateClient:
    """Sends each keyed call twice and checks that both answers agree.

    Wraps the sync client of httpx, httpx2, requests or Starlette's TestClient (`request`), or an
    async one (`arequest`). Raises AssertionError where the second answer is no replay of the
    first: another status, another body, or the mark missing.
    """

    def __init__(self, client: Any, key_header: str = "Idempotency-Key") -> None:
        self._client = client
        self._key_header = key_header
        self._keys = itertools.count(1)

    def request(self, method: str, url: str, **options: Any) -> Any:
        """Send twice; returns the first answer."""
        options = self._keyed(options)
        first = self._client.request(method, url, **options)
        second = self._client.request(method, url, **options)
        return self._agree(first, second)

    async def arequest(self, method: str, url: str, **options: Any) -> Any:
        """Send twice with an async client; returns the first answer."""
        options = self._keyed(options)
        send: Callable[..., Awaitable[Any]] = self._client.request
        first = await send(method, url, **options)
        second = await send(method, url, **options)
        return self._agree(first, second)

    def post(self, url: str, **options: Any) -> Any:
        """`request("POST", …)`."""
        return self.request("POST", url, **options)

    def _keyed(self, options: dict[str, Any]) -> dict[str, Any]:
        headers = dict(options.get("headers") or {})
        if not any(name.lower() == self._key_header.lower() for name in headers):
            headers[self._key_header] = f"duplicate-client-{id(self)}-{next(self._keys)}"
        return {**options, "headers": headers}

    @staticmethod
    def _agree(first: Any, second: Any) -> Any:
        assert second.status_code == first.status_code, (
            f"the duplicate was answered {second.status_code}, the first call {first.status_code}"
        )
        assert second.content == first.content, "the duplicate's body differs from the first's"
        assert second.headers.get("Idempotent-Replayed") == "true", (
            "the duplicate was not replayed: the work ran twice"
        )
        return first
