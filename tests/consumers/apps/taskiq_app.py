"""`taskiq worker tests.consumers.apps.taskiq_app:broker`."""

from __future__ import annotations

import asyncio

from taskiq_redis import RedisStreamBroker

from tests.consumers.apps.charges import BROKER, answered, asked, charge

# It claims what a dead worker had when it has read something new.
broker = RedisStreamBroker(
    url=BROKER, idle_timeout=1000, xread_block=200, unacknowledged_lock_timeout=5
)


@broker.task(task_name="handle")
async def handle(message_id: str, order: str) -> None:
    asked(message_id)
    answered(await asyncio.to_thread(charge, message_id, order))
