"""Each fault: how it is done, how it ends, and what it is written down as."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Awaitable, Callable

import httpx
import redis

from retrysafe.stores.wire import script
from tests.faults.campaign.plan import Fault
from tests.faults.campaign.stage import Stage, Worker
from tests.servers import Server

# A connection that is gone is asked for again within so long, once it can be had (seconds).
RECONNECT = 0.5
FOUND = 2.0  # and a new primary is found (seconds after it was elected)
LAG = 0.5  # what was written so long (seconds) before a primary's end may not be on its replica
AFTERMATH = 1.0  # for this long (seconds) a moment's fault may make a call late


async def do(stage: Stage, fault: Fault) -> None:
    """Do one fault from its beginning to its end."""
    if fault.worker < 0:
        await _SERVER[fault.name](stage, fault)
    else:
        await _WORKER[fault.name](stage, stage.workers[fault.worker], fault)


# Workers


async def _kill(stage: Stage, worker: Worker, fault: Fault) -> None:
    async with worker.ending:
        await _kill_one(stage, worker, fault)


async def _kill_one(stage: Stage, worker: Worker, fault: Fault) -> None:
    stage.disturb("dead", fault.name, time.monotonic(), math.inf, worker.incarnation)
    worker.signal(signal.SIGKILL)
    await worker.ended(10)
    await _start_again(worker, fault)


async def _terminate(stage: Stage, worker: Worker, fault: Fault) -> None:
    async with worker.ending:
        await _terminate_one(stage, worker, fault)


async def _terminate_one(stage: Stage, worker: Worker, fault: Fault) -> None:
    asked = time.monotonic()
    worker.signal(signal.SIGTERM)
    if not await worker.ended(6):
        stage.disturb("dead", fault.name, time.monotonic(), math.inf, worker.incarnation)
        worker.signal(signal.SIGKILL)
        await worker.ended(10)
    else:
        stage.disturb("dead", fault.name, time.monotonic(), math.inf, worker.incarnation)
    worker.bury()
    # It refuses connections from the signal on.
    stage.disturb("dead", "terminating", asked, time.monotonic(), worker.name)
    await _start_again(worker, fault)


async def _start_again(worker: Worker, fault: Fault) -> None:
    await asyncio.sleep(fault.seconds)
    if not worker.alive:
        worker.start()
    await worker.ready()


async def _pause(stage: Stage, worker: Worker, fault: Fault) -> None:
    since = time.monotonic()
    worker.signal(signal.SIGSTOP)
    await asyncio.sleep(fault.seconds)
    worker.signal(signal.SIGCONT)
    stage.disturb("process", fault.name, since, time.monotonic(), worker.name)


async def _block(stage: Stage, worker: Worker, fault: Fault) -> None:
    since = time.monotonic()
    with contextlib.suppress(httpx.TransportError):  # killed meanwhile
        async with httpx.AsyncClient(timeout=10) as client:
            await client.get(f"{worker.base}/block", params={"seconds": fault.seconds})
    stage.disturb("process", fault.name, since, time.monotonic(), worker.name)


async def _step_clock(stage: Stage, worker: Worker, fault: Fault) -> None:
    """By hours, on or back: nothing depends on it, so it excuses nothing."""
    seconds = 5000 * (-1) ** int(fault.at * 1000)
    with contextlib.suppress(httpx.TransportError):  # killed meanwhile
        async with httpx.AsyncClient(timeout=10) as client:
            await client.get(f"{worker.base}/step-clock", params={"seconds": seconds})


# The way to the server


async def _cut(stage: Stage, worker: Worker, fault: Fault) -> None:
    proxy = stage.proxies[worker.number]
    match fault.name:
        case "cut":
            proxy.cut()
        case "lose-replies":
            for name in ("begin", "renew", "finish"):
                proxy.lose_reply(script(name)[1])
        case "cut-commands":
            proxy.cut_after(2)
        case "half-command":
            proxy.half_command = True
        case "half-reply":
            proxy.half_reply = True
    # The last four wait for traffic.
    now = time.monotonic()
    stage.disturb("slow", fault.name, now, now + 60 * AFTERMATH, worker.name)
    await asyncio.sleep(0)


async def _hold(stage: Stage, worker: Worker, fault: Fault) -> None:
    ways: tuple[str, ...] = {"deaf": ("replies",), "mute": ("requests",)}.get(
        fault.name, ("requests", "replies")
    )
    since = time.monotonic()
    stage.proxies[worker.number].hold(ways)  # type: ignore[arg-type]
    await asyncio.sleep(fault.seconds)
    stage.proxies[worker.number].resume(ways)  # type: ignore[arg-type]
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT, worker.name)


async def _delay(stage: Stage, worker: Worker, fault: Fault) -> None:
    since = time.monotonic()
    # A reconnect has several round trips: with longer ones it would be an outage.
    stage.proxies[worker.number].delay_replies(min(fault.seconds / 40, 0.05))
    await asyncio.sleep(fault.seconds)
    stage.proxies[worker.number].delay_replies(0)
    stage.disturb("slow", fault.name, since, time.monotonic() + AFTERMATH, worker.name)


async def _down(stage: Stage, worker: Worker, fault: Fault) -> None:
    since = time.monotonic()
    stage.proxies[worker.number].refuse()
    stage.proxies[worker.number].cut()
    await asyncio.sleep(fault.seconds)
    stage.proxies[worker.number].accept()
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT, worker.name)


# The server


async def _restart(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    stage.server.kill()
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(stage.server.start)
    stage.reconnect()
    until = time.monotonic()
    stage.disturb("store", fault.name, since, until + RECONNECT)
    if not stage.plan.lasting:
        stage.disturb("loss", fault.name, since, until)


async def _moment(stage: Stage, fault: Fault) -> None:
    for server in stage.primaries():
        match fault.name:
            case "flush-scripts":
                server.ask("SCRIPT", "FLUSH")
            case "kill-clients":
                _kill_clients(server, "normal")
                _kill_clients(server, "pubsub")
            case "kill-subscribers":
                _kill_clients(server, "pubsub")
    now = time.monotonic()
    stage.disturb("slow", fault.name, now, now + AFTERMATH)


def _kill_clients(server: Server, kind: str) -> None:
    """Every client of a kind but the sentinels: without theirs they would take the primary for
    dead, which is a fault of its own (`fail-over`)."""
    with server.client(decode_responses=True) as client:
        for each in client.client_list(_type=kind):
            if not each["name"].startswith("sentinel-"):
                client.client_kill_filter(_id=each["id"])


async def _pause_clients(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    stage.control.client_pause(int(fault.seconds * 1000))
    await asyncio.sleep(fault.seconds)
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT)


async def _out_of_memory(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    stage.control.config_set("maxmemory-policy", "noeviction")
    stage.control.config_set("maxmemory", 1)
    await asyncio.sleep(fault.seconds)
    stage.control.config_set("maxmemory", 0)
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT)


async def _evict(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    stage.control.config_set("maxmemory-policy", "allkeys-random")
    stage.control.config_set("maxmemory", 1)
    await asyncio.sleep(0.05)
    stage.control.config_set("maxmemory", 0)
    stage.control.config_set("maxmemory-policy", "noeviction")
    until = time.monotonic()
    stage.disturb("loss", fault.name, since, until)
    stage.disturb("store", fault.name, since, until)


async def _sleep(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    debugger = redis.Redis(port=stage.server.port, socket_timeout=30)
    await asyncio.to_thread(debugger.execute_command, "DEBUG", "SLEEP", str(fault.seconds))
    debugger.close()
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT)


async def _stop(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    stage.server.pause()
    await asyncio.sleep(fault.seconds)
    stage.server.resume()
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT)


async def _max_clients(stage: Stage, fault: Fault) -> None:
    since = time.monotonic()
    stage.control.config_set("maxclients", 1)
    stage.order("CLIENT", "KILL", "TYPE", "normal")
    stage.order("CLIENT", "KILL", "TYPE", "pubsub")
    await asyncio.sleep(fault.seconds)
    stage.control.config_set("maxclients", 10_000)
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT)


async def _read_only(stage: Stage, fault: Fault) -> None:
    """It becomes a replica of a server that isn't there: it keeps its data and takes no writes."""
    since = time.monotonic()
    stage.order("REPLICAOF", "127.0.0.1", "1")
    await asyncio.sleep(fault.seconds)
    stage.order("REPLICAOF", "NO", "ONE")
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT)


