"""TLS to a server, to sentinels, to a Cluster, ended by a relay: the embedded server has none."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from retrysafe import errors
from retrysafe.receipts import AsyncReceipts, Receipts
from retrysafe.records import Record
from retrysafe.stores import Store
from retrysafe.stores.cluster import ClusterStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sentinel import SentinelStore
from tests.conftest import OwnServer
from tests.receipting import CALL, held, policy
from tests.servers import Cluster, Replicated
from tests.support import run


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that vouches for itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certified, secret = directory / "cert.pem", directory / "key.pem"
    certified.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certified, secret


class Relay:
    """Speaks TLS on a port of its own and passes the bytes on in the open."""

    def __init__(self, upstream: int, certified: Path, secret: Path) -> None:
        self._upstream = upstream
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certified, secret)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, on = await asyncio.open_connection("127.0.0.1", self._upstream)
        await asyncio.gather(_pass(reader, on), _pass(back, writer))

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _pass(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # either end may go first
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


def is_served(store: Callable[[], Store], payload: bytes = b"r") -> None:
    """What a coroutine records through one store, a thread reads through another."""

    async def main() -> None:
        await (await held(AsyncReceipts(store(), policy()))).finish(payload, 60)

    run(main())
    got = Receipts(store(), policy()).begin(CALL)
    assert isinstance(got, Record)
    assert got.payload == payload


def is_refused(store: Store) -> None:
    """In both colours."""

    async def main() -> None:
        with pytest.raises(errors.StoreUnavailable):
            await AsyncReceipts(store, policy()).begin(CALL)

    run(main())
    with pytest.raises(errors.StoreUnavailable):
        Receipts(store, policy()).begin(CALL)


@pytest.fixture
def relayed(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A node that can be reached by TLS at the port it announces; its host, the certificate."""
    certified, secret = certificate(tmp_path)
    with Cluster(primaries=1) as own:
        (node,) = own.nodes
        relay = Relay(node.port, certified, secret)
        try:
            with node.client() as client:
                client.config_set("cluster-announce-port", relay.port)
            yield f"127.0.0.1:{relay.port}", certified
        finally:
            relay.close()


@pytest.mark.parametrize("form", ["rediss+cluster://{}?", "redis+cluster://{}?tls=true&"])
def test_a_cluster_is_reached_by_tls(relayed: tuple[str, Path], form: str) -> None:
    place, certified = relayed
    url = form.format(place) + f"ssl_ca_certs={certified}"
    is_served(lambda: ClusterStore(url, "tls"))


def test_a_certificate_that_nobody_vouches_for_is_refused(relayed: tuple[str, Path]) -> None:
    place, _ = relayed
    is_refused(ClusterStore(f"rediss+cluster://{place}", "tls"))


# One server


@pytest.fixture
def alone(own_server: OwnServer, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    certified, secret = certificate(tmp_path)
    relay = Relay(own_server().port, certified, secret)
    yield f"rediss://127.0.0.1:{relay.port}/0", certified
    relay.close()


def test_a_server_is_reached_by_tls(alone: tuple[str, Path]) -> None:
    place, certified = alone
    url = f"{place}?ssl_ca_certs={certified}"
    is_served(lambda: RedisStore(url, "tls"), b"r" * 100_000)  # on the lane of large values


def test_a_server_whose_certificate_nobody_vouches_for_is_refused(alone: tuple[str, Path]) -> None:
    is_refused(RedisStore(alone[0], "tls"))


# Sentinels


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Sentinels that can be reached by TLS, and the primary that they name, in the open."""
    certified, secret = certificate(tmp_path)
    with Replicated(replicas=1, sentinels=1) as own:
        (sentinel,) = own.sentinels
        relay = Relay(sentinel.port, certified, secret)
        try:
            yield f"redis+sentinel://127.0.0.1:{relay.port}/{own.service}/0", certified
        finally:
            relay.close()


def test_sentinels_are_asked_by_tls(guarded: tuple[str, Path]) -> None:
    place, certified = guarded
    url = f"{place}?sentinel_tls=true&ssl_ca_certs={certified}"
    is_served(lambda: SentinelStore(url, "tls"))


def test_a_sentinel_that_nobody_vouches_for_names_no_primary(guarded: tuple[str, Path]) -> None:
    is_refused(SentinelStore(f"{guarded[0]}?sentinel_tls=true", "tls"))
