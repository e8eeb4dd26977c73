"""The processes of one run: a server, and workers that reach it through a proxy each."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from tests.faults.campaign.history import Disturbance, Kind
from tests.faults.campaign.plan import Plan
from tests.faults.proxy import Proxy
from tests.guard import Guard
from tests.servers import Cluster, Replicated, Server, free_port, server_binaries

ROOT = Path(__file__).resolve().parent.parent.parent.parent
READY_WITHIN = 40.0


class HalfProxy(Proxy):
    """One that can also cut in the middle of a command or of a reply."""

    def __init__(self, upstream: int) -> None:
        self.half_command = self.half_reply = False
        super().__init__(upstream)

    def _may_pass(self, command: bytes, link: Any) -> bool:
        if self.half_command:
            self.half_command = False
            link.server_out.write(command[: len(command) // 2])
            return False
        if self.half_reply:
            self.half_reply = False
            self._halve(link)
        return super()._may_pass(command, link)

    def forgive(self) -> None:
        """Forget what was still to be done to the traffic."""
        self._losing.clear()
        self._cut_after = None
        self.half_command = self.half_reply = False

    def _halve(self, link: Any) -> None:
        """Pass on half of this connection's next reply, then close it."""
        write: Callable[[bytes], None] = link.client_out.write

        def half(data: bytes) -> None:
            link.client_out.write = lambda data: None
            write(data[: len(data) // 2])
            link.client_out.transport.close()

        link.client_out.write = half


class Worker:
    """One worker, over all its incarnations; each listens on the same port."""

    def __init__(self, number: int, store: str, out: Path, plan: Plan) -> None:
        self.number = number
        self.ending = asyncio.Lock()  # one fault ends and restarts it at a time
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self._out = out
        self._store = store
        self._plan = plan
        self._times = -1
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._errors = (out / f"w{number}.stderr").open("ab")

    @property
    def name(self) -> str:
        return f"w{self.number}"

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self._times}"

    def start(self) -> None:
        self._times += 1
        environ = {k: v for k, v in os.environ.items() if not k.startswith("RETRYSAFE_")}
        environ |= {
            "PYTHONPATH": str(ROOT),
            "CAMPAIGN_LOG": str(self._out / "effects.jsonl"),
            "CAMPAIGN_WORKER": self.incarnation,
            "CAMPAIGN_PORT": str(self.port),
            "CAMPAIGN_BUG": self._plan.bug,
            "RETRYSAFE_REDIS_URL": self._store,
            "RETRYSAFE_LEASE": "1s",
            "RETRYSAFE_WAIT": "5s",
            "RETRYSAFE_TTL": self._plan.ttl,
            "RETRYSAFE_REPLICAS": str(self._plan.replicas),
            # One arena for all threads: else memory grows by what each keeps for itself.
            "MALLOC_ARENA_MAX": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.campaign.worker"],
            env=environ,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            start_new_session=True,
        )
        self._off()
        self._guard = Guard(-self.process.pid)

    async def ready(self) -> None:
        end = time.monotonic() + READY_WITHIN
        while not await asyncio.to_thread(self._answers):
            assert self.process is not None and self.process.poll() is None, (
                f"{self.incarnation} ended at its start, see {self._errors.name}"
            )
            assert time.monotonic() < end, f"{self.incarnation} did not get ready"
            await asyncio.sleep(0.05)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        if self.alive and self.process is not None:
            os.killpg(self.process.pid, number)

    async def ended(self, limit: float) -> bool:
        end = time.monotonic() + limit
        while self.alive:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.01)
        return True

    def bury(self) -> None:
        """End the children that it forked and left: they hold its port."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)
        self._off()
        self._errors.close()

    def _off(self) -> None:
        if self._guard is not None:
            self._guard.off()


class Stage:
    """Everything of one run, and what was done to it so far.

    A single server is reached through proxies; those of a Sentinel or a Cluster are found by the
    workers themselves.
    """

    def __init__(self, plan: Plan, out: Path) -> None:
        self.plan = plan
        self.disturbances: list[Disturbance] = []
        self.several: Replicated | Cluster | None = None
        self.proxies: list[HalfProxy] = []
        self.replaced = False
        if plan.kind == "sentinel":
            self.several = Replicated(replicas=2, down_after=500)
            self.servers = self.several.servers
        elif plan.kind == "cluster":
            self.several = Cluster(primaries=3, replicas=1)
            self.servers = self.several.nodes
        else:
            config: dict[str, object] = {"enable_debug_command": "yes"}
            if plan.lasting:
                config |= {"appendonly": "yes", "appendfsync": "everysec"}
            kinds = server_binaries()
            self.servers = [Server(config, binary=kinds[plan.seed % len(kinds)])]
        self.server = self.servers[0]
        self.control = self._connect()
        if self.several is None:
            self.proxies = [HalfProxy(self.server.port) for _ in range(plan.workers)]
            stores = [proxy.url for proxy in self.proxies]
        else:
            stores = [self.several.url] * plan.workers
        self.workers = [Worker(n, store, out, plan) for n, store in enumerate(stores)]

    def _connect(self) -> redis.Redis:
        # One connection, whichever thread asks: a second could be killed by an order of the first,
        # and find no place again (`max-clients`).
        return redis.Redis(port=self.server.port, socket_timeout=30, single_connection_client=True)

    def reconnect(self) -> None:
        self.control.close()
        self.control = self._connect()

    def primaries(self) -> list[Server]:
        """The servers that take writes: one, or in a Cluster several."""
        if self.several is None:
            return self.servers
        return [
            server
            for server in self.servers
            if server.running and server.ask("ROLE")[0] == b"master"
        ]

    def order(self, *words: str) -> None:
        """A command of an operator."""
        self.control.execute_command(*words)  # type: ignore[no-untyped-call]

    async def open(self) -> None:
        for worker in self.workers:
            worker.start()
        await asyncio.gather(*(worker.ready() for worker in self.workers))

    def disturb(self, kind: Kind, name: str, since: float, until: float, who: str = "") -> None:
        self.disturbances.append(Disturbance(kind, name, since, until, who))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for proxy in self.proxies:
            proxy.close()
        self.control.close()
        if self.several is not None:
            self.several.close()
        else:
            self.server.close()
