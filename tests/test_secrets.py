"""No key, credential, password or payload leaves by a log, an event, an error, a note or a repr.

One word stands for each secret; a drive through every way to fail collects all that is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from retrysafe import attempts_of, errors, keys
from retrysafe.context import current_request
from retrysafe.decorators import idempotent, retry, step
from retrysafe.desks import async_desk_for, desk_for
from retrysafe.events import Event, listening
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import MAX_WAITERS, AsyncHeld, AsyncReceipts, Call, Held, Receipts
from retrysafe.records import Record, encode_done
from retrysafe.settings import Settings
from retrysafe.stores import Store, open_store
from retrysafe.stores.doors import door
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.values import replace
from tests.asgi import Exchange, http_scope, post
from tests.conftest import OwnServer
from tests.receipting import policy
from tests.servers import Server
from tests.support import run, until

SECRETS = {
    "key": "canary-key-4f1a",
    "authorization": "canary-authorization-9b2c",
    "scope": "canary-scope-6e3d",
    "password": "canary-password-0c7e",
    "body": "canary-body-55d0",
    "query": "canary-query-81aa",
    "result": "canary-result-3bb9",
    "argument": "canary-argument-7711",
    "header": "canary-header-20fe",
}
FORMAT = logging.Formatter("%(name)s %(levelname)s %(message)s")


class Heard(logging.Handler):
    """All that was logged (tracebacks too), told, raised or shown."""

    def __init__(self) -> None:
        super().__init__(0)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = FORMAT.format(record)
        extra = {k: v for k, v in vars(record).items() if k not in ("exc_info", "msg", "args")}
        self.said.append(f"{text} {extra!r} {record.msg!r} {record.args!r}")

    def event(self, event: Event) -> None:
        self.said.append(f"{event!r}")

    def error(self, error: BaseException) -> None:
        """An error of ours, in all the ways that one is shown."""
        self.said.append("".join(traceback.format_exception(error)))
        self.said.append(f"{error} {error!r} {vars(error)!r} {error.args!r}")
        self.said.append(f"{getattr(error, '__notes__', ())} {attempts_of(error)!r}")
        self.said.append(repr(pickle.dumps(error)))

    def shown(self, *things: object) -> None:
        self.said += [f"{thing!r} {thing!s}" for thing in things]

    def check(self, *expected: str) -> None:
        whole = "\n".join(self.said)
        for word in expected:
            assert word in whole, f"the drive did not come to {word!r}"
        for name, secret in SECRETS.items():
            found = [said for said in self.said if secret in said]
            assert not found, f"the {name} is in: {found[0][:2000]}"


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    root = logging.getLogger()
    names = [None, *logging.Logger.manager.loggerDict]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.DEBUG)
    root.addHandler(handler)
    with listening(handler.event):
        yield handler
    root.removeHandler(handler)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(params=["memory", "redis"])
def place(request: pytest.FixtureRequest) -> Store:
    """A store; the server's one behind a password."""
    if request.param == "memory":
        return MemoryStore("secrets")
    return RedisStore(url_of(request.getfixturevalue("own_server")()), "secrets")


def url_of(server: Server) -> str:
    with server.client() as admin:
        admin.config_set("requirepass", SECRETS["password"])
    return f"redis://:{SECRETS['password']}@127.0.0.1:{server.port}/0"


HEADERS = [
    ("Authorization", f"Bearer {SECRETS['authorization']}"),
    ("Cookie", f"session={SECRETS['header']}"),
    ("X-Secret", SECRETS["header"]),
]
BODY = SECRETS["body"].encode() * 3


