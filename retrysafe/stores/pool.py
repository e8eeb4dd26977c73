"""Connections of one process, for threads: redis-py's, without its pool's book-keeping."""

from __future__ import annotations

import queue
import time
from typing import Any

import redis

CONNECT_TIMEOUT = 1.0
_LEAST = 0.001  # 0 would be "don't wait", which is another error


class ThreadPool(redis.BlockingConnectionPool):
    """At most `max_connections`; all that a thread does here ends by its `end`, on the monotonic
    clock.

    A connection is not looked at before it is used. `exchange` leaves no reply behind on one: it
    is read to its end, or closed. And one that the server has closed is found out by its use: then
    all that lie idle are closed with it, so that the next try is on a new one.
    """

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
        finally:
            if not usable:
                connection.disconnect()
                self._close_idle()
            self.release(connection)

    def _taken(self, end: float) -> Any:
        """A connection of this thread's own, which is open and takes no longer than to `end`."""
        self._checkpid()
        try:
            connection = self.pool.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise redis.ConnectionError("no connection became free in time") from None
        try:
            if connection is None:
                connection = self.make_connection()  # type: ignore[no-untyped-call]
            left = max(_LEAST, end - time.monotonic())
            if connection._sock is None:
                connection.socket_timeout = left
                connection.socket_connect_timeout = min(CONNECT_TIMEOUT, left)
                connection.connect()
                left = max(_LEAST, end - time.monotonic())
            connection._sock.settimeout(left)
        except BaseException:
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
