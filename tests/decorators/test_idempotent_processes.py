"""Idempotent functions in several processes on one server: killed owners, forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from retrysafe.decorators import idempotent
from retrysafe.stores import open_store
from tests.support import wait_until

WORKER = """
    import sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    import redis
    from retrysafe.decorators import idempotent

    url, role = sys.argv[1:]
    seen = redis.Redis.from_url(url)

    @idempotent(key="n", store=url, namespace="work", lease=1, wait=10)
    def work(n: int) -> str:
        seen.set("most", max(int(seen.get("most") or 0), seen.incr("now")), ex=60)
        seen.expire("now", 60)
        seen.incr("runs")
        seen.expire("runs", 60)
        if role == "leader":
            time.sleep(60)
        time.sleep(0.2)
        seen.decr("now")
        return role

    if role == "leader":
        work(1)
    with ThreadPoolExecutor(15) as pool:
        calls = [pool.submit(work, 1) for _ in range(15)]
        seen.incr("waiting")
        seen.expire("waiting", 60)
        for call in calls:
            assert call.result() == "follower", call.result()
"""


def start(url: str, role: str) -> subprocess.Popen[bytes]:
    script = textwrap.dedent(WORKER)
    root = Path(__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", script, url, role], cwd=root)


def test_B008_after_the_owner_is_killed_exactly_one_waiter_runs(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as seen:
        leader = start(redis_url, "leader")
        wait_until(lambda: seen.get("runs") == b"1")
        followers = [start(redis_url, "follower") for _ in range(2)]
        try:
            wait_until(lambda: seen.get("waiting") == b"2", limit=20)
            leader.kill()
            leader.wait()
            seen.decr("now")  # the killed one is no longer in the body
            assert [each.wait(20) for each in followers] == [0, 0]
            assert (seen.get("runs"), seen.get("most")) == (b"2", b"1")
        finally:
            for each in (leader, *followers):
                each.kill()
                each.wait()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it is what is tested
def test_I90_O88_a_forked_child_opens_its_own(redis_url: str) -> None:
    @idempotent(key="n", store=open_store(redis_url, namespace="fork"))
    def work(n: int) -> int:
        return os.getpid()

    parent = os.getpid()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, [1, 2])) == [parent, parent]
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run in the child: its word is its exit code.
        signal.alarm(20)
        try:
            fine = work(1) == parent and work(3) == os.getpid() and work(3) == os.getpid()
        except BaseException:
            os._exit(2)
        os._exit(0 if fine else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert work(3) == child
    assert work(4) == parent