class App:
    """Answers as it is told to."""

    def __init__(self) -> None:
        self.status = 200
        self.fails: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.running = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.running = True
        while (await receive()).get("more_body"):
            pass
        if self.hold is not None:
            await self.hold.wait()
        if self.fails is not None:
            raise self.fails
        headers = [(b"x-secret", SECRETS["header"].encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": SECRETS["result"].encode()})


def test_no_request_gives_a_secret_away(place: Store, heard: Heard) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_debug(True)
        app = App()

        def target(scope: Any = None, **fields: Any) -> Any:
            rule = IdempotencyPolicy(**{"wait": 0.05, **fields})
            made = IdempotencyMiddleware(app, store=place, policy=rule, scope=scope)
            return RequestIdMiddleware(made)

        async def ask(to: Any, key: str = SECRETS["key"], body: bytes = BODY) -> Any:
            query = SECRETS["query"].encode()
            answer = await post(to, body=body, key=key, headers=HEADERS, query=query)
            if answer.header("content-type") == "application/problem+json":
                heard.shown(json.loads(answer.body), answer.headers)
            return answer

        plain = target()
        assert (await ask(plain)).status == 200
        assert (await ask(plain)).replayed
        assert (await ask(plain, body=BODY + b"!")).status == 422
        assert (await ask(plain, key=f"{SECRETS['key']} {SECRETS['key']}")).status == 400
        assert (await ask(plain, key=f'"{SECRETS["key"]}')).status == 400
        assert (await ask(plain, key=SECRETS["key"] * 50)).status == 400
        assert (await ask(target(max_request_body=5))).status == 413
        assert (await ask(target(max_response_body=5), key=SECRETS["key"] + "-big")).status == 200
        assert (await ask(plain, key=SECRETS["key"] + "-big")).status == 409
        assert (await ask(target(lambda request: SECRETS["scope"]))).status == 200

        app.hold = asyncio.Event()
        first = asyncio.create_task(ask(plain, key=SECRETS["key"] + "-held"))
        desk = async_desk_for(place, MAX_WAITERS)
        await until(lambda: len(desk.flights) == 1)
        assert (await ask(plain, key=SECRETS["key"] + "-held")).status == 409
        heard.shown(desk, desk.door, list(desk._held.values()), *asyncio.all_tasks())
        app.hold.set()
        assert (await first).status == 200

        app.fails = RuntimeError("of the app")
        with pytest.raises(RuntimeError):
            await ask(plain, key=SECRETS["key"] + "-fails")
        app.fails = None

        def failing(request: Any) -> str:
            raise LookupError("no caller")

        assert (await ask(target(failing))).status == 500

        # Bytes that are none of ours, where the record lies.
        fingerprint = keys.fingerprint("callable", b"p")
        marked = Call("k-corrupt", f"own:{SECRETS['scope']}", fingerprint)
        held = await AsyncReceipts(place, policy()).begin(marked)
        assert isinstance(held, AsyncHeld)
        heard.shown(held, held._taken, held._taken.claim, held.control, marked)
        await held.finish(SECRETS["result"].encode(), 60)
        own = target(lambda request: SECRETS["scope"], fingerprint=lambda request, body: "p")
        assert (await ask(own, key="k-corrupt")).status == 503

    run(main())
    heard.check("record-corrupt", "mismatch", "in-flight", "key-invalid", "no caller", "replayed")


def test_no_function_gives_a_secret_away(place: Store, heard: Heard) -> None:
    @dataclass
    class Result:
        secret: str

    class Declined(Exception):
        pass

    def work(order: str, note: str) -> Result:
        with step("charge"):
            pass
        context = current_request()
        heard.shown(context)
        return Result(SECRETS["result"])

    async def awork(order: str, note: str) -> Result:
        return Result(SECRETS["result"])

    def declining(order: str) -> str:
        raise Declined(SECRETS["result"])

    def unkept(order: str) -> object:
        return {SECRETS["result"]: object()}

    options: dict[str, Any] = {"store": place, "namespace": "work", "wait": 0.05}
    keyed = idempotent(key="order", **options)(work)
    order, note = SECRETS["key"], SECRETS["argument"]
    keyed(order, note)
    keyed(order, note)

    def fails(kind: type[BaseException], function: Callable[[], Any]) -> None:
        with pytest.raises(kind) as caught:
            function()
        heard.error(caught.value)

    fails(errors.FingerprintMismatch, lambda: keyed(order, note + "!"))
    fails(errors.NotEncodable, lambda: keyed(order, object()))
    heard.shown(keyed.receipt(order=order, note=note), keyed)

    # The function's type changed under its records.
    def reading(order: str, note: str) -> int:
        raise AssertionError("run")

    reading.__qualname__ = work.__qualname__
    fails(errors.RecordCorrupt, lambda: idempotent(key="order", **options)(reading)(order, note))

    options["namespace"] = "declining"
    kept = idempotent(key="order", keep_errors=Declined, **options)(declining)
    for _ in range(2):
        with pytest.raises(Declined):
            kept(order)

    options["namespace"] = "unkept"
    large = idempotent(key="order", **options)(unkept)
    large(order)
    fails(errors.ResultNotKept, lambda: large(order))

    receipts = Receipts(place, policy(wait=0.05, on_abandoned="refuse"))
    call = Call(order, SECRETS["scope"], keys.NO_FINGERPRINT)
    held = receipts.begin(call)
    assert isinstance(held, Held)
    fails(errors.InFlight, lambda: Receipts(place, policy(wait=0)).begin(call))
    held.interrupt()
    fails(errors.Abandoned, lambda: receipts.begin(call))
    taken = Receipts(place, policy()).begin(call)
    assert isinstance(taken, Held)
    heard.shown(taken.abandoned, taken._taken, receipts, taken)
    taken.finish(SECRETS["result"].encode(), 60)
    record = Receipts(place, policy()).begin(call)
    assert isinstance(record, Record)
    assert record.payload == SECRETS["result"].encode()
    desk = desk_for(place, MAX_WAITERS)
    heard.shown(record, call, desk, desk.door, place, door(place))

    async def main() -> None:
        asyncio.get_running_loop().set_debug(True)
        options["namespace"] = "async"
        decorated = idempotent(key="order", **options)(awork)
        await decorated(order, note)
        with pytest.raises(errors.FingerprintMismatch) as caught:
            await decorated(order, note + "!")
        heard.error(caught.value)

    run(main())

    @retry(attempts=2, deadline=5)
    def outbound(token: str) -> None:
        raise ConnectionError("reset")

    with pytest.raises(ConnectionError) as failed:
        outbound(SECRETS["argument"])
    heard.error(failed.value)
    heard.check(
        "record-corrupt",
        "mismatch",
        "abandoned",
        "FingerprintMismatch",
        "2 attempts",
        "result-not-kept",
    )


def test_a_store_that_fails_gives_no_secret_away(own_server: OwnServer, heard: Heard) -> None:
    """Out of reach, a wrong password, a command the server doesn't know: it echoes arguments."""
    gone = own_server()
    url = url_of(gone)
    gone.kill()
    wrong = own_server()
    url_of(wrong)
    foreign = f"redis://:{SECRETS['password']}x@127.0.0.1:{wrong.port}/0"
    renamed = own_server(rename_command=["EVALSHA", ""])
    call = Call(SECRETS["key"], SECRETS["scope"], keys.NO_FINGERPRINT)
    for each in (url, foreign, url_of(renamed)):
        store = RedisStore(each, "secrets")
        heard.shown(store, store.open())
        with pytest.raises(errors.StoreUnavailable) as caught:
            Receipts(store, policy()).begin(call)
        heard.error(caught.value)

        async def main(store: Store = store) -> None:
            asyncio.get_running_loop().set_debug(True)
            with pytest.raises(errors.StoreUnavailable) as caught:
                await AsyncReceipts(store, policy()).begin(call)
            heard.error(caught.value)
            app = IdempotencyMiddleware(App(), store=store)
            answer = await post(app, body=BODY, key=SECRETS["key"], headers=HEADERS)
            assert answer.status == 503
            heard.shown(answer.body, answer.headers)

        run(main())
    finishing = RedisStore(url_of(own_server()), "secrets")
    held = Receipts(finishing, policy()).begin(call)
    assert isinstance(held, Held)
    done = encode_done(Record(keys.NO_FINGERPRINT, b"t" * 16, 1, "", SECRETS["result"].encode()))
    heard.shown(replace(held._taken.claim), done[:3])
    heard.check("store-unavailable", "unknown command")


PASSWORDS = ["p@ss", "p:a/s", "p#w", "p?w", "p w", "p%40", "p&w=1"]


@pytest.mark.parametrize("part", PASSWORDS)
@pytest.mark.parametrize(
    "form",
    [
        "redis://:{}@h:1/0",
        "redis://user:{}@h:1/0",
        "rediss://u:{}@h:99999/0",
        "http://u:{}@h",
        "u:{}@h",
        "redis://u:{}@h/x/y",
        "redis+sentinel://u:{}@h1,h2",
        "redis://h/0?password={}",
        "unix://h?password={}",
    ],
)
def test_no_part_of_a_password_is_in_a_setting_that_is_refused_or_shown(
    form: str, part: str
) -> None:
    if "?password" in form and "&" in part:
        return  # a URL's own separator: what follows is another parameter
    secret = f"{SECRETS['password']}{part}{SECRETS['password']}"
    said = []
    for name in ("REDIS_URL", "NAMESPACE", "TTL", "METHODS", "KEY_HEADER"):
        try:
            said.append(repr(Settings.from_env({f"RETRYSAFE_{name}": form.format(secret)})))
        except errors.SettingsError as error:
            said.append(str(error))
    with contextlib.suppress(errors.SettingsError):
        said.append(repr(open_store(form.format(secret), namespace="secrets")))
    assert not [text for text in said if SECRETS["password"] in text]


def test_a_client_that_leaves_and_a_server_that_ends_give_no_secret_away(heard: Heard) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_debug(True)
        app = App()
        app.hold = asyncio.Event()
        target = IdempotencyMiddleware(app, store=MemoryStore("secrets"))
        scope = http_scope(headers=[*HEADERS, ("Idempotency-Key", SECRETS["key"])])
        exchange = Exchange(target, scope, [BODY])
        task = asyncio.create_task(exchange.run())
        await until(lambda: app.running)
        heard.shown(*asyncio.all_tasks())
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        app.hold.set()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    run(main())
    heard.check()
