"""The servers that the tests start do what their names say."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.conftest import OwnServer
from tests.support import wait_until


def test_a_server_starts_with_its_config_and_saves_nothing(own_server: OwnServer) -> None:
    server = own_server(maxmemory="10mb", maxmemory_policy="noeviction")
    with server.client(decode_responses=True) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("save") == {"save": ""}


def test_a_killed_server_refuses_and_answers_again_on_its_port(own_server: OwnServer) -> None:
    server = own_server()
    port, first = server.port, server.pid
    with server.client() as client:
        client.set("a", 1, ex=60)
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart()
        assert (server.port, client.get("a")) == (port, None)
        assert server.pid != first


def test_a_paused_server_keeps_silent_until_it_is_resumed(own_server: OwnServer) -> None:
    server = own_server()
    with server.client(socket_timeout=0.1, retry=None) as client:
        client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
    with server.client() as client:
        assert client.ping()


def test_an_append_only_server_has_its_keys_after_a_stop(own_server: OwnServer) -> None:
    server = own_server(appendonly="yes", appendfsync="always")
    with server.client() as client:
        client.set("a", 1, ex=60)
        server.stop()
        server.start()
        assert client.get("a") == b"1"


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_ends_with_the_process_that_started_it_even_when_that_is_killed() -> None:
    program = (
        "import sys; from tests.servers import Server; server = Server()\n"
        "print(server.port, server.directory, flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    port, directory = owner.stdout.readline().split()
    assert _listens(int(port))
    owner.kill()
    owner.communicate()
    wait_until(lambda: not _listens(int(port)) and not Path(directory).exists())
