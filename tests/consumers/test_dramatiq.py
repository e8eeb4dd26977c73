"""Dramatiq's own worker on Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries
from dramatiq.worker import Worker

from retrysafe.decorators import idempotent
from tests.support import wait_until


@pytest.fixture
def broker(broker_url: str) -> Iterator[RedisBroker]:
    made = RedisBroker(url=broker_url, middleware=[Retries(max_retries=3, min_backoff=10)])
    yield made
    made.close()


@pytest.fixture
def worker(broker: RedisBroker) -> Iterator[Worker]:
    made = Worker(broker, worker_threads=2, worker_timeout=50)
    made.start()
    yield made
    made.stop()


def test_a_message_that_comes_twice_at_once_is_worked_once(
    redis_url: str, broker: RedisBroker, worker: Worker
) -> None:
    ran: list[str] = []
    asked: list[str] = []
    answers: list[str] = []
    release = threading.Event()

    @idempotent(key="message_id", store=redis_url, wait=20)
    def charge(message_id: str) -> str:
        ran.append(message_id)
        assert release.wait(20)
        return f"charge {len(ran)}"

    @dramatiq.actor(broker=broker)
    def handle(message_id: str) -> None:
        asked.append(message_id)
        answers.append(charge(message_id))

    for _ in range(2):
        handle.send("m-1")
    wait_until(lambda: len(asked) == 2)
    release.set()
    wait_until(lambda: len(answers) == 2)
    handle.send("m-1")  # and once more, later
    wait_until(lambda: len(answers) == 3)
    assert answers == ["charge 1"] * 3
    assert ran == ["m-1"]


def test_a_failed_message_is_run_again_by_the_queues_retry(
    redis_url: str, broker: RedisBroker, worker: Worker
) -> None:
    ran: list[str] = []
    answers: list[str] = []

    @idempotent(key="message_id", store=redis_url)
    def charge(message_id: str) -> str:
        ran.append(message_id)
        if len(ran) == 1:
            raise ConnectionError("the bank hung up")
        return "paid"

    @dramatiq.actor(broker=broker, max_backoff=20)
    def handle(message_id: str) -> None:
        answers.append(charge(message_id))

    handle.send("m-1")
    wait_until(lambda: answers == ["paid"])
    assert ran == ["m-1", "m-1"]
