"""Every decoder against hostile bytes: random ones, and valid ones that were cut, changed, mixed.

What is read back is the whole of what was written, or it is refused by the error that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import hiredis
import msgspec
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from retrysafe import commands as c
from retrysafe import errors, keys, retry_after
from retrysafe.answers import classify_status, header
from retrysafe.codec import NO_ANNOTATION, codec_for
from retrysafe.commands import Answer, Reply
from retrysafe.decorators import idempotent
from retrysafe.desks import async_desk_for
from retrysafe.kept_errors import KeptErrors
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.middleware.response_record import StoredResponse, decode, encode, replay_messages
from retrysafe.outcomes import Classification
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Held, Receipts
from retrysafe.records import (
    LATEST,
    NO_KEYS,
    AbandonedReceipt,
    CorruptRecord,
    Record,
    Running,
    encode_done,
    encode_running,
)
from retrysafe.records import decode as decode_record
from retrysafe.stores import Store
from retrysafe.stores.base import named
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.wire import Wire
from retrysafe.values import replace
from tests.asgi import Exchange, http_scope, post
from tests.receipting import CALL, ONE, held, policy
from tests.support import collector_held, run, until

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
_calls = itertools.count()

# Valid values

IDS = st.text(st.characters(min_codepoint=0, max_codepoint=127), max_size=255)
FENCES = st.integers(1, LATEST - 1)
SIXTEEN = st.binary(min_size=16, max_size=16)
PRINTS = st.sampled_from([ONE, keys.fingerprint("body", b"two"), keys.NO_FINGERPRINT])
PAYLOADS = st.none() | st.binary(max_size=100)

done = st.builds(Record, PRINTS, SIXTEEN, FENCES, IDS, PAYLOADS).map(encode_done)
running = st.builds(
    Running,
    fingerprint=PRINTS,
    token=SIXTEEN,
    fence=FENCES,
    request_id=IDS,
    lease_end=st.sampled_from([1, LATEST]),
    interrupted=st.booleans(),
    previous=st.none() | st.builds(AbandonedReceipt, st.just(""), st.just(""), FENCES, IDS),
    inboxes=st.lists(SIXTEEN, max_size=3).map(tuple),
).map(encode_running)


def hostile(valid: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes of all kinds, most of them near to valid ones."""

    @st.composite
    def changed(draw: Any) -> bytes:
        data = bytearray(draw(valid))
        for _ in range(draw(st.integers(0, 3))):
            if not data:
                break
            at = draw(st.integers(0, len(data) - 1))
            match draw(st.sampled_from(["bit", "byte", "cut", "drop", "insert", "double"])):
                case "bit":
                    data[at] ^= 1 << draw(st.integers(0, 7))
                case "byte":
                    data[at] = draw(st.integers(0, 255))
                case "cut":
                    del data[at:]
                case "drop":
                    del data[at]
                case "insert":
                    data[at:at] = draw(st.binary(min_size=1, max_size=20))
                case "double":
                    data += bytes(data)
        return bytes(data)

    def crossed(pair: tuple[bytes, bytes, int]) -> bytes:
        return pair[0][: pair[2]] + pair[1][pair[2] :]

    return (
        st.binary(max_size=200)
        | changed()
        | st.tuples(valid, valid, st.integers(0, 100)).map(crossed)
        | st.tuples(st.binary(max_size=4), st.integers(0, 50_000)).map(
            lambda each: each[0] * each[1]
        )
    )


receipts_bytes = hostile(done | running)
NEAR_RUNNING = [
    b"r1R" + b"t" * 16 + fence + ONE + lease + b"0" * 16 + b"\0\0"
    for fence in (b"%016d" % 5, b"             inf", b"0x1f            ", b"9" * 16, b"\xb2" * 16)
    for lease in (b"%016d" % 1, b"             nan", b"             inf", b"1e15            ")
] + [b"r1R" + b"t" * 16 + b"%016d" % 5 + ONE + b"%016d" % 1 + b"0" * 16 + b"\0\1x"]


# The stored receipt


@FUZZ
@given(receipts_bytes | st.sampled_from(NEAR_RUNNING))
def test_a_stored_receipt_is_read_whole_or_refused(value: bytes) -> None:
    try:
        found = decode_record(value)
    except CorruptRecord:
        return
    if isinstance(found, Record):
        again = encode_done(found)
        assert again == (value if value[2:3] == b"D" else value[: len(again)])
    else:
        assert encode_running(found) == value


