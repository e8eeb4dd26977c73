"""What differs from server to server: connections that are kept, cut, piped and shut down."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.apps import PIECE, PIECES
from tests.faults.workers import Ledger, Worker
from tests.support import run, until

Start = Callable[..., Worker]

pytestmark = pytest.mark.slow

every_server = pytest.mark.parametrize("kind", ["uvicorn", "uvicorn-h11", "hypercorn", "granian"])


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def start(redis_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts servers of the shop app on the test's Redis; all are gone at its end."""
    monkeypatch.setattr("tests.faults.workers.APP", "tests.apps.shop:app")
    started: list[Worker] = []

    def worker(kind: str, **settings: str) -> Worker:
        started.append(Worker(kind, redis_url, ledger.path, **settings))
        return started[-1]

    yield worker
    for each in started:
        each.kill()


def order(payment: str, seconds: float = 0.0) -> bytes:
    return json.dumps({"payment": payment, "cents": 100, "seconds": seconds}).encode()


def head(key: str, *lines: str, path: str = "/payments") -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: x", f"Idempotency-Key: {key}"]
    return "\r\n".join([*first, *lines, "", ""]).encode()


def connect(worker: Worker) -> socket.socket:
    return socket.create_connection(("127.0.0.1", worker.port), timeout=20)


def ask(
    connection: http.client.HTTPConnection, body: bytes, key: str, path: str = "/payments"
) -> tuple[http.client.HTTPResponse, bytes]:
    connection.request("POST", path, body, {"Idempotency-Key": key})
    answer = connection.getresponse()
    return answer, answer.read()


@every_server
def test_I8_I10_a_413_leaves_the_connection_usable(start: Start, ledger: Ledger, kind: str) -> None:
    worker = start(kind, max_request_body="1KiB")
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    assert ask(connection, order("kept"), "kept")[0].status == 201
    first = connection.sock
    too_large, problem = ask(connection, b"x" * 100_000, "large")
    assert too_large.status == 413
    assert json.loads(problem)["type"] == "urn:retrysafe:problem:body-too-large"
    again, _ = ask(connection, order("kept"), "kept")
    assert again.status == 201
    assert again.headers["Idempotent-Replayed"] == "true"
    assert connection.sock is first
    connection.close()
    assert ledger.count("moved") == 1


@every_server
def test_I10_pipelined_retries_are_answered_in_turn(
    start: Start, ledger: Ledger, kind: str
) -> None:
    worker = start(kind)
    body = order("pipe")
    whole = head("pipe", f"Content-Length: {len(body)}") + body
    with connect(worker) as raw:
        raw.sendall(whole * 3)
        received = b""
        while received.count(b"HTTP/1.1 201") < 3 or received.count(b"paid") < 3:
            more = raw.recv(65536)
            assert more, received
            received += more
    assert received.lower().count(b"idempotent-replayed: true") == 2
    assert ledger.count("moved") == 1


@every_server
def test_I10_an_expected_100_comes_before_the_body(start: Start, ledger: Ledger, kind: str) -> None:
    worker = start(kind)
    body = order("expect")
    with connect(worker) as raw:
        raw.sendall(head("expect", f"Content-Length: {len(body)}", "Expect: 100-continue"))
        received = raw.recv(65536)
        assert received.startswith(b"HTTP/1.1 100")
        raw.sendall(body)
        while b"paid" not in received:
            more = raw.recv(65536)
            assert more, received
            received += more
        assert b"HTTP/1.1 201" in received
    assert ledger.count("moved") == 1


@every_server
def test_I7_a_chunked_retry_is_the_same_request(start: Start, ledger: Ledger, kind: str) -> None:
    worker = start(kind)
    body = order("cut")
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    assert ask(connection, body, "cut")[0].status == 201
    connection.close()
    with connect(worker) as raw:
        raw.sendall(head("cut", "Transfer-Encoding: chunked", "Connection: close"))
        for n in range(0, len(body), 7):
            piece = body[n : n + 7]
            raw.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        raw.sendall(b"0\r\n\r\n")
        received = b""
        while more := raw.recv(65536):
            received += more
    assert received.startswith(b"HTTP/1.1 201")
    assert b"idempotent-replayed: true" in received.lower()
    assert ledger.count("moved") == 1


@every_server
def test_I9_O74_a_client_that_leaves_while_sending_runs_nothing(
    start: Start, ledger: Ledger, kind: str
) -> None:
    worker = start(kind)
    body = order("half")
    with connect(worker) as raw:
        raw.sendall(head("half", f"Content-Length: {len(body)}") + body[:10])
    # Its key is free: another payload may take it.
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    answer, _ = ask(connection, order("whole"), "half")
    assert answer.status == 201
    assert "Idempotent-Replayed" not in answer.headers
    connection.close()
    assert ledger.count("started") == 1


@every_server
def test_O57_O58_a_client_that_leaves_within_a_streamed_answer_finds_it_whole_later(
    start: Start, ledger: Ledger, kind: str
) -> None:
    worker = start(kind)
    with connect(worker) as raw:
        raw.sendall(head("report", "Content-Length: 0", path="/reports/"))
        received = b""
        while b"A" * 100 not in received:
            more = raw.recv(65536)
            assert more, received
            received += more
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    answer, content = ask(connection, b"", "report", "/reports/")
    connection.close()
    assert answer.status == 201
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert content == b"".join(bytes([65 + n]) * PIECE for n in range(PIECES))
    assert ledger.count("started") == ledger.count("moved") == 1


@every_server
def test_I64_a_waiting_duplicate_that_hangs_up_disturbs_nobody(
    start: Start, ledger: Ledger, kind: str
) -> None:
    worker = start(kind)
    body = order("wait", 1.0)

    async def main() -> None:
        async with httpx.AsyncClient(base_url=worker.base, timeout=20) as client:
            owner = asyncio.create_task(
                client.post("/payments", content=body, headers={"Idempotency-Key": "wait"})
            )
            await until(lambda: ledger.count("started") == 1)
            for _ in range(5):
                with connect(worker) as raw:
                    raw.sendall(head("wait", f"Content-Length: {len(body)}") + body)
            patient = await client.post(
                "/payments", content=body, headers={"Idempotency-Key": "wait"}
            )
            first = await owner
        assert first.status_code == patient.status_code == 201
        assert patient.content == first.content
        assert patient.headers["Idempotent-Replayed"] == "true"

    run(main())
    assert ledger.count("started") == ledger.count("moved") == 1


@pytest.mark.parametrize("kind", ["uvicorn", "uvicorn-h11", "hypercorn"])
def test_I24_O46_a_worker_that_is_shut_down_hands_its_key_over_at_once(
    start: Start, ledger: Ledger, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UVICORN_TIMEOUT_GRACEFUL_SHUTDOWN", "1")
    first, second = (start(kind, lease="60s", wait="30s") for _ in range(2))
    body = order("moving", 40.0)  # longer than any server's grace

    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as client:

            def call(worker: Worker) -> asyncio.Task[httpx.Response]:
                url = f"{worker.base}/payments"
                headers = {"Idempotency-Key": "moving"}
                return asyncio.create_task(client.post(url, content=body, headers=headers))

            victim = call(first)
            await until(lambda: ledger.count("started") == 1)
            waiter = call(second)
            os.kill(first.process.pid, signal.SIGTERM)
            # The servers' grace and ours; the lease would be a minute.
            await until(lambda: ledger.count("started") == 2, limit=25)
            victim.cancel()
            waiter.cancel()
            await asyncio.gather(victim, waiter, return_exceptions=True)

    run(main(), limit=60)
    assert ledger.count("moved") == 0
