"""A message consumer: the producer assigns the ID, the consumer deduplicates by it.

Run it: `python examples/worker.py`. The broker delivers a message twice; the work runs once, and
a step that was done before a crash is skipped when the work runs again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from retrysafe.decorators import idempotent, step
from retrysafe.testing import memory_store

charged: list[str] = []
mailed: list[str] = []


@dataclass
class Message:
    id: str
    order: str


@step("charge")
def charge(order: str) -> int:
    charged.append(order)
    return len(charged)


@idempotent(key="message.id", store=memory_store())
def handle(message: Message) -> str:
    number = charge(message.order)
    if not mailed and message.order == "o-1":
        mailed.append("failed once")
        raise ConnectionError("the mail server hung up")
    return f"charge {number}"


if __name__ == "__main__":
    message = Message("m-1", "o-1")
    with contextlib.suppress(ConnectionError):  # the broker delivers it again
        handle(message)
    assert handle(message) == "charge 1"
    assert handle(message) == "charge 1"  # and, as brokers do, once more
    assert charged == ["o-1"]
    print("delivered three times, charged once")
