"""Bodies over the cap: when the answer comes, and what is read before it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores.memory import MemoryStore
from tests.asgi import http_scope
from tests.support import run


@pytest.mark.parametrize(("declared", "invited"), [("200", False), ("100", True)])
def test_I8_I10_a_client_that_asks_before_it_sends_is_told_413_without_being_invited(
    declared: str, invited: bool
) -> None:
    # A server sends "100 Continue" when the app first asks for the body.
    async def main() -> None:
        asked = asyncio.Event()
        sent: list[dict[str, Any]] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("the handler must not run")

        async def receive() -> dict[str, Any]:
            asked.set()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        policy = IdempotencyPolicy(max_request_body=100)
        target = IdempotencyMiddleware(app, policy=policy, store=MemoryStore())
        headers = [("Idempotency-Key", "k"), ("Content-Length", declared)]
        await target(http_scope(headers=[*headers, ("Expect", "100-continue")]), receive, send)
        assert asked.is_set() is invited
        if not invited:
            assert sent[0]["status"] == 413
            assert json.loads(sent[1]["body"])["type"].endswith("body-too-large")

    run(main())
