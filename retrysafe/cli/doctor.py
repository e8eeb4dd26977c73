"""`retrysafe doctor`: whether the settings and the store they name can keep what is promised."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from retrysafe import commands as c
from retrysafe import flow, keys
from retrysafe.commands import Answer
from retrysafe.errors import RetrySafeError, StoreUnavailable
from retrysafe.records import Record, encode_done
from retrysafe.settings import Settings
from retrysafe.stores import Store
from retrysafe.urls import masked

_OLDEST = {"redis": (6, 2), "valkey": (7, 2)}
_HEARD_IN = 1.0  # seconds

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. level: OK, WARN (a promise has a limit), FAIL."""

    level: str
    text: str


async def examine(store: Store, settings: Settings) -> AsyncIterator[Finding]:
    """Look at everything, one thing after the other. Leaves nothing in the store."""
    for text in _choices(settings):
        yield Finding(WARN, text)
    door: Any = store.open_async()
    try:
        try:
            latency = await _latency(door)
        except StoreUnavailable as error:
            yield Finding(FAIL, f"the store at {masked(store.url)} doesn't answer: {error.reason}")
            return
        yield Finding(OK, f"the store at {masked(store.url)} answers in {latency * 1e3:.1f} ms")
        try:
            about = _parsed(await door.command("INFO"))
        except StoreUnavailable as error:
            yield Finding(WARN, f"the server doesn't tell about itself ({error.reason})")
        else:
            for finding in _server(about, settings):
                yield finding
        async for finding in _protocol(door, store.namespace):
            yield finding
    finally:
        await door.close()


def _choices(settings: Settings) -> list[str]:
    """What the settings say that leaves calls unprotected, or results readable."""
    chosen: list[str] = []
    if settings.disabled:
        chosen.append("RETRYSAFE_DISABLED is set: nothing is protected")
    if settings.on_store_error == "run":
        chosen.append("RETRYSAFE_ON_STORE_ERROR is run: without the store calls run unprotected")
    return chosen


async def _latency(door: Any) -> float:
    """Seconds of a round trip, the median of some."""
    await door.command("TIME")  # connects
    took: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        await door.command("TIME")
        took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


def _parsed(info: Any) -> dict[str, str]:
    text = info.decode("utf-8", "replace") if isinstance(info, bytes) else str(info)
    return dict(re.findall(r"^(\w+):(.*?)\r?$", text, re.MULTILINE))


def _server(about: dict[str, str], settings: Settings) -> list[Finding]:
    """What the server tells about itself."""
    found: list[Finding] = []
    kind = "valkey" if "valkey_version" in about else "redis"
    version = about.get(f"{kind}_version", "")
    numbers = tuple(int(each) for each in re.findall(r"\d+", version)[:2])
    oldest = ".".join(map(str, _OLDEST[kind]))
    if numbers < _OLDEST[kind]:
        found.append(Finding(FAIL, f"{kind} {version or '?'} is too old: {oldest} is needed"))
    else:
        found.append(Finding(OK, f"{kind} {version}"))
    policy = about.get("maxmemory_policy", "noeviction")
    if about.get("maxmemory", "0") != "0" and policy != "noeviction":
        found.append(
            Finding(
                WARN,
                f"maxmemory-policy is {policy}: a receipt may be evicted, and its call run twice; "
                "make it noeviction",
            )
        )
    if about.get("aof_enabled") == "0":
        found.append(
            Finding(
                WARN,
                "appendonly is off: a server that restarts has forgotten its latest receipts, "
                "and their calls run again when they are retried",
            )
        )
    replicas = int(about.get("connected_slaves", "0") or 0)
    if replicas < settings.replicas:
        found.append(
            Finding(
                FAIL,
                f"RETRYSAFE_REPLICAS is {settings.replicas} and the server has {replicas}: "
                "every call is refused",
            )
        )
    elif replicas > settings.replicas:
        found.append(
            Finding(
                WARN,
                f"the server has {replicas} replicas and RETRYSAFE_REPLICAS is "
                f"{settings.replicas}: one that is promoted may lack the latest receipts",
            )
        )
    return found


async def _protocol(door: Any, namespace: str) -> AsyncIterator[Finding]:
    """One receipt from its begin to its end, a duplicate that is told of it, and its deletion."""
    digest = keys.digest(namespace, "retrysafe doctor", os.urandom(8).hex())
    inbox, token = flow.new_token(), flow.new_token()
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_message(name: bytes, value: bytes) -> None:
        if name == digest:
            loop.call_soon_threadsafe(told.set)

    try:
        heard = await door.listen(inbox, on_message, _HEARD_IN)
        begun = await door.execute(_begin(digest, token, inbox))
        again = await door.execute(_begin(digest, flow.new_token(), inbox))
        record = Record(keys.NO_FINGERPRINT, token, begun.number, "", b"")
        done = await door.execute(c.Finish(digest, token, encode_done(record), 60_000))
        looked = await door.execute(c.Look(digest))
        answers = (begun.answer, again.answer, done.answer, looked.answer)
        if heard:
            try:
                await asyncio.wait_for(told.wait(), _HEARD_IN)
            except TimeoutError:
                heard = False
    except RetrySafeError as error:
        yield Finding(FAIL, f"a receipt can't be kept: {error}")
        return
    finally:
        forgotten = await _forget(door, digest)
    if answers == (Answer.OK, Answer.RUNNING, Answer.OK, Answer.DONE) and forgotten:
        yield Finding(OK, "a receipt is taken, refused to a second caller, finished and read back")
    else:
        yield Finding(FAIL, f"a receipt's answers are {', '.join(each.name for each in answers)}")
    if heard:
        yield Finding(OK, "a waiting process is told of the end")
    else:
        yield Finding(WARN, "messages don't arrive: duplicates in other processes poll (docs/acl)")


async def _forget(door: Any, digest: bytes) -> bool:
    try:
        reply = await door.execute(c.Forget(digest))
    except RetrySafeError:
        return False  # said already, or by what the answers are
    return reply.answer is Answer.OK


def _begin(digest: bytes, token: bytes, inbox: bytes) -> c.Begin:
    return c.Begin(
        key=digest,
        token=token,
        fingerprint=keys.NO_FINGERPRINT,
        lease_us=c.micros(10.0),
        ttl_ms=c.millis(60.0),
        inbox=inbox,
        take_over=True,
        request_id="",
    )
