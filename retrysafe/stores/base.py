"""The seam between the flow and a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from retrysafe.commands import Command, Reply

# What an inbox receives: the receipt's digest (16 bytes) and its record, b"" where the record is
# too large to ride along or the receipt was given up. A name of b"" asks every waiter to look
# again: messages may have been lost.
OnMessage = Callable[[bytes, bytes], None]

# What a channel receives: each message, and None when some may have been lost.
OnNews = Callable[[bytes | None], None]


def named(on_message: OnMessage) -> OnNews:
    """An inbox as a channel's listener: each message begins with the receipt's digest."""

    def on_news(message: bytes | None) -> None:
        if message is None:
            on_message(b"", b"")
        else:
            on_message(message[:16], message[16:])

    return on_news


class Backend(Protocol):
    """One process's sync door to a store. Every method may raise errors.StoreUnavailable.

    `end`, on the monotonic clock: when a command is to have ended at the latest, where its caller
    has less time than it may take.
    """

    def execute(self, command: Command, end: float | None = None) -> Reply: ...

    def execute_many(self, commands: Sequence[Command]) -> list[Reply | Exception]: ...

    def eval(
        self, script: str, keys: Sequence[str], args: Sequence[Any], end: float | None = None
    ) -> Any: ...

    def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        """Subscribe once to `inbox`; True when confirmed within `limit` seconds."""

    def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        """Hear a channel, by its literal name, until `unsubscribe`; True when confirmed within
        `limit` seconds. Unconfirmed, it goes on trying. `on_news` is called on another thread."""

    def unsubscribe(self, channel: bytes) -> None:
        """Hear it no more."""

    def close(self) -> None: ...


class AsyncBackend(Protocol):
    """One event loop's door to a store. Every method may raise errors.StoreUnavailable."""

    @property
    def forgotten(self) -> bytes | None:
        """The channel that tells the digests of forgotten receipts; None where the store is as
        near as a record kept by its reader."""

    async def execute(self, command: Command) -> Reply: ...

    async def execute_many(self, commands: Sequence[Command]) -> list[Reply | Exception]: ...

    async def eval(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any: ...

    async def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        """Subscribe once to `inbox`; True when confirmed within `limit` seconds."""

    async def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        """Hear a channel, by its literal name, until `unsubscribe`; True when confirmed within
        `limit` seconds. Unconfirmed, it goes on trying. `on_news` may be called on a thread."""

    def unsubscribe(self, channel: bytes) -> None:
        """Hear it no more."""

    async def close(self) -> None: ...


class Store(Protocol):
    """A store as users hold it: no connection of its own, safe to share between threads, loops
    and (before first use in each) processes."""

    namespace: str
    url: str

    def open(self) -> Backend:
        """A new sync door."""

    def open_async(self) -> AsyncBackend:
        """A new door for the running event loop."""
