"""Several worker processes over one Redis: storms, kills, pauses and clients that hang up."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.workers import Ledger, Worker
from tests.support import run, until, wait_until

Start = Callable[..., Worker]

pytestmark = pytest.mark.slow


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


@pytest.fixture
def start(redis_url: str, ledger: Ledger) -> Iterator[Start]:
    """Starts workers on the test's Redis; all are gone at its end."""
    started: list[Worker] = []

    def worker(server: str = "uvicorn", **settings: str) -> Worker:
        made = Worker(server, redis_url, ledger.path, **{"lease": "1s", "wait": "15s", **settings})
        started.append(made)
        return made

    yield worker
    for each in started:
        each.resume()
        each.kill()


def order(payment: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"payment": payment, "cents": 100, "seconds": seconds}


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=500, max_keepalive_connections=500)
    return httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(90, pool=None))


async def pay(
    http_client: httpx.AsyncClient, worker: Worker, payment: str, seconds: float = 0.0
) -> httpx.Response:
    return await http_client.post(
        f"{worker.base}/payments",
        json=order(payment, seconds),
        headers={"Idempotency-Key": payment},
    )


def test_B002_200_duplicates_over_two_workers_run_once(start: Start, ledger: Ledger) -> None:
    async def main() -> None:
        workers = [start(lease="30s"), start(lease="30s")]
        async with client() as http_client:
            calls = [pay(http_client, workers[n % 2], "one", 0.5) for n in range(200)]
            answers = await asyncio.gather(*calls)
        assert {(each.status_code, each.content) for each in answers} == {(201, answers[0].content)}
        assert sum("idempotent-replayed" not in each.headers for each in answers) == 1

    run(main(), limit=110)
    assert ledger.count("started") == ledger.count("moved") == 1


def test_300_keys_with_3_duplicates_each_run_300_times(start: Start, ledger: Ledger) -> None:
    async def main() -> None:
        workers = [start(lease="30s", wait="90s"), start(lease="30s", wait="90s")]
        async with client() as http_client:
            calls = [
                pay(http_client, workers[(n + copy) % 2], f"p{n}")
                for copy in range(3)
                for n in range(300)
            ]
            answers = await asyncio.gather(*calls)
        assert {each.status_code for each in answers} == {201}

    run(main(), limit=110)
    assert ledger.count("started") == ledger.count("moved") == 300


def test_B008_B009_B015_a_killed_workers_key_is_taken_over_by_one_waiter(
    start: Start, ledger: Ledger
) -> None:
    async def main() -> None:
        first, second = start(), start()
        async with client() as http_client:
            victim = asyncio.create_task(pay(http_client, first, "victim", 1.5))
            await until(lambda: ledger.count("started") == 1)
            waiters = [
                asyncio.create_task(pay(http_client, second, "victim", 1.5)) for _ in range(30)
            ]
            first.kill()
            with pytest.raises(httpx.TransportError):
                await victim
            # The lease is 1 s: a waiter takes over within it and one more, long before its wait.
            await until(lambda: ledger.count("started") == 2, limit=2.5)
            answers = await asyncio.gather(*waiters)
        assert {each.status_code for each in answers} == {201}

    run(main(), limit=110)
    assert ledger.count("started") == 2
    assert ledger.count("moved") == 1


def test_with_refuse_the_retry_of_a_killed_workers_call_is_told_abandoned(
    start: Start, ledger: Ledger
) -> None:
    async def main() -> None:
        first, second = start(on_abandoned="refuse"), start(on_abandoned="refuse")
        async with client() as http_client:
            victim = asyncio.create_task(pay(http_client, first, "victim", 5))
            await until(lambda: ledger.count("started") == 1)
            waiter = asyncio.create_task(pay(http_client, second, "victim", 5))
            first.kill()
            with pytest.raises(httpx.TransportError):
                await victim
            answer = await waiter
        assert answer.status_code == 409
        assert answer.json()["type"] == "urn:retrysafe:problem:abandoned"

    run(main(), limit=110)
    assert ledger.count("started") == 1


def test_I44_a_worker_that_wakes_up_too_late_answers_from_the_record_that_won(
    start: Start, ledger: Ledger
) -> None:
    async def main() -> None:
        first, second = start(), start()
        async with client() as http_client:
            sleeper = asyncio.create_task(pay(http_client, first, "one", 1.0))
            await until(lambda: ledger.count("started") == 1)
            first.pause()
            other = await pay(http_client, second, "one", 1.0)
            first.resume()
            late = await sleeper
            again = await pay(http_client, second, "one", 1.0)
        assert other.status_code == late.status_code == again.status_code == 201
        assert other.content == late.content == again.content

    run(main(), limit=110)
    assert ledger.count("started") == 2  # both ran: that is what a pause beyond the lease costs


@pytest.mark.parametrize("kind", ["uvicorn", "uvicorn-h11", "hypercorn", "granian"])
def test_O57_a_client_that_hangs_up_loses_nothing(start: Start, ledger: Ledger, kind: str) -> None:
    worker = start(kind)
    body = json.dumps(order("gone", 1.0)).encode()
    with socket.create_connection(("127.0.0.1", worker.port)) as raw:
        raw.sendall(
            b"POST /payments HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Idempotency-Key: gone\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_until(lambda: ledger.count("started") == 1)
    # The same request, in the same form: the same bytes.
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    headers = {"Idempotency-Key": "gone", "Content-Type": "application/json"}
    connection.request("POST", "/payments", body, headers)
    answer = connection.getresponse()
    assert answer.status == 201
    assert answer.headers["Idempotent-Replayed"] == "true"
    connection.close()
    assert ledger.count("started") == ledger.count("moved") == 1


def test_O88_gunicorn_with_preload_forks_and_works(start: Start, ledger: Ledger) -> None:
    async def main() -> None:
        worker = start("gunicorn")
        async with client() as http_client:
            answers = await asyncio.gather(
                *(pay(http_client, worker, f"p{n % 20}", 0.05) for n in range(100))
            )
        assert {each.status_code for each in answers} == {201}

    run(main(), limit=110)
    assert ledger.count("moved") == 20


def test_I10_a_kept_alive_connection_carries_retries_and_a_413(
    start: Start, ledger: Ledger
) -> None:
    worker = start(max_request_body="1KiB")
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    body = json.dumps(order("kept")).encode()
    headers = {"Idempotency-Key": "kept", "Content-Type": "application/json"}
    statuses = []
    for sent in (body, b"x" * 2000, body):
        connection.request("POST", "/payments", sent, headers)
        answer = connection.getresponse()
        answer.read()
        statuses.append(answer.status)
    assert statuses == [201, 413, 201]
    connection.close()
    assert ledger.count("moved") == 1


def test_I10_pipelined_retries_and_an_expected_100_are_answered(
    start: Start, ledger: Ledger
) -> None:
    worker = start()
    body = json.dumps(order("pipe")).encode()
    head = (
        b"POST /payments HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Idempotency-Key: pipe\r\nContent-Length: %d\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", worker.port), timeout=20) as raw:
        raw.sendall((head + b"\r\n" + body) * 3)
        received = b""
        while received.count(b"HTTP/1.1 201") < 3:
            received += raw.recv(65536)
        assert received.lower().count(b"idempotent-replayed: true") == 2
    with socket.create_connection(("127.0.0.1", worker.port), timeout=20) as raw:
        raw.sendall(head + b"Expect: 100-continue\r\nConnection: close\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 100")
        raw.sendall(body)
        received = b""
        while more := raw.recv(65536):
            received += more
        assert received.startswith(b"HTTP/1.1 201")
    assert ledger.count("moved") == 1