def raw(store: Store, value: bytes | None = None) -> bytes | None:
    """Lay bytes where the receipt of CALL lies, or read them."""
    digest = keys.digest(store.namespace, CALL.scope, CALL.key)
    if isinstance(store, MemoryStore):
        if value is not None:
            store.put(digest, value, 60_000)
        found = store._values.get(digest)
        return found[0] if found else None
    door: Any = store.open()
    name = f"{store.namespace}:r:{digest.hex()}"
    with contextlib.closing(door):
        if value is not None:
            door.command("SET", name, value, "PX", 60_000)
        return bytes(door.command("GET", name))


@pytest.fixture
def doors(redis_url: str) -> Iterator[Callable[[bytes], list[tuple[Any, Callable[[], Any]]]]]:
    """Both stores with the same bytes as the receipt `k`: a door, and what lies there now."""
    shared = RedisStore(redis_url, "fuzz").open()
    name = b"fuzz:r:" + (b"k" * 16).hex().encode()

    def laid(value: bytes) -> list[tuple[Any, Callable[[], Any]]]:
        memory = MemoryStore("fuzz")
        memory.put(b"k" * 16, value, 60_000)
        shared.command("SET", name, value, "PX", 60_000)

        def in_memory() -> bytes | None:
            found = memory._values.get(b"k" * 16)
            return found[0] if found else None

        return [(memory.open(), in_memory), (shared, lambda: shared.command("GET", name))]

    yield laid
    shared.close()


def readable(value: bytes) -> Record | Running | None:
    try:
        return decode_record(value)
    except CorruptRecord:
        return None


def test_both_stores_refuse_the_same_bytes_and_overwrite_none_of_them(
    doors: Callable[[bytes], list[tuple[Any, Callable[[], Any]]]],
) -> None:
    @settings(FUZZ, max_examples=400)
    @given(
        value=receipts_bytes | st.sampled_from(NEAR_RUNNING),
        take_over=st.booleans(),
        fingerprint=PRINTS,
        inbox=st.sampled_from([b"", b"i" * 16]),
    )
    def check(value: bytes, take_over: bool, fingerprint: bytes, inbox: bytes) -> None:
        assume(value)
        begin = c.Begin(b"k" * 16, b"o" * 16, fingerprint, 10**7, 60_000, inbox, take_over, "own")
        answers = []
        for door, lying in doors(value):
            looked = door.execute(c.Look(b"k" * 16))
            assert lying() == value
            begun = door.execute(begin)
            if readable(value) is None:
                # Not taken, not changed. Where it lies about being done, the flow reads it anew.
                assert begun.answer in (Answer.CORRUPT, Answer.DONE, Answer.MISMATCH)
                assert begun.answer is not Answer.DONE or begun.value == value
                assert looked.answer in (Answer.CORRUPT, Answer.DONE)
                assert lying() == value
                continue
            answers.append((looked.answer, begun.answer))
            if begun.answer is Answer.CORRUPT:  # the next owner's fence could not be read
                assert readable(value).fence == LATEST  # type: ignore[union-attr]
                assert lying() == value
            if begun.answer is Answer.OK:
                taken = decode_record(lying())
                assert isinstance(taken, Running)
                assert (taken.token, taken.fence) == (b"o" * 16, begun.number)
                assert begun.value == (lying() if taken.previous else b"")
                assert taken.fence > readable(value).fence  # type: ignore[union-attr]
        assert len(set(answers)) <= 1, answers

    check()


AT_THE_END = encode_running(Running(b"f" * 16, b"t" * 16, LATEST, "", 0, False, None, ()))


@settings(FUZZ, max_examples=300)
@given(
    value=receipts_bytes | st.sampled_from(NEAR_RUNNING), wants=st.sampled_from(["rerun", "refuse"])
)
@example(value=AT_THE_END, wants="rerun")
def test_a_call_meets_hostile_bytes_and_never_runs_for_them(value: bytes, wants: str) -> None:
    store = MemoryStore("fuzz")
    raw(store, value)
    valid = readable(value)
    try:
        got = Receipts(store, policy(wait=0, on_abandoned=wants)).begin(CALL)
    except errors.RecordCorrupt:
        assert (
            valid is None or valid.fence == LATEST or (isinstance(valid, Record) and valid.sealed)
        )
    except errors.FingerprintMismatch:
        assert valid is not None
    except errors.InFlight:
        assert isinstance(valid, Running)
    except errors.Abandoned:
        assert isinstance(valid, Running)
        assert wants == "refuse"
    else:
        if isinstance(got, Record):
            assert got == valid
        else:
            assert isinstance(valid, Running)
            assert wants == "rerun"
            got.release()


# Script replies

