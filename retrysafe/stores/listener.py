"""The sync door's ears: one thread and one connection for all the channels of a process."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from retrysafe.stores.base import OnNews

# A connection that has been silent for so long is asked whether it is still there; no word
# within the second time condemns it (seconds).
_PING_AFTER = 10.0
_PONG_WITHIN = 1.5
_FIRST_DELAY, _LAST_DELAY = 0.05, 1.0


class _Channel:
    __slots__ = ("heard", "on_news", "ready")

    def __init__(self, on_news: OnNews) -> None:
        self.on_news = on_news
        self.ready = threading.Event()
        self.heard = False  # from then on a new subscription may have missed something


class Listener:
    """Keeps subscriptions alive. `connect` makes a connection of redis-py (RESP2)."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._channels: dict[bytes, _Channel] = {}
        self._asked: list[tuple[bytes, bytes]] = []  # what is to be sent: verb, channel
        self._bell, self._hand = socket.socketpair()
        self._bell.setblocking(False)
        self._hand.setblocking(False)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retrysafe-inbox", daemon=True)
        self._thread.start()

    def subscribe(self, channel: bytes, on_news: OnNews, limit: float) -> bool:
        """Hear a channel from now on; True when the server has confirmed it within `limit`
        seconds. A later confirmation is told as None: something may have come before it."""
        with self._lock:
            known = self._channels.get(channel)
            if known is not None:
                known.on_news = on_news
                if known.ready.is_set():
                    return True
            found = self._channels[channel] = known or _Channel(on_news)
            self._asked.append((b"SUBSCRIBE", channel))
        self._ring()
        if found.ready.wait(limit):
            return True
        with self._lock:
            found.heard = True
            return found.ready.is_set()

    def unsubscribe(self, channel: bytes) -> None:
        """Hear it no more."""
        with self._lock:
            if self._channels.pop(channel, None) is None:
                return
            self._asked.append((b"UNSUBSCRIBE", channel))
        self._ring()

    def stop(self) -> None:
        """End the thread and its connection."""
        self._stopping.set()
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PONG_WITHIN)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            self._hand.send(b"!")

    def _run(self) -> None:
        owner = os.getpid()
        delay = _FIRST_DELAY
        while not self._stopping.is_set() and os.getpid() == owner:
            connection = None
            try:
                connection = self._connect()
                connection.connect()
                self._begin()
                delay = _FIRST_DELAY
                self._listen(connection)
            except (redis.RedisError, OSError):
                self._stopping.wait(delay)
                delay = min(delay * 2, _LAST_DELAY)
            finally:
                if connection is not None:
                    connection.disconnect()
        self._bell.close()
        self._hand.close()

    def _begin(self) -> None:
        """A new connection: every channel is asked for again."""
        with self._lock:
            self._asked = [(b"SUBSCRIBE", channel) for channel in self._channels]

    def _listen(self, connection: Any) -> None:
        last = time.monotonic()
        pinged = False
        with selectors.DefaultSelector() as sockets:
            sockets.register(connection._sock, selectors.EVENT_READ)
            sockets.register(self._bell, selectors.EVENT_READ)
            while not self._stopping.is_set():
                with self._lock:
                    asked, self._asked = self._asked, []
                for verb, channel in asked:
                    connection.send_command(verb, channel, check_health=False)
                # The parser may hold whole messages already: they raise no event on the socket.
                while connection.can_read(timeout=0):
                    self._handle(_read(connection))
                    last, pinged = time.monotonic(), False
                silent = time.monotonic() - last
                if silent > _PING_AFTER + _PONG_WITHIN:
                    raise redis.ConnectionError("the subscriptions' connection is silent")
                if silent > _PING_AFTER and not pinged:
                    connection.send_command("PING", check_health=False)
                    pinged = True
                sockets.select(_PONG_WITHIN / 2)
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)

    def _handle(self, reply: Any) -> None:
        if not isinstance(reply, list):
            return  # a refused subscription, or the answer to a ping
        kind, name = reply[0], reply[1]
        with self._lock:
            channel = self._channels.get(name)
        if channel is None:
            return
        if kind == b"message":
            channel.on_news(reply[2])
        elif kind == b"subscribe":
            with self._lock:
                late, channel.heard = channel.heard, True
                channel.ready.set()
            if late:
                channel.on_news(None)


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as refused:  # no right to one channel is no fault of the others
        return refused
