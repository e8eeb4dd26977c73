"""Each fault: how it is done, how it ends, and what it is written down as."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Awaitable, Callable

import httpx
import redis

from retrysafe.stores.wire import script
from tests.faults.campaign.plan import Fault
from tests.faults.campaign.stage import Stage, Worker

# A connection that is gone is asked for again within so long, once it can be had (seconds).
RECONNECT = 0.5
AFTERMATH = 1.0  # for this long (seconds) a moment's fault may make a call late


async def do(stage: Stage, fault: Fault) -> None:
    """Do one fault from its beginning to its end."""
    if fault.worker < 0:
        await _SERVER[fault.name](stage, fault)
    else:
        await _WORKER[fault.name](stage, stage.workers[fault.worker], fault)


# Workers


async def _kill(stage: Stage, worker: Worker, fault: Fault) -> None:
    if not worker.alive:
        return
    stage.disturb("dead", fault.name, time.monotonic(), math.inf, worker.incarnation)
    worker.signal(signal.SIGKILL)
    await worker.ended(10)
    await _start_again(worker, fault)


async def _terminate(stage: Stage, worker: Worker, fault: Fault) -> None:
    if not worker.alive:
        return
    asked = time.monotonic()
    worker.signal(signal.SIGTERM)
    if not await worker.ended(6):
        stage.disturb("dead", fault.name, time.monotonic(), math.inf, worker.incarnation)
        worker.signal(signal.SIGKILL)
        await worker.ended(10)
    else:
        stage.disturb("dead", fault.name, time.monotonic(), math.inf, worker.incarnation)
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
    try:
        async with httpx.AsyncClient(timeout=10) as client:
            await client.get(f"{worker.base}/block", params={"seconds": fault.seconds})
    except httpx.TransportError:
        pass  # killed meanwhile
    stage.disturb("process", fault.name, since, time.monotonic(), worker.name)


# The way to the server


async def _cut(stage: Stage, worker: Worker, fault: Fault) -> None:
    proxy = worker.proxy
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
    worker.proxy.hold(ways)  # type: ignore[arg-type]
    await asyncio.sleep(fault.seconds)
    worker.proxy.resume(ways)  # type: ignore[arg-type]
    stage.disturb("store", fault.name, since, time.monotonic() + RECONNECT, worker.name)


async def _delay(stage: Stage, worker: Worker, fault: Fault) -> None:
    since = time.monotonic()
    worker.proxy.delay_replies(min(fault.seconds / 8, 0.3))
    await asyncio.sleep(fault.seconds)
    worker.proxy.delay_replies(0)
    stage.disturb("slow", fault.name, since, time.monotonic() + AFTERMATH, worker.name)


async def _down(stage: Stage, worker: Worker, fault: Fault) -> None:
    since = time.monotonic()
    worker.proxy.refuse()
    worker.proxy.cut()
    await asyncio.sleep(fault.seconds)
    worker.proxy.accept()
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
    if not stage.lasting:
        stage.disturb("loss", fault.name, since, until)


async def _moment(stage: Stage, fault: Fault) -> None:
    match fault.name:
        case "flush-scripts":
            stage.control.script_flush()
        case "kill-clients":
            stage.order("CLIENT", "KILL", "TYPE", "normal")
            stage.order("CLIENT", "KILL", "TYPE", "pubsub")
        case "kill-subscribers":
            stage.order("CLIENT", "KILL", "TYPE", "pubsub")
    now = time.monotonic()
    stage.disturb("slow", fault.name, now, now + AFTERMATH)


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


_WORKER: dict[str, Callable[[Stage, Worker, Fault], Awaitable[None]]] = {
    "kill": _kill,
    "pause": _pause,
    "block": _block,
    "terminate": _terminate,
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
}
