"""The demo's payment service: one endpoint that moves money in a ledger, a file beside the store.

Each line of the ledger is one fact: `started` or `moved`, the payment, the worker, the amount.
"""

from __future__ import annotations

import asyncio
import os

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware

LEDGER = os.environ["DEMO_LEDGER"]
WORKER = os.environ["DEMO_WORKER"]


def note(fact: str, payment: str, cents: int) -> None:
    """Append one line; the file is open in append mode, so lines of two workers never mix."""
    line = f"{fact} {payment} {WORKER} {cents}\n".encode()
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(ledger, line)
    finally:
        os.close(ledger)


async def pay(request: Request) -> JSONResponse:
    order = await request.json()
    note("started", order["payment"], order["cents"])
    await asyncio.sleep(order["seconds"])
    note("moved", order["payment"], order["cents"])
    return JSONResponse({"paid": order["cents"], "by": WORKER}, status_code=201)


async def ready(request: Request) -> JSONResponse:
    return JSONResponse({"worker": WORKER})


app = Starlette(
    routes=[Route("/payments", pay, methods=["POST"]), Route("/ready", ready)],
    middleware=[Middleware(RequestIdMiddleware), Middleware(IdempotencyMiddleware)],
)
