"""Every store against one small model: begin, renew, finish, release, interrupt, forget, time."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from retrysafe import commands as c
from retrysafe.commands import Answer
from retrysafe.records import Record, Running, decode, encode_done
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore

LEASE = 30.0
TTL_MS = 3_600_000
PRINTS = [b"b" + bytes([n]) * 15 for n in (1, 2)] + [b"n" + bytes(15)]
OWNERS = [b"owner-%010d" % n for n in range(3)]
INBOXES = [b"inbox-%010d" % n for n in range(2)]
_names = itertools.count()


class Machine(RuleBasedStateMachine):
    """Several owners on one key. The model is a dict; the store must answer the same."""

    store: Any

    def __init__(self) -> None:
        super().__init__()
        self.key = (b"key-%d" % next(_names)).ljust(16, b".")
        self.state = "absent"
        self.owner = self.print = self.payload = None
        self.fence = 0
        self.previous = 0
        self.inboxes: list[bytes] = []

    @initialize()
    def connect(self) -> None:
        self.door = self.make_door()

    def make_door(self) -> Any:
        raise NotImplementedError

    def pass_lease(self) -> None:
        """Let the current lease end, without waiting for it."""
        raise NotImplementedError

    def mismatch(self, fingerprint: bytes) -> bool:
        return (
            self.print is not None
            and self.print[:1] == fingerprint[:1]
            and self.print != fingerprint
        )

    @rule(
        owner=st.sampled_from(OWNERS),
        fingerprint=st.sampled_from(PRINTS),
        take_over=st.booleans(),
        inbox=st.sampled_from([b"", *INBOXES]),
    )
    def begin(self, owner: bytes, fingerprint: bytes, take_over: bool, inbox: bytes) -> None:
        reply = self.door.execute(
            c.Begin(self.key, owner, fingerprint, int(LEASE * 1e6), TTL_MS, inbox, take_over, "req")
        )
        if self.state == "absent":
            self._taken(reply, owner, fingerprint, previous=0, inboxes=[])
        elif self.mismatch(fingerprint):
            assert reply.answer is Answer.MISMATCH
        elif self.state in ("done", "not-kept"):
            assert reply.answer is Answer.DONE
            assert 0 < reply.number <= TTL_MS
            record = decode(reply.value)
            assert isinstance(record, Record)
            assert (record.token, record.payload) == (self.owner, self.payload)
        elif self.state == "running" and owner == self.owner:
            assert reply.answer is Answer.OK
            assert reply.number == self.fence
        elif self.state == "running":
            assert reply.answer is Answer.RUNNING
            assert 0 < reply.number <= LEASE * 1e6
            if inbox and inbox not in self.inboxes:
                self.inboxes.append(inbox)
        elif owner == self.owner and self.state == "expired":
            assert reply.answer is Answer.OK  # a begin of ours that is sent again
        elif not take_over:
            assert reply.answer is Answer.ABANDONED
        else:
            self._taken(reply, owner, fingerprint, previous=self.fence, inboxes=self.inboxes)

    def _taken(
        self, reply: Any, owner: bytes, fingerprint: bytes, previous: int, inboxes: list[bytes]
    ) -> None:
        assert reply.answer is Answer.OK
        assert reply.number > self.fence
        running = decode(self.door.execute(c.Look(self.key)).value)
        assert isinstance(running, Running)
        assert (running.previous.fence if running.previous else 0) == previous
        assert running.inboxes == tuple(inboxes)
        assert bool(reply.value) == bool(previous)
        assert not reply.value or decode(reply.value) == running
        self.state, self.owner, self.print = "running", owner, fingerprint
        self.fence, self.inboxes = reply.number, list(inboxes)

    @rule(owner=st.sampled_from(OWNERS))
    def renew(self, owner: bytes) -> None:
        reply = self.door.execute(c.Renew(self.key, owner, int(LEASE * 1e6), TTL_MS))
        if self.state == "absent":
            assert reply.answer is Answer.VANISHED
        elif self.state in ("running", "expired") and owner == self.owner:
            assert reply.answer is Answer.OK
            self.state = "running"
        else:
            assert reply.answer is Answer.REFUSED

    @rule(owner=st.sampled_from(OWNERS), payload=st.sampled_from([None, b"", b"x" * 300]))
    def finish(self, owner: bytes, payload: bytes | None) -> None:
        fingerprint = self.print if self.owner == owner and self.print else PRINTS[0]
        fence = self.fence if self.owner == owner else 1
        value = encode_done(Record(fingerprint, owner, fence, "req", payload))
        reply = self.door.execute(c.Finish(self.key, owner, value, TTL_MS))
        if self.state == "absent":
            assert reply.answer is Answer.VANISHED
        elif self.state in ("done", "not-kept"):
            if owner == self.owner:
                assert reply.answer is Answer.OK
            else:
                assert reply.answer is Answer.DONE
                assert decode(reply.value).token == self.owner
            return
        elif owner != self.owner:
            assert reply.answer is Answer.REFUSED
            return
        else:
            assert reply.answer is Answer.OK
        self.state = "not-kept" if payload is None else "done"
        self.owner, self.print, self.payload, self.inboxes = owner, fingerprint, payload, []

    @rule(owner=st.sampled_from(OWNERS))
    def release(self, owner: bytes) -> None:
        reply = self.door.execute(c.Release(self.key, owner))
        if self.state == "absent":
            assert reply.answer is Answer.OK
        elif self.state in ("running", "expired", "interrupted") and owner == self.owner:
            assert reply.answer is Answer.OK
            self._gone()
        else:
            assert reply.answer is Answer.REFUSED

    @rule(owner=st.sampled_from(OWNERS))
    def interrupt(self, owner: bytes) -> None:
        reply = self.door.execute(c.Interrupt(self.key, owner))
        if self.state in ("running", "expired", "interrupted") and owner == self.owner:
            assert reply.answer is Answer.OK
            self.state = "interrupted"
        else:
            assert reply.answer is Answer.REFUSED

    @rule()
    def forget(self) -> None:
        reply = self.door.execute(c.Forget(self.key))
        assert reply.answer is (Answer.VANISHED if self.state == "absent" else Answer.OK)
        self._gone()

    @rule()
    def the_lease_ends(self) -> None:
        if self.state == "running":
            self.pass_lease()
            self.state = "expired"

    def _gone(self) -> None:
        self.state, self.owner, self.print = "absent", None, None
        self.fence, self.inboxes = 0, []

    @invariant()
    def a_look_agrees(self) -> None:
        reply = self.door.execute(c.Look(self.key))
        if self.state == "absent":
            assert reply.answer is Answer.VANISHED
            return
        seen = decode(reply.value)
        assert (seen.token, seen.fingerprint) == (self.owner, self.print)
        if self.state in ("done", "not-kept"):
            assert reply.answer is Answer.DONE
            assert isinstance(seen, Record)
            assert seen.payload == self.payload
            assert (seen.payload is None) == (self.state == "not-kept")
        else:
            assert reply.answer is Answer.RUNNING
            assert isinstance(seen, Running)
            assert (reply.number > 0) == (self.state == "running")
            assert seen.interrupted == (self.state == "interrupted")
            assert seen.inboxes == tuple(self.inboxes)


class MemoryMachine(Machine):
    def make_door(self) -> Any:
        self.now = time.time()
        return MemoryStore(clock=lambda: self.now).open()

    def pass_lease(self) -> None:
        self.now += LEASE + 1


def test_memory_agrees_with_the_model() -> None:
    MemoryMachine.TestCase.settings = settings(
        max_examples=400, stateful_step_count=50, deadline=None
    )
    MemoryMachine.TestCase("runTest").runTest()


def test_redis_agrees_with_the_model(redis_url: str) -> None:
    store = RedisStore(redis_url, "model")
    shared = store.open()

    class RedisMachine(Machine):
        def make_door(self) -> Any:
            return shared

        def pass_lease(self) -> None:
            # The lease's end is in the record; write one that has passed.
            name = b"model:r:" + self.key.hex().encode()
            shared.command(b"SETRANGE", name, 51, b"%016d" % 1)

        def teardown(self) -> None:
            if hasattr(self, "door"):
                name = b"model:r:" + self.key.hex().encode()
                assert self.state == "absent" or shared.command(b"PTTL", name) > 0

    RedisMachine.TestCase.settings = settings(
        max_examples=200,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    RedisMachine.TestCase("runTest").runTest()
    shared.close()


@pytest.mark.parametrize("value", [b"", b"hello", b"r1", b"r1X" + b"0" * 60, b"r2R" + b"0" * 99])
def test_I45_I46_a_foreign_value_is_refused_and_stays(redis_url: str, value: bytes) -> None:
    store = RedisStore(redis_url, "foreign")
    door = store.open()
    memory = MemoryStore()
    key = b"k" * 16
    name = b"foreign:r:" + key.hex().encode()
    door.command(b"SET", name, value, b"PX", 60_000)
    memory.put(key, value, 60_000)
    for each in (door, memory.open()):
        begin = c.Begin(key, OWNERS[0], PRINTS[0], 1_000_000, TTL_MS, b"", True, "")
        assert each.execute(begin).answer is Answer.CORRUPT
        done = encode_done(Record(PRINTS[0], OWNERS[0], 1, "", b"x"))
        assert each.execute(c.Finish(key, OWNERS[0], done, TTL_MS)).answer is Answer.REFUSED
        assert each.execute(c.Look(key)).answer is Answer.CORRUPT
    assert door.command(b"GET", name) == value
    door.close()


def test_I45_a_value_of_another_type_is_refused_and_stays(redis_url: str) -> None:
    door = RedisStore(redis_url, "foreign").open()
    key = b"k" * 16
    name = b"foreign:r:" + key.hex().encode()
    door.command(b"HSET", name, b"a", b"b")
    door.command(b"EXPIRE", name, 60)
    begin = c.Begin(key, OWNERS[0], PRINTS[0], 1_000_000, TTL_MS, b"", True, "")
    assert door.execute(begin).answer is Answer.CORRUPT
    assert door.command(b"TYPE", name) == b"hash"
    door.close()
