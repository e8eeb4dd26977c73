"""The connections of a process's threads: each reply goes to its own command, whatever happens."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hiredis
import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from retrysafe.stores.multiplexer import pack
from retrysafe.stores.pool import ThreadPool
from retrysafe.stores.redis import RedisStore, thread_pool
from tests.conftest import OwnServer
from tests.servers import Server
from tests.support import wait_until


@pytest.fixture
def served(own_server: OwnServer) -> Iterator[tuple[Server, ThreadPool]]:
    server = own_server()
    pool = thread_pool(host="127.0.0.1", port=server.port)
    yield server, pool
    pool.disconnect()


def echo(pool: ThreadPool, text: bytes, within: float = 20.0) -> Any:
    return pool.exchange(pack("ECHO", text), end=time.monotonic() + within)[0]


def test_a_thread_that_is_interrupted_leaves_its_reply_to_nobody(
    served: tuple[Server, ThreadPool],
) -> None:
    server, pool = served
    assert echo(pool, b"before") == b"before"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    was = signal.signal(signal.SIGALRM, interrupt)
    server.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            echo(pool, b"interrupted")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)
        server.resume()
    for n in range(10):
        assert echo(pool, b"after %d" % n) == b"after %d" % n


def test_connections_that_the_server_closed_are_left_together(
    served: tuple[Server, ThreadPool],
) -> None:
    server, pool = served
    at_once = threading.Barrier(20)

    def one(n: int) -> None:
        at_once.wait()
        echo(pool, b"%d" % n)

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(one, range(20)))
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    with pytest.raises(redis.ConnectionError):
        echo(pool, b"cut")
    assert echo(pool, b"again") == b"again"  # not one of the other nineteen


def test_an_error_reply_costs_no_connection_and_comes_after_all_replies(
    served: tuple[Server, ThreadPool],
) -> None:
    _, pool = served
    for _ in range(3):
        with pytest.raises(redis.ResponseError, match="unknown command"):
            pool.exchange(
                pack("ECHO", "a"), pack("NONSENSE"), pack("ECHO", "b"), end=time.monotonic() + 20
            )
        assert echo(pool, b"c") == b"c"
    assert len(pool._connections) == 1


def test_more_threads_than_connections_wait_for_one(own_server: OwnServer) -> None:
    server = own_server()
    pool = ThreadPool(host="127.0.0.1", port=server.port, max_connections=2)
    texts = [b"%d" % n for n in range(500)]
    with ThreadPoolExecutor(20) as threads:
        assert list(threads.map(lambda text: echo(pool, text), texts)) == texts
    assert len(pool._connections) <= 2
    pool.disconnect()


def test_no_connection_in_time_is_an_error_and_none_is_lost(own_server: OwnServer) -> None:
    server = own_server()
    pool = ThreadPool(host="127.0.0.1", port=server.port, max_connections=1)
    assert echo(pool, b"w") == b"w"
    held = pool.pool.get()
    with pytest.raises(redis.ConnectionError, match="in time"):
        echo(pool, b"x", within=0.05)
    pool.release(held)
    assert echo(pool, b"y") == b"y"
    pool.disconnect()


def test_a_server_that_is_down_takes_no_place_in_the_pool(own_server: OwnServer) -> None:
    server = own_server()
    pool = ThreadPool(host="127.0.0.1", port=server.port, max_connections=1)
    port = server.port
    server.stop()
    for _ in range(5):
        with pytest.raises(redis.ConnectionError, match=str(port)):
            echo(pool, b"x")


def test_a_command_after_all_idle_connections_were_cut_is_answered(own_server: OwnServer) -> None:
    server = own_server()
    backend = RedisStore(server.url).open()
    with ThreadPoolExecutor(30) as threads:
        list(threads.map(lambda _: backend.command("PING"), range(100)))
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for _ in range(5):
            assert backend.command("ECHO", "x") == b"x"
        wait_until(lambda: len(client.client_list()) == 2)  # this one, and a single new one
    backend.close()


def test_a_handshake_that_is_interrupted_leaves_no_open_connection(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given an interrupt between two replies of the handshake, then the next command is in its own
    database, and is given its own reply."""
    server = own_server()
    pool = thread_pool(host="127.0.0.1", port=server.port, db=3)
    whole = redis.Connection.read_response
    asked: list[str] = []

    def interrupted(self: Any, *args: Any, **options: Any) -> Any:
        asked.append("reply")
        if len(asked) == 1:
            raise KeyboardInterrupt
        return whole(self, *args, **options)

    monkeypatch.setattr(redis.Connection, "read_response", interrupted)
    with pytest.raises(KeyboardInterrupt):
        echo(pool, b"first")
    assert echo(pool, b"second") == b"second"
    (info,) = pool.exchange(pack("CLIENT", "INFO"), end=time.monotonic() + 20)
    assert b" db=3 " in info
    assert pool.pool.qsize() == 64
    pool.disconnect()


def test_a_shorter_timeout_of_the_url_holds(own_server: OwnServer) -> None:
    server = own_server()
    pool = RedisStore(f"{server.url}?socket_timeout=0.2").open()._pool
    assert echo(pool, b"a") == b"a"
    server.pause()
    began = time.monotonic()
    try:
        with pytest.raises(redis.TimeoutError):
            echo(pool, b"b", within=20.0)
    finally:
        server.resume()
    assert time.monotonic() - began < 10  # not the command's own 20
    pool.disconnect()


@given(st.lists(st.binary() | st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
@example(["SET", b"k", b"\r\n$3\r\n*0", "", "\u20ac", b"x" * 70_000])
def test_a_command_is_packed_as_others_pack_it(words: list[bytes | str]) -> None:
    assert pack(*words) == hiredis.pack_command(tuple(words))


def test_numbers_are_packed_as_text() -> None:
    assert pack("SET", b"k", 12, "PX", 60_000) == pack("SET", b"k", "12", "PX", "60000")


def test_a_tls_handshake_that_hangs_ends_in_its_commands_time() -> None:
    """Given a server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"rediss://127.0.0.1:{silent.getsockname()[1]}"
        pool = RedisStore(url).open()._pool
        pool.connection_kwargs["socket_timeout"] = 60.0
        began = time.monotonic()
        with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            echo(pool, b"x", within=0.2)
        assert time.monotonic() - began < 10  # not the socket's own 60
        pool.disconnect()


def test_a_connection_that_is_closed_under_its_thread_is_an_error_of_redis_pys(
    served: tuple[Server, ThreadPool],
) -> None:
    _, pool = served
    assert echo(pool, b"a") == b"a"
    connection = pool._taken(time.monotonic() + 20)
    connection.send_command("ECHO", "b")
    pool.disconnect()
    with pytest.raises(redis.ConnectionError):
        connection.read_response()
    pool.release(connection)
