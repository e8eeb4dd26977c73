"""`dramatiq tests.consumers.apps.dramatiq_app`."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from tests.consumers.apps.charges import BROKER, answered, asked, charge

# A worker counts as dead after a second without a sign of life, and each fetch looks for such.
broker = RedisBroker(url=BROKER, heartbeat_timeout=1000, maintenance_chance=1_000_000)
dramatiq.set_broker(broker)


@dramatiq.actor(actor_name="handle", min_backoff=100, max_backoff=100)
def handle(message_id: str, order: str) -> None:
    asked(message_id)
    answered(charge(message_id, order))