async def _replace(stage: Stage, fault: Fault) -> None:
    """A primary is killed, or hangs until another one has its place. Once in a run."""
    if stage.replaced:
        return
    stage.replaced = True
    old = stage.primaries()[0]
    before = {server.port for server in stage.primaries()}
    since = time.monotonic()
    if fault.name == "fail-over":
        old.kill()
    else:
        old.pause()
    while not await asyncio.to_thread(_elected, stage, old, before):
        if time.monotonic() > since + 30:
            raise RuntimeError("no other primary was elected")
        await asyncio.sleep(0.05)
    if fault.name == "hang-over":
        old.resume()
        # Until it hears of its successor it goes on as before.
        while not await asyncio.to_thread(_is_replica, old):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    until = time.monotonic()
    stage.disturb("store", fault.name, since, until + FOUND)
    # A replica that confirmed to the old one while another was elected takes it back, too.
    if fault.name == "hang-over" or not stage.plan.replicas:
        stage.disturb("gap", fault.name, since - LAG, until)


def _elected(stage: Stage, old: Server, before: set[int]) -> bool:
    for server in stage.servers:
        if server is old or not server.running or server.port in before:
            continue
        if _is_primary(server):
            return True
    return False


def _is_replica(server: Server) -> bool:
    try:
        kind: bytes = server.ask("ROLE")[0]
    except redis.RedisError:
        return False
    return kind == b"slave"


def _is_primary(server: Server) -> bool:
    """False also for one that is just changing its role: it closes its connections then."""
    try:
        kind: bytes = server.ask("ROLE")[0]
    except redis.RedisError:
        return False
    return kind == b"master"


_WORKER: dict[str, Callable[[Stage, Worker, Fault], Awaitable[None]]] = {
    "kill": _kill,
    "pause": _pause,
    "block": _block,
    "terminate": _terminate,
    "step-clock": _step_clock,
    "cut": _cut,
    "lose-replies": _cut,
    "cut-commands": _cut,
    "half-command": _cut,
    "half-reply": _cut,
    "black-hole": _hold,
    "deaf": _hold,
    "mute": _hold,
    "delay": _delay,
    "down": _down,
}
_SERVER: dict[str, Callable[[Stage, Fault], Awaitable[None]]] = {
    "restart": _restart,
    "flush-scripts": _moment,
    "kill-clients": _moment,
    "kill-subscribers": _moment,
    "pause-clients": _pause_clients,
    "out-of-memory": _out_of_memory,
    "evict": _evict,
    "sleep": _sleep,
    "stop": _stop,
    "max-clients": _max_clients,
    "read-only": _read_only,
    "fail-over": _replace,
    "hang-over": _replace,
}
