"""A recovery function that is asked about a call whose worker died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse

from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.middleware.responder import _works
from retrysafe.policy import IdempotencyPolicy, Recovered
from retrysafe.stores import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from tests.asgi import post
from tests.support import run, until


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore("recovery")
    return RedisStore(request.getfixturevalue("redis_url"), "recovery")


class Dying:
    """Its first run is cut short, as by the end of its worker; the others answer."""

    def __init__(self) -> None:
        self.runs = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        if self.runs == 1:
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"ran again"})


async def abandoned(
    store: Store, recover: Callable[[Any], Any]
) -> tuple[Dying, IdempotencyMiddleware]:
    """An app whose call `k` was interrupted."""
    app = Dying()
    policy = IdempotencyPolicy(on_abandoned=recover, wait=0)
    target = IdempotencyMiddleware(app, policy=policy, store=store)
    before = set(_works)
    call = asyncio.create_task(post(target))
    await until(lambda: app.runs == 1)
    for work in _works - before:
        work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    return app, target


def test_B030_a_recovery_that_fails_is_asked_again_and_nothing_runs(store: Store) -> None:
    async def main() -> None:
        asked = 0

        def recover(receipt: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise ConnectionError("the books are out of reach")
            return Recovered(JSONResponse({"found": True}, 201))

        app, target = await abandoned(store, recover)
        for n in (1, 2):
            with pytest.raises(ConnectionError):
                await post(target)
            assert asked == n
        answer = await post(target)
        assert (answer.status, answer.body) == (201, b'{"found":true}')
        assert (await post(target)).replayed
        assert (app.runs, asked) == (1, 3)

    run(main())


@pytest.mark.parametrize("found", [Recovered("text"), "not Recovered"])
def test_B030_a_recovery_that_cannot_be_read_does_not_pass_for_not_done(
    store: Store, found: Any
) -> None:
    async def main() -> None:
        app, target = await abandoned(store, lambda receipt: found)
        for _ in range(2):
            with pytest.raises(TypeError):
                await post(target)
        assert app.runs == 1

    run(main())


@pytest.mark.parametrize("status", [404, 409, 503])
def test_B030_what_was_recovered_is_recorded_whatever_its_status(store: Store, status: int) -> None:
    async def main() -> None:
        app, target = await abandoned(store, lambda receipt: Recovered((status, {}, b"as it was")))
        for n in range(3):
            answer = await post(target)
            assert (answer.status, answer.body) == (status, b"as it was")
            assert answer.replayed is (n > 0)
        assert app.runs == 1

    run(main())


def test_a_recovery_that_says_it_was_not_done_lets_the_work_run_by_the_usual_rules(
    store: Store,
) -> None:
    async def main() -> None:
        app, target = await abandoned(store, lambda receipt: None)
        answer = await post(target)
        assert (answer.status, answer.body, app.runs) == (201, b"ran again", 2)
        assert (await post(target)).replayed

    run(main())
