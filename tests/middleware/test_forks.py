"""A process that used the store and then forks: parent and child both go on."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retrysafe import keys
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record
from retrysafe.settings import Settings
from retrysafe.stores import Store, open_store
from tests.faults.workers import Ledger, Worker
from tests.support import run

# Forking a process with threads is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def forked(work: Callable[[], bool]) -> int:
    """The exit code of a child that does `work`: 0 where it returned True."""
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run in the child: its word is its exit code.
        signal.alarm(20)
        try:
            fine = work()
        except BaseException:
            os._exit(2)
        os._exit(0 if fine else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def store(redis_url: str) -> Store:
    return open_store(redis_url, namespace="forks")


def receipts(store: Store) -> Receipts:
    return Receipts(store, IdempotencyPolicy(wait=5, lease=2).resolve(Settings()))


def call(key: str) -> Call:
    return Call(key, "", keys.NO_FINGERPRINT)


def once(owner: Receipts, key: str, payload: bytes) -> bytes | None:
    """The answer of one keyed call, whoever gave it."""
    got = owner.begin(call(key))
    if isinstance(got, Held):
        got.finish(payload, 60)
        return payload
    return got.payload


def test_I90_O88_receipts_used_before_a_fork_work_on_both_sides(store: Store) -> None:
    owner = receipts(store)
    assert once(owner, "before", b"parent") == b"parent"
    code = forked(
        lambda: (
            once(owner, "before", b"child") == b"parent"
            and once(owner, "inside", b"child") == b"child"
        )
    )
    assert code == 0
    assert once(owner, "inside", b"parent") == b"child"
    assert once(owner, "after", b"parent") == b"parent"


def test_O88_a_child_waits_for_a_receipt_that_its_parent_holds(store: Store) -> None:
    owner = receipts(store)
    held = owner.begin(call("held"))
    assert isinstance(held, Held)
    reading, writing = os.pipe()

    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os.write(writing, b"1")
            fine = once(owner, "held", b"child") == b"parent"
        except BaseException:
            os._exit(2)
        os._exit(0 if fine else 1)
    assert os.read(reading, 1) == b"1"
    held.finish(b"parent", 60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(reading)
    os.close(writing)


def test_O88_a_child_that_ends_does_not_end_what_its_parent_holds(store: Store) -> None:
    owner = receipts(store)
    held = owner.begin(call("held"))
    assert isinstance(held, Held)

    def leave() -> bool:
        gc.collect()
        return True

    assert forked(leave) == 0
    assert not held.lost
    assert held.finish(b"parent", 60) is None
    got = owner.begin(call("held"))
    assert isinstance(got, Record)
    assert got.payload == b"parent"


def test_O88_a_fork_from_a_running_loop_leaves_the_parents_connection_alone(
    store: Store,
) -> None:
    async def main() -> None:
        owner = AsyncReceipts(store, IdempotencyPolicy().resolve(Settings()))

        async def once_more(key: str) -> None:
            got = await owner.begin(call(key))
            assert not isinstance(got, Record)
            await got.finish(b"", 60)

        await once_more("before")

        def leave() -> bool:
            gc.collect()
            return True

        assert forked(leave) == 0
        async with asyncio.timeout(5):
            await once_more("after")

    run(main())


def test_O88_a_child_may_run_a_loop_of_its_own_on_the_same_store(store: Store) -> None:
    policy = IdempotencyPolicy().resolve(Settings())

    async def one(key: str) -> bool:
        got = await AsyncReceipts(store, policy).begin(call(key))
        if isinstance(got, Record):
            return False
        await got.finish(b"", 60)
        return True

    assert run(one("parent"))
    assert forked(lambda: run(one("child")) and not run(one("parent"))) == 0
    assert not run(one("child"))


@pytest.mark.slow
def test_O88_gunicorn_preloads_an_app_that_used_the_store_at_import(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.faults.workers.APP", "tests.apps.preloaded:app")
    ledger = Ledger(tmp_path / "ledger")
    worker = Worker("gunicorn", redis_url, ledger.path)
    try:
        for n in [*range(20)] * 3:
            body = json.dumps({"payment": f"p{n}", "cents": 1, "seconds": 0}).encode()
            # A connection for each: both workers get some.
            connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
            connection.request("POST", "/payments", body, {"Idempotency-Key": f"p{n}"})
            assert connection.getresponse().status == 201
            connection.close()
    finally:
        worker.kill()
    assert ledger.count("started") == ledger.count("moved") == 20


FIRST_CALLS = """
import asyncio, sys
from retrysafe import open_store
from retrysafe.decorators import idempotent

store = open_store(sys.argv[1])

@idempotent(key="n", store=store)
def pay(n): return n

@idempotent(key="n", store=store)
async def order(n): return n

before = set(sys.modules)
pay(1), pay(1)
asyncio.run(order(1))
print(sorted(set(sys.modules) - before))
"""


def test_the_first_calls_load_no_module(redis_url: str) -> None:
    """Given a child that is forked while another thread makes the process's first call, then it
    need not wait for what that thread, which it doesn't have, was loading."""
    program = [sys.executable, "-c", FIRST_CALLS, redis_url]
    ended = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "[]\n"
