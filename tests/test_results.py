"""Results out of band: every way a wait can end, in both modes and both colours."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from retrysafe import ResultReader, ResultWriter, classify, deadline, envelopes
from retrysafe.classify import Outcome
from retrysafe.errors import (
    AlreadyTaken,
    NotEncodable,
    ProtocolError,
    ResultTimeout,
    StepFailed,
    is_terminal,
)
from retrysafe.results import Result
from retrysafe.stores import Store
from retrysafe.stores.redis import RedisStore
from tests.conftest import OwnServer
from tests.support import collector_held, run, until, wait_until

MODES = ["take", "acknowledge"]
COLOURS = ["sync", "async"]
KEY = "tests:result:job-1"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
JSON = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["done", "error", "DONE", ""]) | VALUES,
        "content": VALUES,
        "message": VALUES,
        "retryable": VALUES,
    },
).map(lambda value: json.dumps(value).encode())

Wait = Callable[..., Result]


@pytest.fixture(params=COLOURS)
def wait(request: pytest.FixtureRequest) -> Wait:
    """`wait(reader, job_id=…, timeout=…, mode=…)` in one colour."""

    def waited(reader: ResultReader, job_id: str = "job-1", **options: Any) -> Result:
        asked = {"step": "render", "server": "gpu-1", "timeout": 5.0, **options}
        if request.param == "sync":
            return reader.wait_sync(job_id, **asked)
        return run(reader.wait(job_id, **asked))

    return waited


def written(store: Store, content: Any = None) -> None:
    assert ResultWriter(store).done_sync("job-1", content)


@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_is_there_is_read(store: Store, wait: Wait, mode: str) -> None:
    written(store, {"pixels": [1, 2], "name": "é"})
    result = wait(ResultReader(store), mode=mode)
    assert result.content == {"pixels": [1, 2], "name": "é"}
    assert (result.job_id, result.step, result.server) == ("job-1", "render", "gpu-1")


@pytest.mark.parametrize("mode", MODES)
def test_an_error_ends_the_wait_at_once_with_the_producers_words(
    store: Store, wait: Wait, mode: str
) -> None:
    ResultWriter(store).error_sync("job-1", "out of memory in /srv/models/x.bin", retryable=True)
    with pytest.raises(StepFailed) as caught:
        wait(ResultReader(store), mode=mode, timeout=60.0)
    error = caught.value
    assert (error.step, error.server) == ("render", "gpu-1")
    assert (error.message, error.retryable) == ("out of memory in [path]", True)
    assert classify(error).outcome is Outcome.TRANSIENT


@pytest.mark.parametrize("mode", MODES)
def test_C77_a_result_that_comes_later_wakes_the_waiter(
    store: Store, wait: Wait, mode: str
) -> None:
    timer = threading.Timer(0.3, written, (store, 7))
    timer.start()
    assert wait(ResultReader(store), mode=mode, timeout=20.0).content == 7
    timer.join()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{}", "missing_status"),
        (b'{"content": 1}', "missing_status"),
        (b'{"status": 5}', "status_not_text"),
        (b'{"status": null}', "status_not_text"),
        (b'{"status": ["done"]}', "status_not_text"),
        (b'{"status": "WEIRD"}', "unknown_status:WEIRD"),
        (b'{"status": "Done"}', "unknown_status:Done"),
        (b'{"status": "done "}', "unknown_status:done"),
        (b'{"status": ""}', "unknown_status:"),
        (b'{"status": "/etc/shadow\\u0000"}', "unknown_status:[path]"),
        (b"[]", "not_an_object"),
        (b"null", "not_an_object"),
        (b'"done"', "not_an_object"),
        (b"", "not_json"),
        (b"done", "not_json"),
        (b'{"status": "done", "conte', "not_json"),
        (b'{"status": "done"} x', "not_json"),
        (b'\xef\xbb\xbf{"status": "done"}', "not_json"),
        (b'{"status": "d\xffne"}', "invalid_utf8"),
        (b'{"status": "error", "message": 5}', "message_not_text"),
        (b'{"status": "error", "message": "x", "retryable": "yes"}', "retryable_not_boolean"),
        (b"[" * 100_000, "not_json"),
    ],
)
def test_C78_C79_C80_what_breaks_the_contract_ends_the_wait_at_once(
    redis_url: str, wait: Wait, mode: str, payload: bytes, reason: str
) -> None:
    store = RedisStore(redis_url, "tests")
    with redis.Redis.from_url(redis_url) as client:
        client.set(KEY, payload, ex=60)
        with collector_held(), pytest.raises(ProtocolError) as caught:
            wait(ResultReader(store), mode=mode, timeout=600.0)
        assert (caught.value.reason, caught.value.raw) == (reason, payload)
        assert classify(caught.value).outcome is Outcome.PROTOCOL
        if mode == "acknowledge":  # it stays, for inspection
            assert client.get(KEY) == payload


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_of_100_MB_is_refused_and_never_loaded(
    redis_url: str, wait: Wait, mode: str
) -> None:
    client = redis.Redis.from_url(redis_url)
    client.setrange(KEY, 100 * 1024 * 1024, b"x")
    client.expire(KEY, 60)
    with pytest.raises(ProtocolError, match="larger_than:16777216") as caught:
        wait(ResultReader(RedisStore(redis_url, "tests")), mode=mode, timeout=600.0)
    assert len(caught.value.raw) == 64 * 1024


@pytest.mark.parametrize("mode", MODES)
def test_a_key_of_another_type_is_refused(redis_url: str, wait: Wait, mode: str) -> None:
    client = redis.Redis.from_url(redis_url)
    client.hset(KEY, "status", "done")
    client.expire(KEY, 60)
    with pytest.raises(ProtocolError, match="not_a_string"):
        wait(ResultReader(RedisStore(redis_url, "tests")), mode=mode, timeout=600.0)


class Charge(msgspec.Struct):
    cents: int


@pytest.mark.parametrize("mode", MODES)
def test_C84_content_of_another_type_is_a_protocol_failure(
    store: Store, wait: Wait, mode: str
) -> None:
    written(store, {"cents": "many"})
    with pytest.raises(ProtocolError, match="content_of_another_type"):
        wait(ResultReader(store, content=Charge), mode=mode)


def test_typed_content_comes_as_its_type(store: Store, wait: Wait) -> None:
    written(store, {"cents": 5})
    assert wait(ResultReader(store, content=Charge)).content == Charge(5)


def test_C81_a_second_reader_of_what_was_taken_is_told_so(store: Store, wait: Wait) -> None:
    written(store)
    reader = ResultReader(store)
    wait(reader)
    for mode in MODES:
        with pytest.raises(AlreadyTaken):
            wait(reader, mode=mode, timeout=600.0)


def test_C81_of_many_waiters_exactly_one_takes(store: Store) -> None:
    reader = ResultReader(store)

    async def many() -> list[Any]:
        waits = [
            asyncio.ensure_future(reader.wait("job-1", step="s", server="x", timeout=20.0))
            for _ in range(50)
        ]
        await asyncio.sleep(0)
        await ResultWriter(store).done("job-1", "once")
        return await asyncio.gather(*waits, return_exceptions=True)

    ends = run(many())
    assert [end.content for end in ends if isinstance(end, Result)] == ["once"]
    assert sum(isinstance(end, AlreadyTaken) for end in ends) == 49


def test_B139_an_id_that_was_never_issued_is_waited_for_to_the_cap(
    store: Store, wait: Wait
) -> None:
    """Nothing tells it from one that is pending: the cap, and the writer's own no, are the ends."""
    with pytest.raises(ResultTimeout):
        wait(ResultReader(store), "never-issued", timeout=0.2)


