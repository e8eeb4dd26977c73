"""Results that are encrypted at rest: what lies in the store, who can read it, what is refused."""

from __future__ import annotations

import asyncio
import base64
import pickle
import subprocess
import sys
import time
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from retrysafe import commands as c
from retrysafe import errors, keys
from retrysafe.decorators import idempotent
from retrysafe.desks import async_desk_for
from retrysafe.encryption_keys import EncryptionKeys
from retrysafe.errors import RecordCorrupt, RecordSealed, SettingsError
from retrysafe.events import Event, listening
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import MAX_WAITERS, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record, decode, encode_done
from retrysafe.settings import Settings
from retrysafe.stores import Store, open_store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import SealedStore
from tests.asgi import post
from tests.receipting import CALL, ONE, held, policy
from tests.stores.test_stores import MemoryMachine
from tests.support import run, until


def key(first: int) -> str:
    return base64.b64encode(bytes(range(first, first + 32))).decode()


OLD, NEW = key(0), key(100)
CANARY = b"canary-7d1f" * 20


def digest(call: Call = CALL, namespace: str = "tests") -> bytes:
    return keys.digest(namespace, call.scope, call.key)


def raw_of(store: Store, call: Call = CALL) -> bytes:
    """The bytes that lie in the store, seals and all."""
    reply = store.open().execute(c.Look(digest(call)))
    assert reply.answer is c.Answer.DONE
    return reply.value


def put(store: Store, value: bytes, call: Call = CALL) -> None:
    """Lay bytes where a receipt lies."""
    if isinstance(store, MemoryStore):
        store.put(digest(call), value, 60_000)
    else:
        with redis.Redis.from_url(store.url) as client:
            client.set(f"tests:r:{digest(call).hex()}", value, px=60_000)


def finished(store: Store, payload: bytes | None = CANARY, call: Call = CALL) -> None:
    got = Receipts(store, policy()).begin(call)
    assert isinstance(got, Held)
    assert got.finish(payload, 60) is None


def answered(store: Store, call: Call = CALL) -> Record:
    """What a retry is answered from; a second execution fails here."""
    got = Receipts(store, policy()).begin(call)
    assert isinstance(got, Record), "the work would have been run again"
    return got


def test_a_result_lies_encrypted_and_comes_back_as_it_was(store: Store) -> None:
    finished(SealedStore(store, NEW))
    lying = raw_of(store)
    assert CANARY[:11] not in lying
    assert answered(SealedStore(store, NEW)).payload == CANARY
    assert len(lying) == len(encode_done(answered(SealedStore(store, NEW)))) + 40


def test_async_a_result_lies_encrypted_and_comes_back_as_it_was(store: Store) -> None:
    async def main() -> None:
        sealed = SealedStore(store, NEW)
        await (await held(AsyncReceipts(sealed, policy()))).finish(CANARY, 60)
        got = await AsyncReceipts(sealed, policy()).begin(CALL)
        assert isinstance(got, Record)
        assert got.payload == CANARY
        looked = await AsyncReceipts(sealed, policy()).look(CALL)
        assert looked == got

    run(main())
    assert CANARY[:11] not in raw_of(store)


def test_two_results_alike_lie_as_different_bytes(store: Store) -> None:
    sealed = SealedStore(store, NEW)
    other = Call("another", CALL.scope, ONE)
    finished(sealed)
    finished(sealed, call=other)
    assert raw_of(store)[-40:] != raw_of(store, other)[-40:]


@pytest.mark.parametrize("payload", [None, b"", b"\xc1", b"x" * 200_000])
def test_every_payload_comes_back(store: Store, payload: bytes | None) -> None:
    for ring in (NEW, f"plain,{NEW}"):
        call = Call(ring, "s", ONE)
        finished(SealedStore(store, ring), payload, call)
        assert answered(SealedStore(store, ring), call).payload == payload


def test_a_waiter_gets_the_result_and_nobody_else_who_listens(redis_url: str) -> None:
    store = RedisStore(redis_url, "tests")
    with redis.Redis.from_url(redis_url) as client, client.pubsub() as ears:
        ears.psubscribe("*")
        assert ears.get_message(timeout=5) is not None

        async def main() -> None:
            sealed = SealedStore(store, NEW)
            first = await held(AsyncReceipts(SealedStore(store, NEW), policy()))
            waiter = asyncio.create_task(AsyncReceipts(sealed, policy()).begin(CALL))
            await until(lambda: async_desk_for(sealed, MAX_WAITERS).listening)
            await first.finish(CANARY, 60)
            got = await waiter
            assert isinstance(got, Record)
            assert got.payload == CANARY

        run(main())
        heard = ears.get_message(timeout=5)
        assert heard is not None
        assert heard["data"][:16] == digest()
        assert len(heard["data"]) > len(CANARY)  # it rode along
        assert CANARY[:11] not in heard["data"]


