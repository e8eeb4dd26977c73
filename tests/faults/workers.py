"""Worker processes of real ASGI servers around the demo's payment app."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.guard import Guard
from tests.servers import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
APP = "retrysafe.cli.demo_app:app"


def command(server: str, port: int) -> list[str]:
    """How each server is started."""
    python = [sys.executable, "-m"]
    return {
        "uvicorn": [*python, "uvicorn", APP, "--port", f"{port}", "--log-level", "warning"],
        "uvicorn-h11": [*python, "uvicorn", APP, "--port", f"{port}", "--http", "h11"],
        "hypercorn": [*python, "hypercorn", APP, "--bind", f"127.0.0.1:{port}"],
        "granian": [*python, "granian", "--interface", "asgi", "--port", f"{port}", APP],
        "gunicorn": [
            *python,
            "gunicorn",
            "--preload",
            "--workers",
            "2",
            "--worker-class",
            "uvicorn_worker.UvicornWorker",
            "--bind",
            f"127.0.0.1:{port}",
            APP,
        ],
    }[server]


class Worker:
    """One server process; `ledger` is the file in which the app counts its effects."""

    def __init__(self, server: str, redis_url: str, ledger: Path, **settings: str) -> None:
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DEMO_LEDGER": str(ledger),
            "DEMO_WORKER": f"{server}-{self.port}",
            "RETRYSAFE_REDIS_URL": redis_url,
            **{f"RETRYSAFE_{name.upper()}": value for name, value in settings.items()},
        }
        self.process = subprocess.Popen(
            command(server, self.port), env=environ, start_new_session=True
        )
        self._guard = Guard(-self.process.pid)
        end = time.monotonic() + 30
        while not self._answers():
            assert self.process.poll() is None, "the worker ended at its start"
            assert time.monotonic() < end, "the worker did not get ready"
            time.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()
        self._guard.off()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


class Ledger:
    """What the apps really did."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def count(self, fact: str, payment: str | None = None) -> int:
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return sum(words[0] == fact and (payment is None or words[1] == payment) for words in lines)