reply_parts = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=10)
    | st.builds(hiredis.ReplyError, st.text(max_size=10))
)
replies = (
    st.recursive(
        reply_parts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    )
    | st.lists(reply_parts, min_size=3, max_size=3)
    | st.from_regex(rb"r1[0-9]{0,18}\Z")
)


@FUZZ
@given(replies)
def test_a_reply_of_a_script_is_read_or_the_store_is_unavailable(raw: Any) -> None:
    try:
        reply = Wire.unpack(raw)
    except errors.StoreUnavailable:
        return
    if isinstance(raw, bytes):  # the short form
        assert len(raw) in (3, 19)
        raw = [raw[2] - 48, int(raw[3:] or b"0"), b""]
    assert [reply.answer.value, reply.number, reply.value] == list(raw)


class Lying:
    """A store whose replies are any that the types allow."""

    namespace, url = "fuzz", "memory://"

    def __init__(self, replies: list[Reply]) -> None:
        self._replies = iter(replies)

    def open(self) -> Any:
        return self

    def execute(self, command: c.Command, end: float | None = None) -> Reply:
        if isinstance(command, c.Begin | c.Finish | c.Look):
            return next(self._replies, Reply(Answer.CORRUPT))
        return Reply(Answer.OK)

    def execute_many(self, commands: Any) -> list[Reply]:
        return [Reply(Answer.REFUSED) for _ in commands]

    def listen(self, inbox: bytes, on_message: Any, limit: float) -> bool:
        return False


@settings(FUZZ, max_examples=300)
@given(
    st.lists(
        st.builds(Reply, st.sampled_from(Answer), st.integers(-5, 10**6), receipts_bytes),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_a_store_replies_a_call_ends_with_an_answer_or_an_error_of_ours(
    replies: list[Reply],
) -> None:
    receipts = Receipts(Lying(replies), policy(wait=0, lease=0.1))  # type: ignore[arg-type]
    try:
        got = receipts.begin(CALL)
        if isinstance(got, Held):
            won = got.finish(b"own", 60)
            assert won is None or isinstance(won, Record)
    except errors.ReceiptError as error:
        assert NO_KEYS not in str(error) or any(b"\xc1sealed" in each.value for each in replies)


# Inbox messages


@FUZZ
@given(st.none() | st.binary(max_size=200))
def test_a_message_names_a_receipt_or_nothing(message: bytes | None) -> None:
    heard: list[tuple[bytes, bytes]] = []
    named(lambda digest, value: heard.append((digest, value)))(message)
    assert b"".join(heard[0]) == (message or b"")


def test_hostile_messages_neither_answer_nor_fail_a_waiter(redis_url: str) -> None:
    """Garbage in the inbox is a reason to look; the store has the word."""

    @settings(FUZZ, max_examples=25)
    @given(st.lists(receipts_bytes, min_size=1, max_size=20))
    def check(values: list[bytes]) -> None:
        call = replace(CALL, key=f"hostile-{next(_calls)}")

        async def main() -> None:
            store = RedisStore(redis_url, "fuzz")
            first = await held(AsyncReceipts(RedisStore(redis_url, "fuzz"), policy()), call)
            waiter = asyncio.create_task(AsyncReceipts(store, policy()).begin(call))
            desk = async_desk_for(store, MAX_WAITERS)
            await until(lambda: desk.listening)
            digest = bytes.fromhex(first.name)
            door: Any = store.open_async()
            for value in values:
                # Not what a writer of Redis could say anyway: that it is done.
                if not isinstance(readable(value), Record):
                    await door.command("PUBLISH", b"fuzz:i:" + desk.inbox, digest + value)
                    await door.command("PUBLISH", b"fuzz:i:" + desk.inbox, value)
            await first.finish(b"true", 60)
            got = await waiter
            assert isinstance(got, Record)
            assert got.payload == b"true"
            await door.close()

        run(main())

    check()


# Stored responses

stored_responses = st.builds(
    encode,
    st.integers(100, 599),
    st.lists(st.tuples(st.binary(max_size=10), st.binary(max_size=10)), max_size=3),
    st.binary(max_size=50),
    st.lists(st.tuples(st.binary(max_size=10), st.binary(max_size=10)), max_size=2),
    st.just(b"x-request-id"),
)


@FUZZ
@given(hostile(stored_responses), st.sampled_from(["POST", "HEAD"]), st.booleans())
@example(b"\x95\xcc\xc8\x90\xc4\x00\x90" + b"\x91" * 100_000, "POST", True)
@example(b"\x94\xcc\xc8\xdd\xff\xff\xff\xff", "POST", True)
@example(b"\x94\xcf" + b"\xff" * 8 + b"\x90\xc4\x00\x90", "POST", True)
@example(b"\x94\xd3" + b"\xff" * 8 + b"\x90\xc4\x00\x90", "POST", True)
def test_a_stored_response_is_one_or_refused(payload: bytes, method: str, trailers: bool) -> None:
    try:
        stored = decode(payload)
    except CorruptRecord:
        return
    assert isinstance(stored, StoredResponse)
    start, body, *rest = replay_messages(stored, "req-1", method, trailers)
    assert 100 <= start["status"] <= 999
    assert all(type(n) is bytes and type(v) is bytes for n, v in start["headers"])
    assert type(body["body"]) is bytes
    assert len(rest) <= 1


@settings(FUZZ, max_examples=150)
@given(hostile(stored_responses))
def test_a_request_whose_record_is_hostile_is_answered_and_not_run(payload: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("run for a record that can't be read")

    async def main() -> None:
        store = MemoryStore("fuzz")
        target = IdempotencyMiddleware(app, store=store)
        fingerprint = keys.RequestFingerprint("POST", b"/", b"")
        call = replace(CALL, scope="", fingerprint=fingerprint.finish())
        value = encode_done(Record(call.fingerprint, b"t" * 16, 1, "", payload))
        store.put(keys.digest("fuzz", "", call.key), value, 60_000)
        answer = await post(target)
        # Replayed (a stored 503 as well), or refused as a problem.
        refused = answer.header("content-type") == "application/problem+json"
        assert answer.replayed or (refused and answer.status == 503)

    asyncio.run(main())


# Results of functions


class Point(msgspec.Struct):
    x: int
    tags: list[str] = []


@dataclass
class Order:
    number: Decimal
    when: dt.datetime
    parts: list[tuple[int, bytes]]
    notes: dict[str, Any]
    at: Point | None = None


RESULTS: dict[Any, st.SearchStrategy[Any]] = {
    NO_ANNOTATION: st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    int: st.integers(),
    Order: st.builds(
        Order,
        st.decimals(allow_nan=False),
        st.datetimes(),
        st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=5)), max_size=2),
        st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
        st.none() | st.builds(Point, st.integers(0, 9)),
    ),
    str | dt.date | Point: st.text(max_size=5) | st.dates() | st.builds(Point, st.integers(0, 9)),
}
DEEP = [
    tag + opening * 5_000
    for tag in (b"m", b"j", b"p", b"u\x00m", b"u\x01j", b"e", b"c")
    for opening in (b"\x91", b"[", b'{"a":', b"\x81\xa1a", b"\xdd\xff\xff\xff\xff")
]


