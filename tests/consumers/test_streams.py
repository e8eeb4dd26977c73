"""A consumer group of a Redis stream: redelivery, a killed consumer, a failed message."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from retrysafe.decorators import idempotent
from tests.support import wait_until

CONSUMER = """
    import sys, time
    import redis
    from retrysafe.decorators import idempotent

    broker_url, redis_url, name, claim_after = sys.argv[1:]
    broker = redis.Redis.from_url(broker_url, decode_responses=True)

    @idempotent(key="message_id", store=redis_url, namespace="orders", lease=1, wait=20)
    def handle(message_id: str, order: str) -> str:
        broker.rpush("started", name)
        if name == "first":
            time.sleep(60)
        broker.rpush("charged", order)
        return f"charged {order} by {name}"

    if int(claim_after) >= 0:
        entries = broker.xautoclaim("stream", "group", name, int(claim_after), "0")[1]
    else:
        ((_, entries),) = broker.xreadgroup("group", name, {"stream": ">"}, count=1, block=20000)
    for entry, fields in entries:
        broker.rpush("answers", handle(fields["id"], fields["order"]))
        broker.xack("stream", "group", entry)
"""


def consumer(broker_url: str, redis_url: str, name: str, claim: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", textwrap.dedent(CONSUMER), broker_url, redis_url, name]
    return subprocess.Popen([*words, str(claim)], cwd=Path(__file__).parents[2])


@pytest.fixture
def broker(broker_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(broker_url, decode_responses=True) as client:
        client.xgroup_create("stream", "group", "0", mkstream=True)
        yield client


def delivered(broker: redis.Redis, name: str) -> list[tuple[str, dict[str, str]]]:
    """The next new message of the group, if any."""
    found = broker.xreadgroup("group", name, {"stream": ">"}, count=1)
    return found[0][1] if found else []


def reclaimed(broker: redis.Redis, name: str) -> list[tuple[str, dict[str, str]]]:
    return broker.xautoclaim("stream", "group", name, 0, "0")[1]


def test_a_message_that_was_not_acknowledged_is_answered_from_the_record(
    redis_url: str, broker: redis.Redis
) -> None:
    charged: list[str] = []

    @idempotent(key="message_id", store=redis_url)
    def handle(message_id: str, order: str) -> str:
        charged.append(order)
        return f"charge {len(charged)}"

    broker.xadd("stream", {"id": "m-1", "order": "o-1"})
    broker.xadd("stream", {"id": "m-1", "order": "o-1"})  # the producer's retry: another entry
    ((_, fields),) = delivered(broker, "a")
    assert handle(fields["id"], fields["order"]) == "charge 1"  # and no XACK
    again = [*reclaimed(broker, "b"), *delivered(broker, "b")]
    assert [handle(f["id"], f["order"]) for _, f in again] == ["charge 1", "charge 1"]
    for entry, _ in again:
        broker.xack("stream", "group", entry)
    assert charged == ["o-1"]
    assert broker.xpending("stream", "group")["pending"] == 0


def test_two_consumers_of_one_message_at_once_work_once(
    redis_url: str, broker: redis.Redis
) -> None:
    charged: list[str] = []
    release = threading.Event()

    @idempotent(key="message_id", store=redis_url, wait=20)
    def handle(message_id: str, order: str) -> str:
        charged.append(order)
        assert release.wait(20)
        return f"charge {len(charged)}"

    broker.xadd("stream", {"id": "m-1", "order": "o-1"})
    ((_, fields),) = delivered(broker, "a")
    ((_, same),) = reclaimed(broker, "b")  # it was only slow: now both have it
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(handle, fields["id"], fields["order"])
        wait_until(lambda: charged == ["o-1"])
        second = pool.submit(handle, same["id"], same["order"])
        release.set()
        assert (first.result(20), second.result(20)) == ("charge 1", "charge 1")
    assert charged == ["o-1"]


def test_a_killed_consumers_message_is_run_again_once(
    redis_url: str, broker_url: str, broker: redis.Redis
) -> None:
    broker.xadd("stream", {"id": "m-1", "order": "o-1"})
    started = [consumer(broker_url, redis_url, "first", -1)]
    try:
        wait_until(lambda: broker.lrange("started", 0, -1) == ["first"], limit=20)
        started[0].kill()  # SIGKILL, in mid-work
        started[0].wait()
        assert broker.xpending("stream", "group")["pending"] == 1
        # Two claim the message, as they do when the first of them takes long.
        started += [consumer(broker_url, redis_url, name, 0) for name in ("second", "third")]
        assert [each.wait(30) for each in started[1:]] == [0, 0]
    finally:
        for each in started:
            each.kill()
            each.wait()
    ran = broker.lrange("started", 0, -1)
    assert len(ran) == 2, "one run that was killed, one that replaced it"
    assert broker.lrange("charged", 0, -1) == ["o-1"]
    answers = broker.lrange("answers", 0, -1)
    assert set(answers) == {f"charged o-1 by {ran[1]}"}
    assert broker.xpending("stream", "group")["pending"] == 0


def test_a_failed_message_is_run_again_when_it_is_redelivered(
    redis_url: str, broker: redis.Redis
) -> None:
    runs: list[str] = []

    @idempotent(key="message_id", store=redis_url)
    def handle(message_id: str) -> str:
        runs.append(message_id)
        if len(runs) == 1:
            raise ConnectionError("the bank hung up")
        return "paid"

    broker.xadd("stream", {"id": "m-1"})
    ((_, fields),) = delivered(broker, "a")
    with pytest.raises(ConnectionError, match="the bank hung up"):
        handle(fields["id"])
    ((_, fields),) = reclaimed(broker, "b")
    assert handle(fields["id"]) == "paid"
    assert handle(fields["id"]) == "paid"
    assert runs == ["m-1", "m-1"]