def test_sync_a_waiter_gets_the_result(store: Store) -> None:
    first = Receipts(SealedStore(store, NEW), policy()).begin(CALL)
    assert isinstance(first, Held)
    second = SealedStore(store, NEW)
    heard: list[tuple[bytes, bytes]] = []
    door = second.open()
    assert door.listen(b"i" * 16, lambda name, value: heard.append((name, value)), 5)
    begin = c.Begin(digest(), b"t" * 16, ONE, 30_000_000, 60_000, b"i" * 16, True, "")
    assert door.execute(begin).answer is c.Answer.RUNNING
    first.finish(CANARY, 60)

    async def arrived() -> None:
        await until(lambda: bool(heard))

    run(arrived())
    record = decode(heard[0][1])
    assert isinstance(record, Record)
    assert record.payload == CANARY
    door.close()


def test_a_forged_message_is_no_result_but_a_reason_to_look(redis_url: str) -> None:
    """Whoever may publish can't answer a waiter."""

    async def main() -> None:
        store = RedisStore(redis_url, "tests")
        sealed = SealedStore(store, NEW)
        first = await held(AsyncReceipts(SealedStore(store, NEW), policy()))
        waiter = asyncio.create_task(AsyncReceipts(sealed, policy()).begin(CALL))
        desk = async_desk_for(sealed, MAX_WAITERS)
        await until(lambda: desk.listening)
        forged = encode_done(Record(ONE, b"f" * 16, 1, "", b"forged"))
        with redis.Redis.from_url(redis_url) as client:
            assert client.publish(b"tests:i:" + desk.inbox, digest() + forged) == 1
            # Its own words come after the forged ones, on the same connection.
            await first.finish(b"true", 60)
        got = await waiter
        assert isinstance(got, Record)
        assert got.payload == b"true"

    run(main())


def test_a_record_moved_to_another_key_is_refused_and_stays(store: Store) -> None:
    sealed = SealedStore(store, NEW)
    other = Call("another", CALL.scope, ONE)
    finished(sealed)
    moved = raw_of(store)
    put(store, moved, other)
    with pytest.raises(RecordSealed, match="another receipt's"):
        answered(sealed, other)
    assert raw_of(store, other) == moved


def test_async_a_record_that_cannot_be_opened_is_refused_to_all_who_wait(store: Store) -> None:
    async def main() -> None:
        finished(SealedStore(store, OLD))
        receipts = AsyncReceipts(SealedStore(store, NEW), policy())
        got = await asyncio.gather(
            *(receipts.begin(CALL) for _ in range(5)), return_exceptions=True
        )
        assert {type(each) for each in got} == {RecordSealed}
        assert len({str(each) for each in got}) == 1
        with pytest.raises(RecordSealed):
            await receipts.look(CALL)

    run(main())


@settings(max_examples=300, deadline=None)
@given(
    at=st.integers(0, 400),
    by=st.integers(1, 255),
    cut=st.none() | st.integers(0, 400),
    fill=st.binary(max_size=20),
)
def test_a_changed_record_is_never_answered_and_never_run(
    at: int, by: int, cut: int | None, fill: bytes
) -> None:
    store = MemoryStore("tests")
    sealed = SealedStore(store, NEW)
    finished(sealed)
    value = bytearray(raw_of(store))
    value[at % len(value)] ^= by
    if cut is not None:
        value = value[: cut % len(value)] + fill
    put(store, bytes(value))
    try:
        got = answered(sealed)
    except (RecordCorrupt, errors.FingerprintMismatch):
        return
    # The head's state is no secret: who can write there can say "done, not kept", and no more.
    assert got.payload is None


def test_a_key_is_replaced_without_a_result_lost(store: Store) -> None:
    before, both, after = (SealedStore(store, ring) for ring in (OLD, f"{NEW},{OLD}", NEW))
    old, new = Call("old", "s", ONE), Call("new", "s", ONE)
    finished(before, call=old)
    assert answered(both, old).payload == CANARY
    finished(both, call=new)
    assert answered(after, new).payload == CANARY
    with pytest.raises(RecordSealed, match=r"with the key [0-9a-f]{8}, not one of RETRYSAFE_ENC"):
        answered(after, old)
    assert answered(before, old).payload == CANARY  # nothing was overwritten


