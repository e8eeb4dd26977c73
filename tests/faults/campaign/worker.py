"""A worker process: an app behind the middleware, keyed functions of both colours and in forked
children, a breaker.

Every execution is noted in the effect log, and so is every moment in which this process or its
event loop did not get to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import json
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from retrysafe import BreakerPolicy, CircuitBreaker, desks, errors, events, open_store, receipts
from retrysafe.breaker_permit import ProbePermit
from retrysafe.breaker_shared import SharedCore
from retrysafe.decorators import idempotent
from retrysafe.middleware import IdempotencyMiddleware, responder
from tests.faults.campaign import bugs, flows
from tests.faults.campaign.effects import Log
from tests.faults.campaign.plan import RULES

log = Log(Path(os.environ["CAMPAIGN_LOG"]), os.environ["CAMPAIGN_WORKER"])
# Read here and nowhere else: the product has no such switch.
if planted := os.environ.get("CAMPAIGN_BUG"):
    bugs.plant(planted)
store = open_store(os.environ["RETRYSAFE_REDIS_URL"])
pool = ThreadPoolExecutor(64)

_BEAT = 0.02
_LAG = 0.1
_HUNG = 15.0
_PADS = (0, 0, 200, 6000, 100_000)  # some results ride in the message, some don't, some are bulky


@dataclass
class Result:
    execution: str
    call: str
    of: str
    pad: str


@dataclass
class Ask:
    """What a call brings that is no part of its payload."""

    call: str
    seconds: float
    fails: bool


_ask: contextvars.ContextVar[Ask] = contextvars.ContextVar("ask")


class Failed(Exception):
    """The work failed, as its caller had asked."""


@contextlib.contextmanager
def executing(door: str, scope: str, key: str, variant: str) -> Iterator[Result]:
    """Note the start and, in whatever way it comes, the end."""
    ask, execution = _ask.get(), secrets.token_hex(6)
    name = f"{door}|{scope}|{key}"
    facts = {"execution": execution, "call": ask.call, "key": name, "variant": variant}
    log.note("start", **facts)
    try:
        pad = "." * _PADS[sum(key.encode()) % len(_PADS)]
        yield Result(execution, ask.call, f"{name}|{variant}", pad)
        if ask.fails:
            raise Failed
    except Failed:
        log.note("end", how="raised", **facts)
        raise
    except BaseException:
        log.note("end", how="cancelled", **facts)
        raise
    log.note("end", how="done", **facts)


@idempotent(key=("scope", "key"), namespace="async", store=store)
async def charge(scope: str, key: str, variant: str) -> Result:
    with executing("async", scope, key, variant) as result:
        await asyncio.sleep(_ask.get().seconds)
    return result


@idempotent(key=("scope", "key"), namespace="sync", store=store)
def charge_sync(scope: str, key: str, variant: str) -> Result:
    with executing("sync", scope, key, variant) as result:
        time.sleep(_ask.get().seconds)
    return result


@idempotent(key=("scope", "key"), namespace="fork", store=store)
def charge_forked(scope: str, key: str, variant: str) -> Result:
    with executing("fork", scope, key, variant) as result:
        time.sleep(_ask.get().seconds)
    return result


async def order(request: Request) -> JSONResponse:
    """Behind the middleware."""
    asked = await request.json()
    scope = request.headers["authorization"]
    with executing("http", scope, asked["key"], asked["variant"]) as result:
        await asyncio.sleep(_ask.get().seconds)
    return JSONResponse(vars(result), status_code=201)


_WORDS: dict[type[errors.RetrySafeError], str] = {
    errors.FingerprintMismatch: "fingerprint-mismatch",
    errors.InFlight: "in-flight",
    errors.StoreUnavailable: "store-unavailable",
}

Told = tuple[int, dict[str, str]]


def _refused(error: Exception) -> Told:
    """How a call that had no result is answered. Raises what is none of its refusals."""
    if isinstance(error, Failed):
        return 500, {"type": "failed"}
    if not isinstance(error, errors.RetrySafeError):
        raise error
    word = _WORDS.get(type(error), type(error).__name__)
    return 409, {"type": f"urn:retrysafe:problem:{word}"}


def _forked(args: tuple[str, str, str]) -> Told:
    """The call in a child of this process, which is gone when it is answered."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        with os.fdopen(ours, "rb") as answer:
            # A line, not all there is: a child forked meanwhile has this pipe's other end as well.
            told = answer.readline()
        os.waitpid(child, 0)
        status, body = json.loads(told)
        return status, body
    os.close(ours)  # a parent that is gone must not seem to be there to read
    try:
        faulthandler.dump_traceback_later(_HUNG)  # into this worker's log: where it hangs
        try:
            answered: Told = 201, vars(charge_forked(*args))
        except Exception as error:
            answered = _refused(error)
        os.write(theirs, json.dumps(answered).encode() + b"\n")
    finally:
        os._exit(0)