@pytest.mark.parametrize("annotation", RESULTS, ids=["any", "int", "struct", "union"])
def test_a_stored_result_is_of_its_type_or_refused(annotation: Any) -> None:
    codec = codec_for(annotation)

    def packed(value: Any) -> bytes:
        with contextlib.suppress(errors.NotEncodable):
            return codec.pack(value)[0]
        return b""

    @settings(FUZZ, max_examples=300)
    @given(hostile(RESULTS[annotation].map(packed)) | st.sampled_from(DEEP))
    def check(data: bytes) -> None:
        try:
            value = codec.unpack(data)
        except errors.NotEncodable as error:
            assert error.__suppress_context__ or error.__context__ is None
            return
        if annotation is int:
            assert type(value) is int
        elif annotation is Order:
            assert type(value) is Order
            assert type(value.number) is Decimal
        elif annotation is not NO_ANNOTATION:
            assert type(value) in (str, dt.date, Point)

    check()


class Declined(Exception):
    def __init__(self, code: str, amount: Decimal) -> None:
        super().__init__(code, amount)
        self.code = code


kept = KeptErrors((Declined, OSError))
kept_bytes = st.builds(
    Declined, st.text(max_size=5), st.decimals(allow_nan=False, allow_infinity=False)
).map(kept.pack) | st.builds(OSError, st.integers(0, 200), st.text(max_size=5)).map(kept.pack)


def msgpack(tree: Any) -> bytes:
    return b"e" + msgspec.msgpack.encode(tree)


NAME = f"{Declined.__module__}.Declined"
TREES = [
    msgpack([NAME, "ab", ["dict", []]]),
    msgpack([NAME, ["tuple", ["a", "b"]], ["dict", [[1, 2]]]]),
    msgpack([NAME, ["list", ["a", "b"]], ["dict", []]]),
    msgpack([NAME, ["tuple", [["int", "9" * 10_000], 1]], ["dict", []]]),
    msgpack([NAME, ["set", [["list", []]]], ["dict", []]]),
    msgpack(["builtins.SystemExit", ["tuple", [1]], ["dict", []]]),
    msgpack(["os.system", ["tuple", ["true"]], ["dict", []]]),
    b"e\x93" + msgspec.msgpack.encode(NAME) + b"\x92\xa5tuple\x91" * 5_000,
]