def test_encryption_is_switched_on_without_a_result_lost(store: Store) -> None:
    rings = (f"plain,{NEW}", f"{NEW},plain", NEW)
    first, second, last = (SealedStore(store, ring) for ring in rings)
    calls = {name: Call(name, "s", ONE) for name in ("before", "first", "second", "last")}
    finished(store, call=calls["before"])
    finished(first, call=calls["first"])
    # A process of before understands what the first step writes, and the first what comes next.
    assert answered(store, calls["first"]).payload == CANARY
    finished(second, call=calls["second"])
    assert answered(first, calls["second"]).payload == CANARY
    assert answered(second, calls["before"]).payload == CANARY
    finished(last, call=calls["last"])
    assert answered(first, calls["last"]).payload == CANARY
    with pytest.raises(RecordSealed, match="does not list the word plain"):
        answered(last, calls["before"])


def test_a_process_without_keys_answers_nothing_from_an_encrypted_record(store: Store) -> None:
    finished(SealedStore(store, NEW))
    with pytest.raises(RecordSealed, match="RETRYSAFE_ENCRYPTION_KEYS is not set"):
        answered(store)
    with pytest.raises(RecordSealed):
        Receipts(store, policy()).look(CALL)


@pytest.mark.parametrize("ring", [None, OLD])
def test_a_request_whose_record_cannot_be_opened_gets_503_and_nothing_runs(
    store: Store, ring: str | None
) -> None:
    runs = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": CANARY})

    async def main() -> None:
        rule = IdempotencyPolicy(on_store_error="run")  # not even then
        writer = IdempotencyMiddleware(app, store=SealedStore(store, NEW), policy=rule)
        assert (await post(writer)).body == CANARY
        again = await post(writer)
        assert (again.replayed, again.body) == (True, CANARY)
        other = store if ring is None else SealedStore(store, ring)
        refused = await post(IdempotencyMiddleware(app, store=other, policy=rule))
        assert refused.status == 503
        assert CANARY not in refused.body

    run(main())
    assert runs == 1


@pytest.mark.parametrize("ring", [None, OLD])
def test_a_function_whose_record_cannot_be_opened_raises_and_is_not_run(
    store: Store, ring: str | None
) -> None:
    runs: list[str] = []

    def decorated(held_in: Store) -> Any:
        @idempotent(key="n", store=held_in, namespace="sealed-work", on_store_error="run")
        def work(n: int) -> dict[str, int]:
            runs.append("sync")
            return {"n": n}

        return work

    assert decorated(SealedStore(store, NEW))(1) == {"n": 1}
    assert decorated(SealedStore(store, NEW))(1) == {"n": 1}
    with pytest.raises(RecordSealed):
        decorated(store if ring is None else SealedStore(store, ring))(1)
    assert runs == ["sync"]


def test_an_owner_fenced_out_by_a_record_it_cannot_open_answers_with_its_own(store: Store) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(SealedStore(store, NEW), policy(wait=20))
        first = await held(receipts)
        foreign = encode_done(Record(ONE, b"f" * 16, 1, "", b"foreign"))
        put(store, foreign)
        began = time.monotonic()
        assert await first.finish(b"own", 60) is None
        assert time.monotonic() - began < 10
        assert raw_of(store) == foreign

    seen: list[Event] = []
    with listening(seen.append):
        run(main())
    reasons = [event.detail for event in seen if event.kind == "record-corrupt"]
    assert any("not encrypted" in reason for reason in reasons)


class SealedMachine(MemoryMachine):
    def make_door(self) -> Any:
        self.now = time.time()
        return SealedStore(MemoryStore(clock=lambda: self.now), NEW).open()


def test_a_sealed_store_agrees_with_the_model() -> None:
    SealedMachine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=50, deadline=None
    )
    SealedMachine.TestCase("runTest").runTest()


# The setting


