"""The demo's payments, and an answer that comes in pieces: what the server tests talk to."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount, Route

from retrysafe.cli.demo_app import note, pay, ready
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware
from tests.apps import PIECE, PIECES


async def report(scope: Any, receive: Any, send: Any) -> None:
    """Streams without a look at the client, as an app without a framework does."""
    note("started", "report", 0)
    await send({"type": "http.response.start", "status": 201, "headers": []})
    for n in range(PIECES):
        piece = bytes([65 + n]) * PIECE
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        await asyncio.sleep(0.03)
    note("moved", "report", 0)
    await send({"type": "http.response.body"})


app = Starlette(
    routes=[
        Route("/payments", pay, methods=["POST"]),
        Mount("/reports", report),
        Route("/ready", ready),
    ],
    middleware=[Middleware(RequestIdMiddleware), Middleware(IdempotencyMiddleware)],
)
