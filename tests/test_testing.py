"""What users get for their own tests."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from retrysafe import testing
from retrysafe.middleware import IdempotencyMiddleware


def app(store: Any, answers: list[str]) -> Starlette:
    async def endpoint(request: Request) -> JSONResponse:
        return JSONResponse({"n": answers.pop(0)})

    made = Starlette(routes=[Route("/", endpoint, methods=["POST"])])
    if store is not None:
        made.add_middleware(IdempotencyMiddleware, store=store)
    return made


def test_the_duplicate_client_sees_that_both_answers_agree(retrysafe_store: Any) -> None:
    client = testing.DuplicateClient(TestClient(app(retrysafe_store, ["one", "two"])))
    assert client.post("/").json() == {"n": "one"}
    assert client.post("/").json() == {"n": "two"}


def test_the_duplicate_client_finds_an_app_that_runs_twice() -> None:
    client = testing.DuplicateClient(TestClient(app(None, ["one", "two"])))
    with pytest.raises(AssertionError, match="differs"):
        client.post("/")
    client = testing.DuplicateClient(TestClient(app(None, ["one", "one"])))
    with pytest.raises(AssertionError, match="ran twice"):
        client.post("/")


def test_instant_records_what_would_have_been_slept() -> None:
    with testing.instant() as plan:
        began = plan.monotonic()
        plan.sleep(3600)
        assert plan.monotonic() - began == pytest.approx(3600, abs=60)
    assert plan.delays == [3600]


def test_a_fake_clock_moves_by_hand() -> None:
    clock = testing.FakeClock(5)
    clock.advance(2)
    assert clock() == 7


def test_memory_stores_are_each_their_own() -> None:
    assert testing.memory_store() is not testing.memory_store()
