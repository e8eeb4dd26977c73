"""ASGI message fuzzing: whatever the app sends, the client gets it, and the retry gets it again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.middleware.recording import kept_by_default
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores.memory import MemoryStore
from tests.asgi import Answer, Exchange, http_scope, post

NAMES = st.sampled_from([b"content-type", b"location", b"link", b"vary", b"x-a", b"set-cookie"])
VALUES = st.binary(max_size=20)
CHUNKS = st.lists(st.binary(max_size=200), min_size=1, max_size=6)


@st.composite
def scripts(draw: Any) -> list[dict[str, Any]]:
    """What an app may send, in an order that is legal."""
    trailers = draw(st.booleans())
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": draw(st.sampled_from([200, 201, 202, 302, 400, 402, 404, 418, 429, 500, 503])),
    }
    if draw(st.booleans()):
        start["headers"] = draw(st.lists(st.tuples(NAMES, VALUES), max_size=5))
    if trailers:
        start["trailers"] = True
    messages = [
        {"type": "http.response.early_hint", "links": []} for _ in range(draw(st.integers(0, 2)))
    ]
    messages.append(start)
    chunks = draw(CHUNKS)
    for n, chunk in enumerate(chunks):
        message: dict[str, Any] = {"type": "http.response.body"}
        if chunk or draw(st.booleans()):
            message["body"] = chunk
        if n < len(chunks) - 1:
            message["more_body"] = True
        messages.append(message)
    if trailers:
        messages.append({"type": "http.response.trailers", "headers": [(b"x-t", b"1")]})
    return messages


class Scripted:
    FINE: ClassVar[list[dict[str, Any]]] = [
        {"type": "http.response.start", "status": 200},
        {"type": "http.response.body"},
    ]

    def __init__(self, messages: list[dict[str, Any]], fails_at: int | None) -> None:
        self.messages = messages
        self.fails_at = fails_at
        self.runs = 0
        self.received = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        self.received = b""
        more = True
        while more:
            message = await receive()
            self.received += message.get("body", b"")
            more = message.get("more_body", False)
        for n, message in enumerate(self.messages):
            if n == self.fails_at:
                raise RuntimeError("scripted")
            await send(message)


async def bare(app: Any, chunks: list[bytes], extensions: dict[str, Any]) -> Answer:
    exchange = Exchange(app, http_scope(extensions=extensions), chunks)
    with contextlib.suppress(RuntimeError):
        await exchange.run()
    return exchange.answer


def sent_body(answer: Answer) -> bytes:
    return b"".join(each.get("body", b"") for each in answer.messages)


@settings(max_examples=300, deadline=None)
@given(
    messages=scripts(),
    chunks=CHUNKS,
    fails_at=st.none() | st.integers(0, 9),
    other_cuts=st.integers(1, 7),
)
def test_the_first_answer_is_the_apps_own_and_the_retry_gets_it_again(
    messages: list[dict[str, Any]], chunks: list[bytes], fails_at: int | None, other_cuts: int
) -> None:
    async def main() -> None:
        extensions: dict[str, Any] = {"http.response.trailers": {}}
        expected = await bare(Scripted(messages, fails_at), chunks, extensions)
        app = Scripted(messages, fails_at)
        target = IdempotencyMiddleware(app, store=MemoryStore(), policy=IdempotencyPolicy(wait=0))
        scope = http_scope(headers=[("Idempotency-Key", "k")], extensions=extensions)
        first = Exchange(target, scope, chunks)
        failed = False
        try:
            await first.run()
        except RuntimeError:
            failed = True
        whole = b"".join(chunks)
        assert app.received == whole
        kinds = [each["type"] for each in first.answer.messages]
        if failed:
            # What was held back when it failed never became an answer.
            assert kinds == [each["type"] for each in expected.messages][: len(kinds)]
        else:
            assert kinds == [each["type"] for each in expected.messages]
            assert sent_body(first.answer) == sent_body(expected)
            for ours, theirs in zip(first.answer.messages, expected.messages, strict=True):
                if ours["type"] == "http.response.start":
                    added = [h for h in ours["headers"] if h[0] == b"x-request-id"]
                    assert len(added) == 1
                    rest = [h for h in ours["headers"] if h[0] != b"x-request-id"]
                    assert rest == list(theirs.get("headers", ()))
        runs = app.runs
        cuts = [whole[n : n + other_cuts] for n in range(0, len(whole), other_cuts)] or [b""]
        app.fails_at = None
        again = await post(target, body=cuts, extensions=extensions)
        status = next(m["status"] for m in messages if m["type"] == "http.response.start")
        kept = not failed and kept_by_default(status)
        assert app.runs == (runs if kept else runs + 1)
        if kept:
            assert again.replayed
            assert again.status == status
            assert again.body == sent_body(expected)

    asyncio.run(main())


ANYTHING = st.lists(
    st.sampled_from(
        [
            {"type": "http.response.start", "status": 200, "headers": [(b"x-a", b"1")]},
            {"type": "http.response.start", "status": 500},
            {"type": "http.response.body", "body": b"a", "more_body": True},
            {"type": "http.response.body", "body": b"b"},
            {"type": "http.response.body"},
            {"type": "http.response.trailers", "headers": [(b"x-t", b"1")]},
            {"type": "http.response.early_hint", "links": []},
            {"type": "http.response.unheard_of"},
        ]
    ),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(messages=ANYTHING, fails_at=st.none() | st.integers(0, 6))
def test_an_app_that_breaks_the_protocol_is_passed_on_and_never_blocks_its_key(
    messages: list[dict[str, Any]], fails_at: int | None
) -> None:
    async def main() -> None:
        expected = await bare(Scripted(messages, fails_at), [b"x"], {})
        app = Scripted(messages, fails_at)
        target = IdempotencyMiddleware(app, store=MemoryStore(), policy=IdempotencyPolicy(wait=0))
        first = Exchange(target, http_scope(headers=[("Idempotency-Key", "k")]), [b"x"])
        raised = False
        try:
            await first.run()
        except RuntimeError:
            raised = True
        assert raised is (fails_at is not None and fails_at < len(messages))
        ours = [each["type"] for each in first.answer.messages]
        theirs = [each["type"] for each in expected.messages]
        if raised:  # a start that was held back when it failed never became an answer
            assert ours == theirs[: len(ours)]
        else:
            assert ours == theirs
        assert sent_body(first.answer) == sent_body(expected)
        # The key was freed or has its record: the retry is never told that a call is in flight.
        app.messages, app.fails_at = Scripted.FINE, None
        again = await post(target, body=b"x")
        assert again.replayed or app.runs == 2
        assert again.status == 200

    asyncio.run(main())


@settings(max_examples=100, deadline=None)
@given(chunks=CHUNKS, left_after=st.integers(0, 5))
def test_a_client_that_leaves_between_any_two_chunks_runs_nothing_and_frees_its_key(
    chunks: list[bytes], left_after: int
) -> None:
    async def main() -> None:
        app = Scripted(Scripted.FINE, None)
        target = IdempotencyMiddleware(app, store=MemoryStore(), policy=IdempotencyPolicy(wait=0))
        sent = iter(chunks[:left_after])

        async def receive() -> dict[str, Any]:
            for chunk in sent:
                return {"type": "http.request", "body": chunk, "more_body": True}
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            raise AssertionError(f"nobody is there to be sent {message}")

        await target(http_scope(headers=[("Idempotency-Key", "k")]), receive, send)
        assert app.runs == 0
        assert (await post(target, body=b"another")).status == 200
        assert app.runs == 1

    asyncio.run(main())


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(st.binary(max_size=300), min_size=1, max_size=3),
    others=st.lists(st.tuples(st.binary(min_size=1, max_size=20), VALUES), max_size=5),
)
def test_no_header_makes_the_middleware_raise(
    values: list[bytes], others: list[tuple[bytes, bytes]]
) -> None:
    async def main() -> None:
        app = Scripted(
            [{"type": "http.response.start", "status": 200}, {"type": "http.response.body"}], None
        )
        target = IdempotencyMiddleware(app, store=MemoryStore())
        scope = http_scope()
        scope["headers"] = [(name.lower(), value) for name, value in others]
        scope["headers"] += [(b"idempotency-key", value) for value in values]
        answer = await Exchange(target, scope).run()
        assert (answer.status, app.runs) in ((200, 1), (400, 0))

    asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=300))
def test_a_payload_that_is_no_response_is_refused_and_never_raises_another_error(
    payload: bytes,
) -> None:
    from retrysafe.middleware.response_record import StoredResponse, decode
    from retrysafe.records import CorruptRecord

    with contextlib.suppress(CorruptRecord):
        assert isinstance(decode(payload), StoredResponse)


@settings(max_examples=500, deadline=None)
@given(value=st.binary(max_size=200) | st.binary(max_size=120).map(lambda b: b"r1R" + b))
def test_a_value_that_is_no_receipt_is_refused_and_never_raises_another_error(
    value: bytes,
) -> None:
    from retrysafe.records import CorruptRecord, Record, Running, decode

    with contextlib.suppress(CorruptRecord):
        assert isinstance(decode(value), Record | Running)