@FUZZ
@given(hostile(kept_bytes) | st.sampled_from(TREES) | st.sampled_from(DEEP))
def test_a_kept_error_is_one_of_those_named_or_refused(data: bytes) -> None:
    try:
        error = kept.unpack(data)
    except errors.NotEncodable as refused:
        assert refused.__suppress_context__
        return
    assert isinstance(error, Declined | OSError)
    assert type(error.args) is tuple
    assert all(type(name) is str for name in vars(error))


@settings(FUZZ, max_examples=150)
@given(hostile(kept_bytes) | st.sampled_from(TREES) | st.sampled_from(DEEP))
def test_a_function_whose_record_is_hostile_raises_and_is_not_run(payload: bytes) -> None:
    store = MemoryStore("fuzz")

    @idempotent(key="n", namespace="hostile", store=store, keep_errors=Declined)
    def work(n: int) -> int:
        raise AssertionError("run")

    @idempotent(key="n", namespace="hostile", store=store, keep_errors=Declined)
    def first(n: int) -> int:
        return n

    first.__wrapped__.__qualname__ = work.__wrapped__.__qualname__
    with contextlib.suppress(AssertionError):
        work(1)
    digests = list(store._values)
    assert not digests  # it was released; find its name by a look at what a run writes
    first(1)
    for digest, (value, _) in list(store._values.items()):
        record = decode_record(value)
        assert isinstance(record, Record)
        store.put(digest, encode_done(replace(record, payload=payload)), 60_000)
    try:
        assert type(first(1)) is int
    except (errors.RecordCorrupt, Declined):
        return


# What clients and other services send


@FUZZ
@given(st.lists(st.binary(max_size=300) | st.text(max_size=300), max_size=3))
def test_a_key_is_taken_or_refused_without_repeating_it(values: list[bytes | str]) -> None:
    try:
        key = keys.parse_key(values)
    except errors.KeyInvalid as error:
        for value in values:
            text = value.decode("latin-1") if isinstance(value, bytes) else value
            assert len(text) < 12 or text not in str(error)
        return
    assert 1 <= len(key) <= keys.MAX_KEY_LENGTH
    assert key.isascii()
    quoted = key.replace("\\", "\\\\").replace('"', '\\"')
    assert keys.parse_key([f'"{quoted}"']) == key


LENGTHS = st.sampled_from(
    ["9" * 5000, "18446744073709551616", "-1", "+5", "1_0", "\xb2", "0x10", ""]
)


@settings(FUZZ, max_examples=50)
@given(LENGTHS | st.text(st.characters(max_codepoint=255), max_size=30))
@example("9" * 5000)
def test_no_content_length_makes_the_middleware_raise(length: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        target = IdempotencyMiddleware(app, store=MemoryStore())
        headers = [("Idempotency-Key", "k"), ("Content-Length", length)]
        answer = await Exchange(target, http_scope(headers=headers), [b"x"]).run()
        assert answer.status in (200, 413)

    asyncio.run(main())


@FUZZ
@given(st.text(max_size=60) | st.binary(max_size=60), st.floats(0, 1e11))
@example("9" * 10_000, 0.0)
@example("Sun, 31 Feb 2025 99:99:99 GMT", 0.0)
@example("Sunday, 06-Nov-94 08:49:37 GMT", 2.5e11)
def test_a_retry_after_is_a_wait_or_none(text: str | bytes, now: float) -> None:
    wait = retry_after.parse(text, now)
    assert wait is None or 0 <= wait <= retry_after.LARGEST


class Response:
    def __init__(self, content: bytes) -> None:
        self._content = content


@FUZZ
@given(
    st.integers(400, 599),
    st.lists(
        st.tuples(
            st.sampled_from(["Retry-After", "should-retry", "Content-Type"]),
            st.text(max_size=10) | st.sampled_from(["application/problem+json", "true", "1"]),
        ),
        max_size=4,
    ),
    st.binary(max_size=60)
    | st.sampled_from([b"[" * 60_000, b'{"retryable":' * 4_000, b"9" * 9_000]),
)
def test_an_answer_of_another_service_is_classified_whatever_it_says(
    status: int, headers: list[tuple[str, str]], content: bytes
) -> None:
    with collector_held():
        found = classify_status(status, headers, Response(content))
    assert isinstance(found, Classification)
    header(headers, "retry-after")
