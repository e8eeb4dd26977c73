"""Whose request it is: what names a caller, and what can't."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from starlette.requests import Request

from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.stores.memory import MemoryStore
from tests.asgi import post
from tests.support import run


class Counting:
    """Answers with the number of its run."""

    def __init__(self) -> None:
        self.runs = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        body = b"%d" % self.runs
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": body})


class Nameless:
    """An authenticated user without a name: its text is where it lies in memory."""

    is_authenticated = True


def test_B034_a_user_whom_nothing_names_is_refused_and_gets_nobody_elses_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        app = Counting()
        target = IdempotencyMiddleware(app, store=MemoryStore())
        for n in range(20):
            # The next user may well lie where this one lay.
            for _ in range(2):
                answer = await post(target, key=f"k{n}", user=Nameless())
                gc.collect()
                assert answer.status == 500
                assert json.loads(answer.body)["type"] == "urn:retrysafe:problem:scope-failed"
        assert app.runs == 0

    run(main())
    assert "pass scope=" in caplog.text


def test_a_user_with_a_text_of_its_own_is_told_apart_by_it() -> None:
    class User(Nameless):
        def __init__(self, number: int) -> None:
            self.number = number

        def __str__(self) -> str:
            return f"customer-{self.number}"

    async def main() -> None:
        target = IdempotencyMiddleware(Counting(), store=MemoryStore())
        assert (await post(target, user=User(1))).body == b"1"
        assert (await post(target, user=User(2))).body == b"2"
        assert (await post(target, user=User(1))).replayed

    run(main())


def test_O9_a_scope_without_a_text_of_its_own_is_500_and_never_an_unprotected_run() -> None:
    class Tenant:
        pass

    async def main() -> None:
        app = Counting()
        target = IdempotencyMiddleware(app, store=MemoryStore(), scope=lambda request: Tenant())
        for _ in range(2):
            assert (await post(target)).status == 500
        assert app.runs == 0

    run(main())


@pytest.mark.parametrize("kind", ["text", "number", "async"])
def test_O9_texts_numbers_and_coroutines_name_a_caller(kind: str) -> None:
    async def later(request: Request) -> str:
        return request.headers["x-user"]

    scopes: dict[str, Any] = {
        "text": lambda request: request.headers["x-user"],
        "number": lambda request: int(request.headers["x-user"]),
        "async": later,
    }

    async def main() -> None:
        app = Counting()
        target = IdempotencyMiddleware(app, store=MemoryStore(), scope=scopes[kind])
        assert (await post(target, headers=[("X-User", "1")])).body == b"1"
        assert (await post(target, headers=[("X-User", "2")])).body == b"2"
        assert (await post(target, headers=[("X-User", "1")])).replayed

    run(main())
