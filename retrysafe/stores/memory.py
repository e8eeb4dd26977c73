"""Receipts in this process's memory: the same states and answers as on Redis, one process wide.

For development, tests and single-process programs: what is in memory dies with the process.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from retrysafe import commands as c
from retrysafe.commands import Answer, Reply
from retrysafe.records import (
    LATEST,
    AbandonedReceipt,
    CorruptRecord,
    Record,
    Running,
    decode,
    encode_running,
    mismatched,
)
from retrysafe.stores.base import OnMessage, OnNews
from retrysafe.stores.keyspace import Keyspace
from retrysafe.values import replace

_EPOCH = time.time() - time.monotonic()


def _steady() -> float:
    """Seconds of a clock that never steps, near the epoch's count."""
    return _EPOCH + time.monotonic()


class MemoryStore:
    """All receipts of one process. `clock` returns seconds and never goes back."""

    def __init__(
        self, namespace: str = "retrysafe", clock: Callable[[], float] | None = None
    ) -> None:
        self.namespace = namespace
        self.url = "memory://"
        self._clock = clock or _steady
        self._lock = threading.Lock()
        self._values: dict[bytes, tuple[bytes, int]] = {}  # value, expiry (ms)
        self._expiries: list[tuple[int, bytes]] = []
        self._inboxes: dict[bytes, OnMessage] = {}
        self._keyspace = Keyspace(self._clock)

    def open(self) -> MemoryBackend:
        return MemoryBackend(self)

    def open_async(self) -> AsyncMemoryBackend:
        return AsyncMemoryBackend(self)

    # What follows mirrors the Lua scripts, one method a command.

    def execute(self, command: c.Command) -> Reply:
        woken: list[tuple[bytes, bytes, bytes]] = []
        with self._lock:
            now = int(self._clock() * 1e6)
            self._expire(now // 1000)
            found = self._values.get(command.key)
            try:
                held = decode(found[0]) if found else None
            except CorruptRecord:
                if not isinstance(command, c.Forget):
                    refused = isinstance(command, c.Renew | c.Finish | c.Release | c.Interrupt)
                    return Reply(Answer.REFUSED if refused else Answer.CORRUPT)
                held = None
            match command:
                case c.Begin():
                    reply = self._begin(command, held, now)
                case c.Renew():
                    reply = self._renew(command, held, now)
                case c.Finish():
                    reply = self._finish(command, held, now, woken)
                case c.Release():
                    reply = self._release(command, held, woken)
                case c.Interrupt():
                    reply = self._interrupt(command, held, woken)
                case c.Forget():
                    reply = Reply(Answer.OK if found else Answer.VANISHED)
                    self._values.pop(command.key, None)
                    self._wake(held, command.key, b"", woken)
                case c.Look():
                    reply = self._look(command, held, now)
        for inbox, name, value in woken:
            if on_message := self._inboxes.get(inbox):
                on_message(name, value)
        return reply

    def eval(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script's mirror: one at a time, as the server does."""
        with self._lock:
            reply, published = self._keyspace.run(script, keys, args)
        for channel, message in published:
            self._keyspace.publish(channel, message)
        return reply

    def put(self, key: bytes, value: bytes, ttl_ms: int) -> None:
        """Store raw bytes under a receipt's name."""
        with self._lock:
            self._set(key, value, ttl_ms, int(self._clock() * 1000))

    def size(self) -> int:
        """How many receipts are stored."""
        with self._lock:
            self._expire(int(self._clock() * 1000))
            return len(self._values)

    def _begin(self, command: c.Begin, held: Record | Running | None, now: int) -> Reply:
        fence, previous = max(now, 1), None  # 0 is nobody's
        inboxes: tuple[bytes, ...] = ()
        if held is not None:
            if mismatched(held.fingerprint, command.fingerprint):
                return Reply(Answer.MISMATCH)
            value = self._values[command.key][0]
            if isinstance(held, Record):
                return Reply(Answer.DONE, self._values[command.key][1] - now // 1000, value)
            if held.token == command.token and not held.interrupted:
                return Reply(Answer.OK, held.fence, value if held.previous else b"")
            if not held.interrupted and held.lease_end > now:
                if command.inbox and command.inbox not in held.inboxes:
                    self._replace(
                        command.key,
                        encode_running(replace(held, inboxes=(*held.inboxes, command.inbox))),
                    )
                return Reply(Answer.RUNNING, held.lease_end - now)
            if not command.take_over:
                return Reply(Answer.ABANDONED, 0, value)
            if held.fence >= LATEST:
                return Reply(Answer.CORRUPT)
            fence = max(held.fence + 1, now)
            previous = AbandonedReceipt("", "", held.fence, held.request_id)
            inboxes = held.inboxes
        record = encode_running(
            Running(
                fingerprint=command.fingerprint,
                token=command.token,
                fence=fence,
                request_id=command.request_id,
                lease_end=now + command.lease_us,
                interrupted=False,
                previous=previous,
                inboxes=inboxes,
            )
        )
        self._set(command.key, record, command.ttl_ms, now // 1000)
        return Reply(Answer.OK, fence, record if previous else b"")

    def _renew(self, command: c.Renew, held: Record | Running | None, now: int) -> Reply:
        if held is None:
            return Reply(Answer.VANISHED)
        if not isinstance(held, Running) or held.interrupted or held.token != command.token:
            return Reply(Answer.REFUSED)
        record = encode_running(replace(held, lease_end=now + command.lease_us))
        self._set(command.key, record, command.ttl_ms, now // 1000)
        return Reply(Answer.OK)

    def _finish(
        self,
        command: c.Finish,
        held: Record | Running | None,
        now: int,
        woken: list[tuple[bytes, bytes, bytes]],
    ) -> Reply:
        if isinstance(held, Record):
            if held.token == command.token:
                return Reply(Answer.OK)
            return Reply(Answer.DONE, 0, self._values[command.key][0])
        if held is not None and held.token != command.token:
            return Reply(Answer.REFUSED)
        self._set(command.key, command.value, command.ttl_ms, now // 1000)
        if held is None:
            return Reply(Answer.VANISHED)
        self._wake(held, command.key, command.value, woken)
        return Reply(Answer.OK)

    def _release(
        self,
        command: c.Release,
        held: Record | Running | None,
        woken: list[tuple[bytes, bytes, bytes]],
    ) -> Reply:
        if held is None:
            return Reply(Answer.OK)
        if not isinstance(held, Running) or held.token != command.token:
            return Reply(Answer.REFUSED)
        del self._values[command.key]
        self._wake(held, command.key, b"", woken)
        return Reply(Answer.OK)

    def _interrupt(
        self,
        command: c.Interrupt,
        held: Record | Running | None,
        woken: list[tuple[bytes, bytes, bytes]],
    ) -> Reply:
        if not isinstance(held, Running) or held.token != command.token:
            return Reply(Answer.REFUSED)
        self._replace(command.key, encode_running(replace(held, interrupted=True)))
        self._wake(held, command.key, b"", woken)
        return Reply(Answer.OK)

    def _look(self, command: c.Look, held: Record | Running | None, now: int) -> Reply:
        if held is None:
            return Reply(Answer.VANISHED)
        value = self._values[command.key][0]
        if isinstance(held, Record):
            return Reply(Answer.DONE, 0, value)
        left = 0 if held.interrupted else max(0, held.lease_end - now)
        return Reply(Answer.RUNNING, left, value)

    def _set(self, key: bytes, value: bytes, ttl_ms: int, now_ms: int) -> None:
        expiry = now_ms + ttl_ms
        self._values[key] = (value, expiry)
        heapq.heappush(self._expiries, (expiry, key))
        if len(self._expiries) > 2 * len(self._values) + 1000:
            # Renewed and released receipts leave their old expiries behind.
            self._expiries = [(expires, name) for name, (_, expires) in self._values.items()]
            heapq.heapify(self._expiries)

    def _replace(self, key: bytes, value: bytes) -> None:
        self._values[key] = (value, self._values[key][1])

    def _expire(self, now_ms: int) -> None:
        while self._expiries and self._expiries[0][0] <= now_ms:
            _, key = heapq.heappop(self._expiries)
            found = self._values.get(key)
            if found and found[1] <= now_ms:
                del self._values[key]

    @staticmethod
    def _wake(
        held: Record | Running | None,
        key: bytes,
        value: bytes,
        woken: list[tuple[bytes, bytes, bytes]],
    ) -> None:
        if isinstance(held, Running):
            woken.extend((inbox, key, value) for inbox in held.inboxes)


class MemoryBackend:
    """The sync door to a MemoryStore."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._inbox = b""

    def execute(self, command: c.Command, end: float | None = None) -> Reply:
        return self._store.execute(command)

    def execute_many(self, commands: Sequence[c.Command]) -> list[Reply | Exception]:
        return [self._store.execute(command) for command in commands]

    def eval(
        self, script: str, keys: Sequence[str], args: Sequence[Any], end: float | None = None
    ) -> Any:
        return self._store.eval(script, keys, args)

    def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        self._store._keyspace.channels.setdefault(channel, {})[id(self)] = on_news
        return True

    def unsubscribe(self, channel: bytes) -> None:
        listeners = self._store._keyspace.channels.get(channel, {})
        listeners.pop(id(self), None)
        if not listeners:
            self._store._keyspace.channels.pop(channel, None)

    def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        self._inbox = inbox
        self._store._inboxes[inbox] = on_message
        return True

    def close(self) -> None:
        self._store._inboxes.pop(self._inbox, None)


class AsyncMemoryBackend:
    """The async door to a MemoryStore."""

    forgotten = None

    def __init__(self, store: MemoryStore) -> None:
        self._door = store.open()

    async def execute(self, command: c.Command) -> Reply:
        return self._door.execute(command)

    async def execute_many(self, commands: Sequence[c.Command]) -> list[Reply | Exception]:
        return self._door.execute_many(commands)

    async def eval(self, script: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return self._door.eval(script, keys, args)

    async def listen(self, inbox: bytes, on_message: OnMessage, limit: float) -> bool:
        return self._door.listen(inbox, on_message, limit)

    async def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        return self._door.subscribe(channel, on_news, limit)

    def unsubscribe(self, channel: bytes) -> None:
        self._door.unsubscribe(channel)

    async def close(self) -> None:
        self._door.close()