async def function(request: Request) -> JSONResponse:
    """In front of the keyed functions."""
    asked = await request.json()
    scope = request.headers["authorization"]
    args = (scope, asked["key"], asked["variant"])
    run, loop = contextvars.copy_context().run, asyncio.get_running_loop()
    try:
        match request.path_params["door"]:
            case "async":
                result = await charge(*args)
            case "sync":
                result = await loop.run_in_executor(pool, run, charge_sync, *args)
            case _:
                status, body = await loop.run_in_executor(pool, run, _forked, args)
                return JSONResponse(body, status_code=status)
    except (errors.RetrySafeError, Failed) as error:
        status, body = _refused(error)
        return JSONResponse(body, status_code=status)
    return JSONResponse(vars(result), status_code=201)


class Asking:
    """Takes a call's own facts off its headers."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            seconds = float(headers.get(b"x-seconds", b"0"))
            call = headers.get(b"x-call", b"").decode()
            _ask.set(Ask(call, seconds, b"x-fails" in headers))
        await self.app(scope, receive, send)


async def failed(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"type": "failed"}, status_code=500)


breaker_policy = BreakerPolicy(
    failure_rate=1.0,
    min_calls=1,
    window=1,
    open_for=0.15,
    probes=RULES.probes,
    permit_lease=RULES.permit_lease,
)
breaker = CircuitBreaker("endpoint", breaker_policy, shared=store)


async def probe(request: Request) -> JSONResponse:
    """A call through the shared breaker; where it is a probe, the log says from when to when."""
    try:
        permit = await breaker.aacquire()
    except errors.BreakerOpen:
        return JSONResponse({"passed": False})
    shared = isinstance(permit, ProbePermit) and isinstance(permit._core, SharedCore)
    name = secrets.token_hex(6)
    if shared:
        log.note("probe-start", execution=name)
    try:
        await asyncio.sleep(0.15 if shared else 0.0)
    finally:
        if shared:
            log.note("probe-end", execution=name)
        if "fails" in request.query_params:
            await permit.afailure()
        else:
            await permit.asuccess()
    return JSONResponse({"passed": True})


async def block(request: Request) -> JSONResponse:
    """Hold up the event loop, as a call that forgot its `await` does."""
    time.sleep(float(request.query_params["seconds"]))  # noqa: ASYNC251
    return JSONResponse({})


async def step_clock(request: Request) -> JSONResponse:
    """Set this host's wall clock on, or back, by so many seconds more."""
    seconds, read = float(request.query_params["seconds"]), time.time
    time.time = lambda: read() + seconds
    return JSONResponse({})


async def gauges(request: Request) -> JSONResponse:
    """What this process holds just now."""
    found: dict[str, int] = {}
    all_desks: list[Any] = [*desks._desks.values()]
    for each in desks._async_desks.values():
        all_desks += each.values()
    found["flights"] = sum(len(each.flights) for each in all_desks)
    found["waiting"] = sum(each.flights.waiting for each in all_desks)
    found["held"] = sum(not taken.ended for each in all_desks for taken in each._held.values())
    found["works"] = len(responder._works)
    found["at-work"] = len(receipts._at_work)
    tasks = [task.get_name() for task in asyncio.all_tasks()]
    found["background"] = sum(name.startswith("retrysafe-") for name in tasks)
    found["tasks"] = len(tasks)
    found["threads"] = threading.active_count()
    found["files"] = len(os.listdir("/proc/self/fd"))
    return JSONResponse(found)


async def ready(request: Request) -> JSONResponse:
    return JSONResponse({})


def _told(event: events.Event) -> None:
    log.note("told", how=event.kind, key=event.key, detail=f"{event.outcome} {event.detail}")


def _beat(where: str, last: float) -> float:
    now = time.monotonic()
    if now - last > _BEAT + _LAG:
        log.note("lag", how=where, since=last)
    return now


def _thread_beats() -> None:
    last = time.monotonic()
    while True:
        time.sleep(_BEAT)
        last = _beat("thread", last)


async def _loop_beats() -> None:
    last = time.monotonic()
    while True:
        await asyncio.sleep(_BEAT)
        last = _beat("loop", last)


@contextlib.asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    threading.Thread(target=_thread_beats, daemon=True).start()
    beats = asyncio.create_task(_loop_beats())
    with events.listening(_told):
        yield
    beats.cancel()


app = Starlette(
    routes=[
        Route("/orders", order, methods=["POST"]),
        Route("/functions/{door}", function, methods=["POST"]),
        Route("/probe", probe, methods=["POST"]),
        Route("/block", block),
        Route("/step-clock", step_clock),
        Route("/gauges", gauges),
        Route("/ready", ready),
        *flows.routes(store, pool),
    ],
    middleware=[
        Middleware(Asking),
        Middleware(
            IdempotencyMiddleware,
            store=store,
            routes=["/orders"],
            scope=lambda request: request.headers["authorization"],
        ),
    ],
    exception_handlers={Failed: failed},
    lifespan=lifespan,
)

if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(os.environ["CAMPAIGN_PORT"]),
        log_level="warning",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,
    )
