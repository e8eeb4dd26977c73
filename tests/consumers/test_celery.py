"""Celery's own worker on Redis, with threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging

from retrysafe.decorators import idempotent
from tests.support import wait_until


@setup_logging.connect
def leave_logging_alone(**_: Any) -> None:
    """The worker runs in this process, whose logging is not Celery's to set up."""


@pytest.fixture
def app(broker_url: str) -> Iterator[Celery]:
    made = Celery("orders", broker=broker_url, backend=broker_url, set_as_current=False)
    made.conf.update(task_acks_late=True, broker_connection_retry_on_startup=True)
    yield made
    made.close()


def worker(app: Celery) -> Any:
    return start_worker(
        app, pool="threads", concurrency=2, perform_ping_check=False, shutdown_timeout=20
    )


def test_a_message_that_comes_twice_at_once_is_worked_once(redis_url: str, app: Celery) -> None:
    ran: list[str] = []
    asked: list[str] = []
    release = threading.Event()

    @idempotent(key="message_id", store=redis_url, wait=20)
    def charge(message_id: str) -> str:
        ran.append(message_id)
        assert release.wait(20)
        return f"charge {len(ran)}"

    @app.task(name="handle", shared=False)
    def handle(message_id: str) -> str:
        asked.append(message_id)
        return charge(message_id)

    with worker(app):
        results = [handle.delay("m-1") for _ in range(2)]
        wait_until(lambda: len(asked) == 2, limit=20)
        release.set()
        assert [each.get(timeout=20) for each in results] == ["charge 1"] * 2
        assert handle.delay("m-1").get(timeout=20) == "charge 1"  # and once more, later
    assert ran == ["m-1"]


def test_a_failed_task_is_run_again_by_the_queues_retry(redis_url: str, app: Celery) -> None:
    ran: list[str] = []

    @idempotent(key="message_id", store=redis_url)
    def charge(message_id: str) -> str:
        ran.append(message_id)
        if len(ran) == 1:
            raise ConnectionError("the bank hung up")
        return "paid"

    @app.task(
        name="handle",
        shared=False,
        autoretry_for=(ConnectionError,),
        retry_kwargs={"max_retries": 3, "countdown": 0},
    )
    def handle(message_id: str) -> str:
        return charge(message_id)

    with worker(app):
        assert handle.delay("m-1").get(timeout=20) == "paid"
    assert ran == ["m-1", "m-1"]
