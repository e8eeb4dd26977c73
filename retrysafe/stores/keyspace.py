"""What the memory store has in place of a server that runs scripts: values with an expiry, and a
Python mirror of each script.

A feature that has scripts of its own mirrors them beside it and lists the module below.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from retrysafe.stores.base import OnNews

Mirror = Callable[["Keyspace", str, Sequence[Any]], Any]

# The first word of a script's name -> the module that mirrors it, imported at its first use.
_HOMES: dict[str, str] = {
    "caller": "retrysafe.stores.memory_callers",
    "job": "retrysafe.job_budget_memory",
    "reservation": "retrysafe.reservation_memory",
    "result": "retrysafe.stores.memory_results",
    "saga": "retrysafe.saga_memory",
}
_mirrors: dict[str, Mirror] = {}


def mirrors(script: str) -> Callable[[Mirror], Mirror]:
    """Name the script that a function does the work of: `(keyspace, key, args) -> reply`.

    Arguments come as they were given, a reply is what the server's reply would be: int, bytes,
    list or None.
    """

    def note(mirror: Mirror) -> Mirror:
        _mirrors[script] = mirror
        return mirror

    return note


class Keyspace:
    """Keys, their values (any object) and expiries. `clock` returns seconds. Not locked: the
    store runs one script at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: dict[str, tuple[Any, int]] = {}  # value, expiry (ms)
        self._expiries: list[tuple[int, str]] = []
        self._published: list[tuple[bytes, bytes]] = []
        self.channels: dict[bytes, dict[int, OnNews]] = {}

    def run(
        self, script: str, keys: Sequence[str], args: Sequence[Any]
    ) -> tuple[Any, list[tuple[bytes, bytes]]]:
        """A script's reply and the messages it published, for `publish` after the lock."""
        if script not in _mirrors:
            home = _HOMES.get(script.partition("_")[0])
            if home is None:
                raise NotImplementedError(f"the memory store has no mirror of {script!r}")
            import_module(home)
        self._expire()
        self._published = []
        return _mirrors[script](self, keys[0], args), self._published

    def publish(self, channel: bytes, message: bytes) -> None:
        """Hand a message to whoever hears the channel now."""
        for on_news in tuple(self.channels.get(channel, {}).values()):
            on_news(message)

    # For mirrors

    @property
    def now_us(self) -> int:
        """The store's time, microseconds."""
        return int(self._clock() * 1e6)

    def get(self, key: str) -> Any:
        """A value, or None."""
        found = self._values.get(key)
        return found[0] if found else None

    def set(self, key: str, value: Any, ttl_ms: int) -> None:
        """Store a value, its expiry begins now."""
        expiry = self.now_us // 1000 + ttl_ms
        self._values[key] = (value, expiry)
        heapq.heappush(self._expiries, (expiry, key))
        if len(self._expiries) > 2 * len(self._values) + 1000:
            self._expiries = [(expires, name) for name, (_, expires) in self._values.items()]
            heapq.heapify(self._expiries)

    def replace(self, key: str, value: Any) -> None:
        """Change a value that exists, its expiry stays."""
        self._values[key] = (value, self._values[key][1])

    def delete(self, key: str) -> bool:
        """Remove a value; whether there was one."""
        return self._values.pop(key, None) is not None

    def announce(self, channel: bytes, message: bytes) -> None:
        """Publish, once the script has ended."""
        self._published.append((channel, message))

    def _expire(self) -> None:
        now = self.now_us // 1000
        while self._expiries and self._expiries[0][0] <= now:
            _, key = heapq.heappop(self._expiries)
            found = self._values.get(key)
            if found and found[1] <= now:
                del self._values[key]
