"""The work of every queue's worker: one charge a message, by the ID that its producer gave it."""

from __future__ import annotations

import os
import time

import redis

from retrysafe.decorators import idempotent

BROKER = os.environ["BROKER_URL"]
RECEIPTS = os.environ["RECEIPTS_URL"]

bank = redis.Redis.from_url(BROKER, decode_responses=True)


@idempotent(key="message_id", store=RECEIPTS, lease=1, wait=20)
def charge(message_id: str, order: str) -> str:
    """The first worker to come hangs in the middle; it is killed there."""
    if bank.rpush("started", f"{message_id} {os.getpid()}") == 1:
        time.sleep(120)
    bank.rpush("charged", order)
    return f"charged {order}"


def asked(message_id: str) -> None:
    """A message has come to a worker."""
    bank.rpush("asked", message_id)


def answered(answer: str) -> None:
    """A worker is done with a message."""
    bank.rpush("answers", answer)