def test_B141_a_reader_that_comes_before_the_result_never_fails_for_it(store: Store) -> None:
    async def main() -> None:
        reader, writer = ResultReader(store), ResultWriter(store)
        for n in range(200):
            asked = reader.wait(f"job-{n}", step="render", server="gpu-1", timeout=10)
            reading = asyncio.ensure_future(asked)
            await asyncio.sleep(0)
            assert await writer.done(f"job-{n}", n)
            assert (await reading).content == n

    run(main(), limit=60)


def test_B142_a_cancel_and_a_completion_race_to_one_end(store: Store) -> None:
    async def main() -> None:
        reader, writer = ResultReader(store), ResultWriter(store)
        for n in range(500):
            job = f"job-{n}"
            ends = [writer.done(job, n), writer.error(job, "cancelled", retryable=False)]
            finished, cancelled = await asyncio.gather(*(ends if n % 2 else reversed(ends)))
            finished, cancelled = (finished, cancelled) if n % 2 else (cancelled, finished)
            assert finished is not cancelled  # exactly one of them stands
            asked = {"step": "render", "server": "gpu-1", "timeout": 5.0, "mode": "acknowledge"}
            for _ in range(2):  # and every later look agrees
                try:
                    found: Any = await reader.wait(job, **asked)  # type: ignore[arg-type]
                except StepFailed as failed:
                    assert cancelled
                    assert "cancelled" in failed.message
                else:
                    assert finished
                    assert found.content == n

    run(main(), limit=60)


