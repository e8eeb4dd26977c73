"""The proxy's own faults are the ones it is asked for, and no others: on a real server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
import redis.asyncio

from tests.conftest import OwnServer
from tests.faults.proxy import Proxy
from tests.faults.resp import answers_a_command, command_end, command_name, end_of
from tests.servers import port_of
from tests.support import run, wait_until

BROKEN = (redis.ConnectionError, redis.TimeoutError)


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(port_of(redis_url)) as started:
        yield started


@pytest.fixture
def straight(redis_url: str) -> Iterator[redis.Redis]:
    """A client past the proxy, to see what the server has."""
    with redis.Redis.from_url(redis_url, db=0) as client:
        yield client


@contextmanager
def through(proxy: Proxy, **options: object) -> Iterator[redis.Redis]:
    """A client of one connection that never tries again by itself."""
    pool = redis.ConnectionPool.from_url(proxy.url, retry=None, max_connections=1, **options)
    with redis.Redis(connection_pool=pool) as client:
        yield client
    pool.disconnect()


@contextmanager
def raw(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as sock:
        yield sock


def read_to_end(sock: socket.socket) -> bytes:
    found = b""
    while data := sock.recv(65536):
        found += data
    return found


@pytest.mark.parametrize("protocol", [2, 3])
def test_it_passes_commands_and_replies_and_names_them(proxy: Proxy, protocol: int) -> None:
    with through(proxy, protocol=protocol) as client:
        client.hset("h", mapping={"a": 1, "b": 2})
        client.expire("h", 60)
        assert client.hgetall("h") == {b"a": b"1", b"b": b"2"}
        assert client.eval("return {1, {'x', false}, {}}", 0) == [1, [b"x", None], []]
        with pytest.raises(redis.ResponseError):
            client.incr("h")
    assert [name for name in proxy.commands if name not in ("CLIENT", "HELLO", "SELECT")] == [
        "HSET",
        "EXPIRE",
        "HGETALL",
        "EVAL",
        "INCRBY",
    ]
    assert proxy.connections == 1


def test_it_counts_every_connection(proxy: Proxy) -> None:
    for expected in (1, 2, 3):
        with raw(proxy) as sock:
            sock.sendall(b"PING\r\n")
            assert sock.recv(64) == b"+PONG\r\n"
        assert proxy.connections == expected
    assert proxy.commands == ["PING"] * 3


def test_a_large_value_passes_both_ways_unharmed(proxy: Proxy) -> None:
    value = bytes(range(256)) * 20_000
    with through(proxy) as client:
        client.set("large", value, ex=60)
        assert client.get("large") == value


def test_a_lost_reply_is_that_of_a_command_that_ran(proxy: Proxy, straight: redis.Redis) -> None:
    straight.set("n", 0, ex=60)
    with through(proxy) as client:
        client.ping()
        proxy.lose_reply(b"INCR")
        client.ping()
        with pytest.raises(BROKEN):
            client.incr("n")
        assert (straight.get("n"), proxy.lost) == (b"1", 1)
        assert client.incr("n") == 2, "it is lost once"
    assert proxy.lost == 1


def test_the_nth_command_is_counted_among_those_with_the_word(
    proxy: Proxy, straight: redis.Redis
) -> None:
    straight.set("n", 0, ex=60)
    with through(proxy) as client:
        proxy.lose_reply(b"INCR", nth=3)
        assert [client.incr("n"), client.ping(), client.incr("n")] == [1, True, 2]
        with pytest.raises(BROKEN):
            client.incr("n")
    assert (straight.get("n"), proxy.lost) == (b"3", 1)


def test_in_a_pipeline_the_replies_before_the_lost_one_arrive(
    proxy: Proxy, straight: redis.Redis
) -> None:
    straight.set("n", 0, ex=60)
    with raw(proxy) as sock:
        proxy.lose_reply(b"INCRBY n 5")
        sock.sendall(b"ECHO first\r\nINCRBY n 1\r\nINCRBY n 5\r\nECHO last\r\n")
        assert read_to_end(sock) == b"$5\r\nfirst\r\n:1\r\n"
    assert straight.get("n") == b"6"
    assert proxy.commands == ["ECHO", "INCRBY", "INCRBY", "ECHO"]


def test_a_word_that_comes_in_two_pieces_is_found(proxy: Proxy) -> None:
    with raw(proxy) as sock:
        proxy.lose_reply(b"ECHO needle")
        sock.sendall(b"PING\r\nECHO nee")
        assert sock.recv(64) == b"+PONG\r\n"
        sock.sendall(b"dle\r\n")
        assert read_to_end(sock) == b""
    assert proxy.lost == 1


def test_it_cuts_before_the_command_after_so_many(proxy: Proxy, straight: redis.Redis) -> None:
    straight.set("n", 0, ex=60)
    with raw(proxy) as sock:
        proxy.cut_after(2)
        for expected in (b":1\r\n", b":2\r\n"):
            sock.sendall(b"INCR n\r\n")
            assert sock.recv(64) == expected
        sock.sendall(b"INCR n\r\n")
        assert read_to_end(sock) == b""
    assert straight.get("n") == b"2", "the third was not passed on"
    with raw(proxy) as sock:
        sock.sendall(b"INCR n\r\n")
        assert sock.recv(64) == b":3\r\n", "it cuts once"


def test_cut_closes_every_connection_and_the_next_one_is_served(proxy: Proxy) -> None:
    with raw(proxy) as one, raw(proxy) as other:
        for sock in (one, other):
            sock.sendall(b"PING\r\n")
            assert sock.recv(64) == b"+PONG\r\n"
        proxy.cut()
        assert [read_to_end(one), read_to_end(other)] == [b"", b""]
    with through(proxy) as client:
        assert client.ping()


def test_held_connections_stay_open_and_silent_until_they_are_resumed(proxy: Proxy) -> None:
    with raw(proxy) as sock:
        proxy.hold()
        sock.settimeout(0.2)
        sock.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            sock.recv(64)
        with raw(proxy) as late:
            late.sendall(b"ECHO late\r\n")
            proxy.resume()
            assert late.recv(64) == b"$4\r\nlate\r\n"
        sock.settimeout(10)
        assert sock.recv(64) == b"+PONG\r\n"


def test_where_only_replies_are_held_the_command_runs(proxy: Proxy, straight: redis.Redis) -> None:
    straight.set("n", 0, ex=60)
    with raw(proxy) as sock:
        proxy.hold(["replies"])
        sock.sendall(b"INCR n\r\n")
        wait_until(lambda: straight.get("n") == b"1")
        proxy.resume()
        assert sock.recv(64) == b":1\r\n"


def test_where_only_requests_are_held_messages_still_arrive(
    proxy: Proxy, straight: redis.Redis
) -> None:
    with raw(proxy) as sock:
        sock.sendall(b"SUBSCRIBE c\r\n")
        assert b"subscribe" in sock.recv(256)
        proxy.hold(["requests"])
        sock.sendall(b"PING\r\n")
        assert straight.publish("c", "hello") == 1
        assert b"hello" in sock.recv(256)
        assert "PING" not in proxy.commands


def test_delayed_replies_come_later_and_in_their_order(proxy: Proxy) -> None:
    with raw(proxy) as sock:
        proxy.delay_replies(0.5)
        sock.sendall(b"ECHO a\r\n")
        sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            sock.recv(64)
        proxy.delay_replies(0)
        sock.sendall(b"ECHO b\r\nQUIT\r\n")
        sock.settimeout(10)
        assert read_to_end(sock) == b"$1\r\na\r\n$1\r\nb\r\n+OK\r\n"


def test_a_refusing_proxy_keeps_what_is_open_and_accepts_again_on_its_port(proxy: Proxy) -> None:
    port = proxy.port
    with raw(proxy) as sock:
        sock.sendall(b"PING\r\n")
        assert sock.recv(64) == b"+PONG\r\n"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError), raw(proxy):
            pass
        sock.sendall(b"PING\r\n")
        assert sock.recv(64) == b"+PONG\r\n"
    proxy.accept()
    assert proxy.port == port
    with through(proxy) as client:
        assert client.ping()


@pytest.mark.parametrize("protocol", [2, 3])
def test_messages_of_a_channel_pass_and_are_no_replies(
    proxy: Proxy, straight: redis.Redis, protocol: int
) -> None:
    with through(proxy, protocol=protocol) as client:
        channel = client.pubsub()
        channel.subscribe("c")
        assert (channel.get_message(timeout=10) or {})["type"] == "subscribe"
        for text in (b"one", b"two"):
            straight.publish("c", text)
            assert (channel.get_message(timeout=10) or {})["data"] == text
        proxy.lose_reply(b"SUBSCRIBE")
        channel.subscribe("d")
        straight.publish("c", "three")
        with pytest.raises(BROKEN):
            while channel.get_message(timeout=10):
                pass
        channel.close()
    assert proxy.lost == 1


def test_a_server_that_is_gone_ends_the_connection(own_server: OwnServer) -> None:
    server = own_server()
    with Proxy(server.port) as proxy, through(proxy) as client:
        assert client.ping()
        server.kill()
        with pytest.raises(BROKEN):
            client.ping()
        with pytest.raises(BROKEN):
            client.ping()
        server.start()
        assert client.ping()


def test_async_tests_use_it_alike(proxy: Proxy) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(proxy.url, retry=None, max_connections=1)
        await client.set("n", 0, ex=60)
        proxy.lose_reply(b"INCR")
        with pytest.raises(BROKEN):
            await client.incr("n")
        proxy.hold()
        waiting = asyncio.ensure_future(client.incr("n"))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        proxy.resume()
        assert await waiting == 2
        await client.aclose()

    run(main())


def test_a_closed_proxy_leaves_no_thread_and_no_open_port(redis_url: str) -> None:
    before = set(threading.enumerate())
    proxy = Proxy(port_of(redis_url))
    with raw(proxy) as sock:
        sock.sendall(b"PING\r\n")
        assert sock.recv(64) == b"+PONG\r\n"
        proxy.hold()
        sock.sendall(b"PING\r\n")
        proxy.close()
        proxy.close()
        assert read_to_end(sock) == b""
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError), raw(proxy):
        pass


VALUES = [
    b"+OK\r\n",
    b"-ERR no\r\n",
    b":12\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",1.5\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$4\r\na\r\nb\r\n",
    b"=7\r\ntxt:abc\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n:1\r\n*2\r\n$1\r\na\r\n_\r\n",
    b"%1\r\n+k\r\n~2\r\n:1\r\n:2\r\n",
    b"|1\r\n+ttl\r\n:3\r\n*1\r\n:1\r\n",
    b">2\r\n+invalidate\r\n*1\r\n$1\r\na\r\n",
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:1].decode())
def test_a_value_of_the_protocol_ends_where_it_ends(value: bytes) -> None:
    assert end_of(value + b"+next\r\n") == len(value)
    assert [end_of(value[:cut]) for cut in range(len(value))] == [None] * len(value)
    assert answers_a_command(value) == (value[:1] != b">")


def test_commands_are_arrays_or_lines() -> None:
    array = b"*2\r\n$3\r\nget\r\n$1\r\na\r\n"
    assert (command_end(array + b"*1"), command_name(array)) == (len(array), "GET")
    assert (command_end(b"ping  x\r\nget"), command_name(b"ping  x\r\n")) == (9, "PING")
    assert (command_end(b"pin"), command_end(b""), command_end(b"*1\r\n")) == (None, None, None)
