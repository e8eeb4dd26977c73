"""Connections of one process, for threads: redis-py's, without its pool's book-keeping."""

from __future__ import annotations

import queue
import time
from typing import Any

import redis

_LEAST = 0.001  # 0 would be "don't wait", which is another error


def timely(kind: Any) -> Any:
    """A class of redis-py's connections that are open, and whose every reply, the handshake's too,
    has begun to come, by their `end` (on the monotonic clock; None: in their own time)."""

    class Timely(kind):  # type: ignore[misc]  # a class that is given
        end: float | None = None
        socket_timeout: float | None
        socket_connect_timeout: float | None

        def _connect(self) -> Any:
            own = self.socket_timeout, self.socket_connect_timeout
            # TLS is agreed on within the first.
            self.socket_timeout = time_left(own[0], self.end)
            self.socket_connect_timeout = time_left(own[1], self.end)
            try:
                return super()._connect()
            finally:
                self.socket_timeout, self.socket_connect_timeout = own

        def read_response(self, *args: Any, **options: Any) -> Any:
            if self.end is not None and self._sock is not None:
                self._sock.settimeout(time_left(self.socket_timeout, self.end))
            return super().read_response(*args, **options)

    return Timely


def time_left(most: float | None, end: float | None) -> float | None:
    """`most` seconds, or what is left until `end`: a socket's timeout."""
    if end is None:
        return most
    left = max(_LEAST, end - time.monotonic())
    return left if most is None else min(most, left)


class ThreadPool(redis.BlockingConnectionPool):
    """At most `max_connections`. What a thread does here ends by its `end`, on the monotonic clock:
    its wait for a connection, the connection's handshake, each reply's first byte. (Of a host with
    several addresses each is tried for as long as the first.)

    A connection is not looked at before it is used. `exchange` leaves no reply behind on one: it
    is read to its end, or closed. And one that the server has closed is found out by its use: then
    all that lie idle are closed with it, so that the next try is on a new one.
    """

    def __init__(self, *, connection_class: Any = redis.Connection, **options: Any) -> None:
        options["connection_class"] = timely(connection_class)
        super().__init__(**options)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    def exchange(self, *packed: bytes, end: float) -> list[Any]:
        """Send commands (as packed bytes) on one connection; their replies.

        Raises redis-py's errors; the first error reply, when all have come.
        """
        connection = self._taken(end)
        usable = False
        try:
            connection.send_packed_command(packed)
            replies = [_reply(connection) for _ in packed]
            refused = next((each for each in replies if isinstance(each, Exception)), None)
            usable = not isinstance(refused, redis.ReadOnlyError)  # the primary is elsewhere
            if refused is not None:
                raise refused
            return replies
        except (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError):
            self._close_idle()
            raise
        finally:
            if not usable:
                connection.disconnect()
            self.release(connection)

    def _taken(self, end: float) -> Any:
        """A connection of this thread's own, open."""
        self._checkpid()
        try:
            connection = self.pool.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise redis.ConnectionError("no connection became free in time") from None
        if time.monotonic() >= end:
            self.pool.put_nowait(connection)
            raise redis.ConnectionError("a connection became free too late")
        try:
            if connection is None:
                connection = self.make_connection()  # type: ignore[no-untyped-call]
            connection.end = end
            connection.connect()
            connection._sock.settimeout(time_left(connection.socket_timeout, end))
        except BaseException:
            # redis-py leaves one open whose handshake was interrupted: unauthenticated, in another
            # database, with a reply to come.
            if connection is not None:
                connection.disconnect()
            self.pool.put_nowait(connection)
            raise
        return connection

    def release(self, connection: Any) -> None:
        self._checkpid()
        if self.owns_connection(connection):  # else it is of before a fork: the parent's
            self.pool.put_nowait(connection)

    def _close_idle(self) -> None:
        idle: list[Any] = []
        while True:
            try:
                idle.append(self.pool.get_nowait())
            except queue.Empty:
                break
        for connection in reversed(idle):  # in their order: the last in is the first out
            if connection is not None:
                connection.disconnect()
            self.pool.put_nowait(connection)


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