def test_a_job_has_one_result_read_or_unread(store: Store, wait: Wait) -> None:
    writer, reader = ResultWriter(store), ResultReader(store)
    assert writer.done_sync("job-1", 1)
    assert writer.done_sync("job-1", 1)  # the same again: a reply was lost
    assert not writer.error_sync("job-1", "cancelled")
    assert wait(reader).content == 1
    assert not writer.done_sync("job-1", 2)
    with pytest.raises(AlreadyTaken):
        wait(reader)
    assert reader.forget_sync("job-1")
    assert not reader.forget_sync("job-1")
    assert writer.done_sync("job-1", 2)
    assert wait(reader).content == 2


def test_an_acknowledged_result_is_deleted_only_if_it_is_the_one_that_was_read(
    store: Store, wait: Wait
) -> None:
    writer, reader = ResultWriter(store), ResultReader(store)
    written(store, 1)
    first = wait(reader, mode="acknowledge")
    again = wait(reader, mode="acknowledge")  # nothing was committed: it comes again
    assert (first.content, again.content) == (1, 1)
    assert first.ack_sync()
    assert not again.ack_sync()
    assert writer.done_sync("job-1", 2)
    assert not first.ack_sync()
    assert run(_acked(wait(reader, mode="acknowledge")))


async def _acked(result: Result) -> bool:
    return await result.ack()


def test_C82_C83_a_wait_has_a_cap_and_ends_at_it(store: Store, wait: Wait) -> None:
    before = time.monotonic()
    with pytest.raises(ResultTimeout) as caught:
        wait(ResultReader(store), timeout=0.05)
    assert time.monotonic() - before < 3
    assert (caught.value.timeout, caught.value.store_errors) == (0.05, 0)
    assert isinstance(caught.value, TimeoutError)
    assert classify(caught.value).outcome is Outcome.UNKNOWN
    for bad in (None, True, -1, 0, float("nan"), float("inf"), "5"):
        with pytest.raises(ValueError, match="timeout takes"):
            wait(ResultReader(store), timeout=bad)
    with pytest.raises(TypeError):
        ResultReader(store).wait_sync("job-1", step="s", server="x")  # type: ignore[call-arg]


def test_a_deadline_in_force_shortens_the_wait(store: Store, wait: Wait) -> None:
    with deadline(0.1), pytest.raises(ResultTimeout):
        wait(ResultReader(store), timeout=600.0)


