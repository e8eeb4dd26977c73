"""What the clients really raise, at a server that refuses, hangs up, or never answers."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import redis
import redis.asyncio
import requests
import urllib3

from retrysafe.classify import Classification, Outcome, classify
from tests.support import run

WAIT = 0.2  # how long the clients wait for an answer, seconds


@contextmanager
def server(answer: bytes | None) -> Iterator[int]:
    """A port whose server reads a request and sends `answer`, then hangs up; None: holds on."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while not done.is_set():
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    if answer is None:
                        done.wait(10)
                    elif answer:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            done.set()
            listening.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port: int = closed.getsockname()[1]
        return port


def by_httpx(port: int) -> object:
    return httpx.post(f"http://127.0.0.1:{port}/", timeout=WAIT, trust_env=False)


def by_httpx2(port: int) -> object:
    return httpx2.post(f"http://127.0.0.1:{port}/", timeout=WAIT, trust_env=False)


def by_requests(port: int) -> object:
    with requests.Session() as session:
        session.trust_env = False
        return session.post(f"http://127.0.0.1:{port}/", timeout=WAIT)


def by_urllib3(port: int) -> object:
    with urllib3.PoolManager(retries=False) as pool:
        return pool.request("POST", f"http://127.0.0.1:{port}/", timeout=WAIT)


def by_urllib(port: int) -> object:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(f"http://127.0.0.1:{port}/", data=b"x", timeout=WAIT)


def by_aiohttp(port: int) -> object:
    async def post() -> object:
        timeout = aiohttp.ClientTimeout(total=WAIT)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"http://127.0.0.1:{port}/") as response,
        ):
            return response

    return run(post())


def by_redis(port: int) -> object:
    options: dict[str, Any] = {"socket_timeout": WAIT, "retry": None}
    with redis.Redis(port=port, **options) as client:
        return client.incr("n")


def by_redis_asyncio(port: int) -> object:
    async def incr() -> object:
        options: dict[str, Any] = {"socket_timeout": WAIT, "retry": None}
        async with redis.asyncio.Redis(port=port, **options) as client:
            return await client.incr("n")

    return run(incr())


def by_streams(port: int) -> object:
    async def ask() -> object:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"x")
            async with asyncio.timeout(WAIT):
                return await reader.readexactly(1)
        finally:
            writer.close()

    return run(ask())


HTTP = [by_httpx, by_httpx2, by_requests, by_urllib3, by_urllib, by_aiohttp]
ALL = [*HTTP, by_redis, by_redis_asyncio, by_streams]


def failure(call: Callable[[int], object], port: int) -> Classification:
    with pytest.raises(Exception) as caught:
        call(port)
    return classify(caught.value)


@pytest.mark.parametrize("call", ALL)
def test_C69_B103_a_refused_connection_was_never_used(call: Callable[[int], object]) -> None:
    found = failure(call, unused_port())
    assert (found.outcome, found.sent, found.may_have_run) == (Outcome.TRANSIENT, False, False)


@pytest.mark.parametrize("call", ALL)
def test_B103_a_server_that_hangs_up_may_have_acted(call: Callable[[int], object]) -> None:
    with server(b"") as port:
        assert failure(call, port).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("call", ALL)
def test_B103_a_server_that_never_answers_may_have_acted(call: Callable[[int], object]) -> None:
    with server(None) as port:
        assert failure(call, port).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("call", HTTP)
def test_an_answer_that_is_no_http_is_never_retried_without_a_key(
    call: Callable[[int], object],
) -> None:
    with server(b"SSH-2.0-OpenSSH\r\n\r\n") as port:
        found = failure(call, port)
    assert found.outcome in (Outcome.PROTOCOL, Outcome.UNKNOWN)
    assert not found.retryable(repeatable=False)


@pytest.mark.parametrize("call", HTTP)
def test_an_answer_cut_short_may_have_acted(call: Callable[[int], object]) -> None:
    def read(port: int) -> object:
        response: Any = call(port)
        return response.read() if hasattr(response, "read") else response.content

    if call is by_aiohttp:

        def read(port: int) -> object:
            async def post() -> bytes:
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(f"http://127.0.0.1:{port}/") as response,
                ):
                    return await response.read()

            return run(post())

    with server(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf") as port:
        assert failure(read, port).outcome is Outcome.UNKNOWN