def test_the_setting_encrypts_what_open_store_opens(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRYSAFE_ENCRYPTION_KEYS", f" {NEW} , {OLD}")
    store = open_store(redis_url, namespace="tests-sealed")
    assert isinstance(store, SealedStore)
    assert open_store(redis_url, namespace="tests-sealed") is store
    assert (store.url, store.namespace) == (redis_url, "tests-sealed")
    finished(store)
    with redis.Redis.from_url(redis_url) as client:
        (name,) = client.keys("tests-sealed:r:*")
        assert CANARY[:11] not in client.get(name)
    assert answered(store).payload == CANARY
    assert isinstance(open_store("memory://", namespace="tests-sealed"), SealedStore)


HEX = bytes(range(50, 82)).hex()
URL_SAFE = base64.urlsafe_b64encode(bytes(range(0xDF, 0xFF))).decode().rstrip("=")


@pytest.mark.parametrize("text", [NEW, HEX, HEX.upper(), URL_SAFE, f"{NEW},plain", f"plain,{HEX}"])
def test_keys_are_taken_in_base64_and_hex(text: str) -> None:
    assert Settings.from_env({"RETRYSAFE_ENCRYPTION_KEYS": text}).encryption_keys == EncryptionKeys(
        text
    )


BAD = {
    "plain": "without a key",
    NEW[:-4]: "30 bytes in place of 32",
    NEW[:-3]: "cut or mistyped",
    NEW[:-1] + "AAAA": "35 bytes in place of 32",
    NEW + "AAAA": "neither base64",
    f"{NEW},": "key 2 is empty",
    f"{NEW},{NEW}": "comes twice",
    f"{OLD},{bytes(range(32)).hex()}": "comes twice",
    f"plain,{NEW},plain": "comes twice",
    "correct horse battery staple": "neither base64 nor hex",
    base64.b64encode(bytes(32)).decode(): "not random",
    "ab" * 32: "not random",
    "pässword": "neither",
}


@pytest.mark.parametrize("text", BAD)
def test_keys_that_cannot_be_used_are_refused_at_start_and_never_shown(text: str) -> None:
    with pytest.raises(SettingsError, match=BAD[text]) as caught:
        Settings.from_env({"RETRYSAFE_ENCRYPTION_KEYS": text})
    assert "openssl rand" in str(caught.value)
    for part in text.split(","):
        if part != "plain" and part:
            assert part not in str(caught.value) + repr(caught.value)
    with pytest.raises(SettingsError, match=BAD[text]) as caught:
        Settings(encryption_keys=text)  # type: ignore[arg-type]
    assert NEW not in str(caught.value)


@given(st.text(st.characters(min_codepoint=33, exclude_characters=","), min_size=12, max_size=90))
def test_no_text_of_a_key_is_ever_shown(text: str) -> None:
    try:
        found = Settings.from_env({"RETRYSAFE_ENCRYPTION_KEYS": text})
    except SettingsError as error:
        assert text not in str(error)
    else:
        assert text not in repr(found)


def test_a_key_is_in_no_repr_and_not_shown_where_it_was_put_by_mistake() -> None:
    settings_ = Settings.from_env({"RETRYSAFE_ENCRYPTION_KEYS": f"{NEW},{HEX}"})
    store = SealedStore(MemoryStore(), EncryptionKeys(f"{NEW},{HEX}"))
    shown = repr((settings_, settings_.encryption_keys, store, store.open(), vars(store)))
    assert NEW not in shown
    assert HEX not in shown
    assert "encryption_keys=***" in shown
    for name in ("TTL", "NAMESPACE", "REDIS_URL", "METHODS", "ENCRYPTION_KEY"):
        with pytest.raises(SettingsError) as caught:
            Settings.from_env({f"RETRYSAFE_{name}": NEW})
        assert NEW.rstrip("=") not in str(caught.value)


def test_an_error_tells_its_reason_and_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(RecordSealed("ab", "its seal is broken")))
    assert isinstance(error, errors.StoreUnavailable)
    assert "its seal is broken" in str(error)
    assert error.retryable


def test_without_the_library_the_start_fails_and_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from retrysafe import open_store\nfrom retrysafe.errors import SettingsError\n"
        "try: open_store('memory://')\n"
        "except SettingsError as error: assert 'retrysafe[encryption]' in str(error), error\n"
        "else: raise SystemExit('it started')\n"
    )
    environment = {"RETRYSAFE_ENCRYPTION_KEYS": NEW, "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)


def test_the_ciphers_are_not_loaded_until_a_store_is_sealed() -> None:
    # redis-py looks whether the library is there; its ciphers it leaves alone.
    program = (
        "import sys, retrysafe.stores, retrysafe.middleware, retrysafe.decorators\n"
        "assert 'cryptography.hazmat.primitives.ciphers.aead' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