@pytest.mark.parametrize("mode", MODES)
def test_C74_a_lost_nudge_is_made_up_for_by_a_poll(redis_url: str, wait: Wait, mode: str) -> None:
    client = redis.Redis.from_url(redis_url)
    payload = b'{"status": "error", "message": "bad input"}'
    timer = threading.Timer(0.3, client.set, (KEY, payload), {"ex": 60})  # and no PUBLISH
    timer.start()
    with pytest.raises(StepFailed, match="bad input"):
        wait(ResultReader(RedisStore(redis_url, "tests")), mode=mode, timeout=30.0)
    timer.join()


@pytest.mark.parametrize("mode", MODES)
def test_a_producer_in_any_language_needs_two_commands(
    redis_url: str, wait: Wait, mode: str
) -> None:
    client = redis.Redis.from_url(redis_url)

    def produce() -> None:
        wait_until(lambda: client.pubsub_numsub("nudge.job-1")[0][1] == 1)
        client.execute_command(
            "SET", "out/job-1", '{"status": "done", "content": {"n": 1}, "v": 2}', "EX", "60"
        )
        client.execute_command("PUBLISH", "nudge.job-1", "anything")

    producer = threading.Thread(target=produce)
    producer.start()
    reader = ResultReader(RedisStore(redis_url), "out/{job_id}", "nudge.{job_id}")
    assert wait(reader, mode=mode, timeout=20.0).content == {"n": 1}
    producer.join()
    wait_until(lambda: client.pubsub_numsub("nudge.job-1")[0][1] == 0)


def test_what_the_writer_writes_is_the_documented_envelope(redis_url: str) -> None:
    store = RedisStore(redis_url, "tests")
    client = redis.Redis.from_url(redis_url)
    writer = ResultWriter(store, ttl=60)
    writer.done_sync("a", [1])
    writer.error_sync("b", "no", retryable=False)
    writer.error_sync("c", "no")
    stored = [json.loads(client.get(f"tests:result:{job}")) for job in "abc"]  # type: ignore[arg-type]
    assert stored == [
        {"status": "done", "content": [1]},
        {"status": "error", "message": "no", "retryable": False},
        {"status": "error", "message": "no"},
    ]
    assert 0 < client.ttl("tests:result:a") <= 60


def test_a_cancelled_wait_takes_a_last_look(redis_url: str) -> None:
    store = RedisStore(redis_url, "tests")
    client = redis.Redis.from_url(redis_url)

    async def cancelled(payload: bytes | None) -> Any:
        wait = asyncio.ensure_future(
            ResultReader(store).wait("job-1", step="s", server="x", timeout=60.0)
        )
        await until(lambda: client.pubsub_numsub(KEY)[0][1] == 1)
        if payload:
            client.set(KEY, payload, ex=60)  # no nudge
        wait.cancel()
        return await asyncio.gather(wait, return_exceptions=True)

    assert isinstance(run(cancelled(None))[0], asyncio.CancelledError)
    assert run(cancelled(b'{"status": "done", "content": 3}'))[0].content == 3
    client.delete(KEY)
    failed = run(cancelled(b'{"status": "error", "message": "no"}'))[0]
    assert isinstance(failed, StepFailed)
    client.delete(KEY)


def test_a_timeout_around_a_wait_gets_the_result_that_did_arrive(redis_url: str) -> None:
    store = RedisStore(redis_url, "tests")
    client = redis.Redis.from_url(redis_url)

    async def bounded() -> Any:
        async with asyncio.timeout(1.0):
            wait = ResultReader(store).wait("job-1", step="s", server="x", timeout=60.0)
            asyncio.get_running_loop().call_later(
                0.9, lambda: client.set(KEY, b'{"status": "done", "content": 3}', ex=60)
            )
            return await wait

    assert run(bounded()).content == 3


