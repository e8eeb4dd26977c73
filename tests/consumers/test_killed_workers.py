"""Workers of each queue as they are run in production, killed in the middle of a message."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.guard import Guard
from tests.support import wait_until

VISIBILITY_TIMEOUT = 2  # seconds, as in apps/celery_app.py
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
APPS = "tests.consumers.apps"
PRODUCE = {
    "celery": f"from {APPS}.celery_app import handle\nhandle.delay(*words)",
    "dramatiq": f"from {APPS}.dramatiq_app import handle\nhandle.send(*words)",
    "taskiq": f"import asyncio\nfrom {APPS}.taskiq_app import broker, handle\n"
    "async def main():\n    await broker.startup()\n    await handle.kiq(*words)\n"
    "    await broker.shutdown()\nasyncio.run(main())",
}
WORK = {
    "celery": ["celery", "-A", f"{APPS}.celery_app", "worker", "--pool=solo", "--without-mingle"],
    "dramatiq": ["dramatiq", f"{APPS}.dramatiq_app", "--processes=1", "--threads=2"],
    "taskiq": ["taskiq", "worker", f"{APPS}.taskiq_app:broker", "--workers=1"],
}

if importlib.util.find_spec("arq"):  # its release of today can't be asked for beside redis-py 8
    PRODUCE["arq"] = (
        f"import asyncio\nfrom arq import create_pool\n"
        f"from {APPS}.arq_app import WorkerSettings\n"
        "async def main():\n    pool = await create_pool(WorkerSettings.redis_settings)\n"
        "    await pool.enqueue_job('handle', *words)\n    await pool.aclose()\n"
        "asyncio.run(main())"
    )
    WORK["arq"] = ["arq", f"{APPS}.arq_app.WorkerSettings"]


class Queue:
    """One kind of queue, its broker and its workers."""

    def __init__(self, kind: str, broker_url: str, redis_url: str) -> None:
        self.kind = kind
        self.bank = redis.Redis.from_url(broker_url, decode_responses=True)
        self._surroundings = {**os.environ, "BROKER_URL": broker_url, "RECEIPTS_URL": redis_url}
        self._workers: dict[subprocess.Popen[bytes], Guard] = {}

    def send(self, message_id: str, order: str) -> None:
        """As a producer does, in a process of its own."""
        program = f"words = {(message_id, order)!r}\n{PRODUCE[self.kind]}"
        subprocess.run(
            [sys.executable, "-c", program],
            env=self._surroundings,
            cwd=ROOT,
            check=True,
            timeout=60,
        )

    def work(self) -> subprocess.Popen[bytes]:
        """Start a worker."""
        name, *words = WORK[self.kind]
        worker = subprocess.Popen(
            [str(BIN / name), *words],
            env=self._surroundings,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._workers[worker] = Guard(-worker.pid)
        return worker

    def kill(self, worker: subprocess.Popen[bytes]) -> None:
        """SIGKILL, the worker and its children."""
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        self._workers.pop(worker).off()

    def seconds_unacknowledged(self) -> float:
        """How long Celery's messages have been with a worker, the last one taken."""
        taken = self.bank.zrange("unacked_index", 0, -1, withscores=True)
        return time.time() - max(at for _, at in taken)

    def seen(self, what: str) -> list[str]:
        return self.bank.lrange(what, 0, -1)

    def close(self) -> None:
        for worker in list(self._workers):
            self.kill(worker)
        self.bank.close()


@pytest.fixture(params=sorted(WORK))
def queue(request: pytest.FixtureRequest, broker_url: str, redis_url: str) -> Iterator[Queue]:
    made = Queue(request.param, broker_url, redis_url)
    yield made
    made.close()


@pytest.mark.slow
def test_a_message_whose_worker_was_killed_comes_again_and_is_charged_once(queue: Queue) -> None:
    first = queue.work()
    if queue.kind == "taskiq":  # its group reads what is sent once the group is there
        wait_until(lambda: bool(queue.bank.exists("taskiq")), limit=60)
    queue.send("m-1", "o-1")
    wait_until(lambda: len(queue.seen("started")) == 1, limit=60)
    queue.send("m-1", "o-1")  # the producer's own retry of its send
    queue.kill(first)
    assert queue.seen("charged") == []
    if queue.kind == "celery":
        # A worker looks for what is overdue when it starts, and next after a hundred seconds.
        wait_until(lambda: queue.seconds_unacknowledged() > VISIBILITY_TIMEOUT)
    queue.work()

    def both_answered() -> bool:
        if queue.kind == "taskiq":  # it claims a dead worker's messages beside new ones
            queue.send("tick", "tick")
        return queue.seen("answers").count("charged o-1") == 2

    wait_until(both_answered, limit=90)
    assert [each.split()[0] for each in queue.seen("started")].count("m-1") == 2
    assert queue.seen("charged").count("o-1") == 1
    assert queue.seen("asked").count("m-1") >= 3  # the killed one's, its return, the producer's
