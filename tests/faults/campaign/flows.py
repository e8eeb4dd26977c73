"""What a worker does besides keyed calls: it waits for results, writes them, and runs sagas."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from retrysafe import Fixed, ResultReader, ResultWriter, RetryPolicy, Saga, errors
from retrysafe.settings import Settings
from retrysafe.stores import Store

WAIT = 8.0  # seconds that a result is waited for
_LEASE = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Refused(Exception):
    """The last step of a saga that is to be undone."""

    retryable = False


def routes(store: Store, pool: Executor) -> list[Route]:
    """Mounted by the worker beside its own; `pool` is where sync work runs."""
    reader, writer = ResultReader(store), ResultWriter(store)
    sagas = {colour: _saga(colour, store) for colour in ("async", "sync")}

    async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    async def wait(request: Request) -> JSONResponse:
        job = request.path_params["job"]
        asked: dict[str, Any] = {"step": "soak", "server": "soak", "timeout": WAIT}
        try:
            if request.path_params["colour"] == "async":
                found = await reader.wait(job, **asked)
            else:
                found = await in_thread(lambda: reader.wait_sync(job, **asked))
        except errors.RetrySafeError as error:
            return JSONResponse({"error": type(error).__name__}, status_code=409)
        return JSONResponse({"content": found.content})

    async def done(request: Request) -> JSONResponse:
        job = request.path_params["job"]
        try:
            await writer.done(job, f"of {job}")
        except errors.StoreUnavailable as error:
            return JSONResponse({"error": type(error).__name__}, status_code=503)
        return JSONResponse({})

    async def run(request: Request) -> JSONResponse:
        colour, id = request.path_params["colour"], request.path_params["id"]
        fails = "fails" in request.query_params
        try:
            if colour == "async":
                await sagas[colour].run(id, fails)
            else:
                await in_thread(sagas[colour].run_sync, id, fails)
        except errors.SagaFailed as failed:
            whole = len(failed.undone) == 2 and not (failed.done or failed.parked)
            return JSONResponse({"status": "undone" if whole else "open"})
        except errors.RetrySafeError as error:
            return JSONResponse({"error": type(error).__name__}, status_code=409)
        return JSONResponse({"status": "done"})

    async def recover(request: Request) -> JSONResponse:
        """Go on with what others left; what is unfinished all the same. A last step that may have
        happened, can't be undone and is refused now is left to a person: an end, here."""
        await sagas["async"].recover()
        await in_thread(sagas["sync"].recover_sync)
        left = await sagas["async"].unfinished()
        left += await in_thread(sagas["sync"].unfinished_sync)
        return JSONResponse({"left": [str(each) for each in left if each.parked != ("ship",)]})

    return [
        Route("/jobs/{colour}/{job}", wait),
        Route("/jobs/{job}", done, methods=["POST"]),
        Route("/sagas", recover, methods=["POST"]),
        Route("/sagas/{colour}/{id}", run, methods=["POST"]),
        Route("/figures", figures),
    ]


def _saga(colour: str, store: Store) -> Saga:
    """Three steps: two that can be undone, and one that fails if the order says so."""
    saga = Saga(
        f"soak-{colour}",
        store,
        lease=_LEASE,
        ttl=Settings.from_env().ttl,
        retry=RetryPolicy(attempts=2, deadline=5.0, backoff=Fixed(0.05)),
        undo_backoff=Fixed(0.1),
        grace=1.0,
    )

    def do(ctx: Any, fails: bool) -> str:
        return str(ctx.key)

    def undo(ctx: Any, data: Any) -> None:
        pass

    def last(ctx: Any, fails: bool) -> str:
        if fails:
            raise Refused
        return "sent"

    async def ado(ctx: Any, fails: bool) -> str:
        await asyncio.sleep(0.02)
        return do(ctx, fails)

    async def aundo(ctx: Any, data: Any) -> None:
        await asyncio.sleep(0)

    async def alast(ctx: Any, fails: bool) -> str:
        await asyncio.sleep(0)
        return last(ctx, fails)

    is_async = colour == "async"
    for name in ("reserve", "charge"):
        saga.step(name=name, undo=aundo if is_async else undo)(ado if is_async else do)
    saga.step(name="ship")(alast if is_async else last)
    return saga


async def figures(request: Request) -> JSONResponse:
    """What this process holds, for whoever looks for growth. Only the living: garbage is gone."""
    if "collect" in request.query_params:
        gc.collect()
        _give_back()
    files = os.listdir("/proc/self/fd")
    return JSONResponse(
        {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "sockets": sum(_is_socket(name) for name in files),
            "files": len(files),
            "blocks": sys.getallocatedblocks(),
            "rss": _resident(),
        }
    )


def _give_back() -> None:
    """To the system, what the allocator holds and nobody uses: it is no growth of ours."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except FileNotFoundError:
        return False  # the directory's own, closed since
