"""Ten thousand clients that wait for one call, and many of them leave."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis

from retrysafe.desks import async_desk_for
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores.redis import RedisStore
from tests.asgi import Exchange, http_scope
from tests.support import run, until

pytestmark = pytest.mark.slow

MANY = 10_000  # RETRYSAFE_MAX_WAITERS, by default
LEAVING = 4_000
WAIT = 60.0


class App:
    """Works until it is told to end."""

    def __init__(self) -> None:
        self.runs = 0
        self.gate = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"the answer"})


def test_ten_thousand_wait_and_many_hang_up(redis_url: str) -> None:
    """Given as many waiters as are let in, whose subscription is killed and of whom many leave,
    when the work ends elsewhere, then all who stayed have its answer and nothing is left."""

    async def main() -> None:
        app = App()
        policy = IdempotencyPolicy(wait=WAIT)
        # Two objects: as of two processes, each with its own connection and inbox.
        owner, crowd = (
            IdempotencyMiddleware(app, policy=policy, store=RedisStore(redis_url, "crowd"))
            for _ in range(2)
        )

        def ask(target: Any) -> Exchange:
            headers = [("Idempotency-Key", "one"), ("Content-Length", "0")]
            return Exchange(target, http_scope(headers=headers))

        before = asyncio.all_tasks()
        first = asyncio.create_task(ask(owner).run())
        await until(lambda: app.runs == 1)
        exchanges = [ask(crowd) for _ in range(MANY)]
        waiting = [asyncio.create_task(each.run()) for each in exchanges]
        flights = async_desk_for(crowd.store, MANY).flights
        await until(lambda: flights.waiting == MANY, limit=60)
        refused = await ask(crowd).run()
        assert refused.status == 409

        with redis.Redis.from_url(redis_url) as operator:
            assert operator.client_kill_filter(_type="pubsub") >= 1
        leaving, staying = exchanges[:LEAVING], waiting[LEAVING:]
        for each in leaving:  # the leader, who asks the store for all, is the first of them
            each.hang_up()
        left = await asyncio.gather(*waiting[:LEAVING])
        assert not any(answer.messages for answer in left)
        assert flights.waiting == MANY - LEAVING

        app.gate.set()
        assert (await first).body == b"the answer"
        done = time.monotonic()
        answers = await asyncio.gather(*staying)
        print(f"\n{len(staying)} of {MANY} answered {time.monotonic() - done:.2f} s after the end")
        assert {(each.status, each.body, each.replayed) for each in answers} == {
            (201, b"the answer", True)
        }
        assert app.runs == 1
        assert flights.waiting == len(flights) == 0
        kept = before | {asyncio.current_task()}
        await until(
            lambda: all(
                each.get_name().startswith("retrysafe-") for each in asyncio.all_tasks() - kept
            )
        )

    run(main(), limit=150)