def test_many_waiters_share_one_subscription_and_leave_none(own_server: OwnServer) -> None:
    server = own_server()
    store = RedisStore(server.url, "tests")
    client = server.client()

    async def many() -> None:
        reader = ResultReader(store)
        waits = [
            asyncio.ensure_future(
                reader.wait(f"job-{n % 20}", step="s", server="x", timeout=30.0, mode="acknowledge")
            )
            for n in range(400)
        ]
        await until(lambda: len(client.pubsub_channels("tests:result:*")) == 20)
        assert len(client.client_list(_type="pubsub")) == 1
        for n in range(20):
            await ResultWriter(store).done(f"job-{n}", n)
        results = await asyncio.gather(*waits)
        assert [result.content for result in results] == [n % 20 for n in range(400)]
        await until(lambda: client.pubsub_channels("tests:result:*") == [])

    run(many())


def test_terminal_errors_survive_wrapping_pickling_and_groups() -> None:
    raw = b"SECRET \xff"
    protocol = ProtocolError("render", "gpu-1", "not_json", raw)
    for error in (StepFailed("render", "gpu-1", "no", None), protocol, AlreadyTaken("job-1")):
        assert is_terminal(error)
        copy = pickle.loads(pickle.dumps(error))
        assert is_terminal(copy)
        assert copy.__dict__ == error.__dict__
        try:
            try:
                raise error
            except Exception as cause:
                raise RuntimeError("wrapped") from cause
        except RuntimeError as wrapped:
            assert is_terminal(wrapped)
            assert is_terminal(ExceptionGroup("all", [ValueError(), wrapped]))
    assert not is_terminal(ResultTimeout("job-1", 5.0))
    assert not is_terminal(ValueError())
    loop = ValueError()
    loop.__cause__ = KeyError()
    loop.__cause__.__cause__ = loop
    assert not is_terminal(loop)
    for shown in (str(protocol), repr(protocol), repr(protocol.args), f"{protocol}"):
        assert "SECRET" not in shown
    assert protocol.raw == raw


@pytest.mark.parametrize("value", [object(), {1, 2}.__iter__(), "\ud800"])
def test_content_that_is_no_json_is_refused_before_it_is_written(store: Store, value: Any) -> None:
    with pytest.raises(NotEncodable):
        ResultWriter(store).done_sync("job-1", value)
    assert not ResultReader(store).forget_sync("job-1")


def test_names_that_cannot_be_used_are_refused_early(store: Store) -> None:
    for bad in ("fixed", "", "{job}"):
        with pytest.raises(ValueError, match="key takes"):
            ResultReader(store, bad)
        with pytest.raises(ValueError, match="channel takes"):
            ResultWriter(store, None, bad)
    with pytest.raises(ValueError, match="less than"):
        ResultReader(store, max_size=0)
    reader = ResultReader(store)
    for job_id in ("", "x" * 513, "\ud800"):
        with pytest.raises(ValueError, match="job_id takes"):
            reader.wait_sync(job_id, step="s", server="x", timeout=1.0)
    with pytest.raises(ValueError, match="mode takes"):
        reader.wait_sync("a", step="s", server="x", timeout=1.0, mode="read")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        reader.wait_sync(b"a", step="s", server="x", timeout=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ResultWriter(store).error_sync("a", b"x")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ResultWriter(store).error_sync("a", "x", retryable="no")  # type: ignore[arg-type]


@given(st.one_of(st.binary(max_size=200), st.text(max_size=50).map(str.encode), JSON))
def test_whatever_a_producer_writes_a_reader_ends_by_the_allow_list(payload: bytes) -> None:
    try:
        content = envelopes.opened(payload, "step", "server")
    except (StepFailed, ProtocolError) as error:
        assert error.step == "step"
        return
    envelope = json.loads(payload)
    assert envelope["status"] == "done"
    assert envelope.get("content") == content


@given(st.integers(0, 60), st.integers(0, 255))
def test_a_damaged_envelope_is_never_a_success_with_another_status(at: int, byte: int) -> None:
    payload = bytearray(envelopes.error("no", retryable=True))
    payload[at % len(payload)] = byte
    with pytest.raises((StepFailed, ProtocolError)):
        envelopes.opened(bytes(payload), "step", "server")
