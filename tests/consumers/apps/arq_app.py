"""`arq tests.consumers.apps.arq_app.WorkerSettings`."""

from __future__ import annotations

import asyncio
from typing import Any

from arq.connections import RedisSettings

from tests.consumers.apps.charges import BROKER, answered, asked, charge


async def handle(_: dict[str, Any], message_id: str, order: str) -> None:
    asked(message_id)
    answered(await asyncio.to_thread(charge, message_id, order))


class WorkerSettings:
    """A job whose worker died comes again `job_timeout` seconds (and ten) after it was taken."""

    functions = [handle]  # noqa: RUF012  (as arq reads it)
    redis_settings = RedisSettings.from_dsn(BROKER)
    job_timeout = 3
    max_tries = 5
    poll_delay = 0.2
