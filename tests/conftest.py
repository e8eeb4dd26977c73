"""Fixtures of all tests: a real server once a session, flushed around each test that uses it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis
from hypothesis import settings

from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.servers import Server

OwnServer = Callable[..., Server]

# A busy machine is no reason for a property to fail.
settings.register_profile("retrysafe", deadline=None)
settings.load_profile("retrysafe")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell that runs the tests doesn't configure them."""
    for name in list(os.environ):
        if name.upper().startswith("RETRYSAFE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One server for the session; don't stop it, take `own_server` for that."""
    with Server() as started:
        yield started


def _own_database(url: str, worker: str) -> str:
    """Parallel test processes share an outside server, each with a database of its own."""
    number = int(worker.removeprefix("gw")) if worker.startswith("gw") else 0
    parts = urlsplit(url)
    first = int(parts.path.strip("/") or 0)
    return urlunsplit(parts._replace(path=f"/{first + number}"))


def _without_ttl(client: redis.Redis) -> list[bytes]:
    # -1 is "no TTL"; -2 is a key that expired since the scan.
    return [key for key in client.scan_iter(count=1000) if client.pttl(key) == -1]


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty server. After the test every key left in it must have a TTL.

    `TEST_REDIS_URL` names a server to use in place of the embedded one; its database is flushed.
    """
    if outside := os.environ.get("TEST_REDIS_URL"):
        url = _own_database(outside, os.environ.get("PYTEST_XDIST_WORKER", ""))
    else:
        url = request.getfixturevalue("server").url
    with redis.Redis.from_url(url) as client:
        client.flushdb()
        yield url
        lasting = _without_ttl(client)
        client.flushdb()
    assert not lasting, f"keys without a TTL: {lasting}"


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Store:
    """Every store that receipts may lie in, empty."""
    if request.param == "memory":
        return MemoryStore("tests")
    return RedisStore(request.getfixturevalue("redis_url"), "tests")


@pytest.fixture
def own_server() -> Iterator[OwnServer]:
    """Starts servers that this test may stop, kill and pause: `own_server(maxmemory="10mb")`."""
    started: list[Server] = []

    def start(**config: object) -> Server:
        server = Server(config)
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()
