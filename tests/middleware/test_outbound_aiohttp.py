"""The middleware for aiohttp, against a server that fails as servers do."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import aiohttp
import pytest

from retrysafe import attempts_of, deadline
from retrysafe.backoff import Fixed
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.context import RequestContext, entered
from retrysafe.errors import BreakerOpen
from retrysafe.middleware.aiohttp import retry_middleware
from retrysafe.retrying import RetryPolicy
from tests.middleware.flaky import FlakyServer
from tests.servers import free_port
from tests.support import run

POLICY = RetryPolicy(attempts=3, deadline=None, backoff=Fixed(0.001))
NO_KEY = {"Idempotency-Key": ""}
PROBLEM = "Content-Type: application/problem+json"
NO, YES = '{"retryable": false}', '{"retryable": true}'


def _session(**options: Any) -> aiohttp.ClientSession:
    options.setdefault("policy", POLICY)
    return aiohttp.ClientSession(
        middlewares=(retry_middleware(**options),), timeout=aiohttp.ClientTimeout(sock_read=0.5)
    )


async def _send(
    session: aiohttp.ClientSession, method: str, url: str, **options: Any
) -> tuple[int, str]:
    async with session.request(method, url, **options) as answer:
        return answer.status, await answer.text()


def _with(server: FlakyServer, main: Any, **options: Any) -> None:
    async def inner() -> None:
        async with _session(**options) as session:
            work: Coroutine[Any, Any, None] = main(session)
            await work

    with server:
        run(inner())


def test_an_answer_that_trickles_in_is_waited_for_and_not_repeated() -> None:
    server = FlakyServer("act-reset", "slow-body", dedupe=True)

    async def main(session: aiohttp.ClientSession) -> None:
        answer = await _send(session, "POST", server.url, data=b"x" * 100)
        assert answer == (200, "x" * 100)
        assert (len(server.requests), server.effects) == (2, 1)

    _with(server, main)


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent", "half"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_B103_idempotent_methods_are_repeated_after_every_fault(method: str, fault: str) -> None:
    server = FlakyServer(fault)

    async def main(session: aiohttp.ClientSession) -> None:
        assert (await _send(session, method, server.url))[0] == 200

    _with(server, main)


@pytest.mark.parametrize("fault", ["act-reset", "act-silent", "half"])
def test_B103_a_post_without_a_key_acts_once_and_the_error_says_why(fault: str) -> None:
    server = FlakyServer(fault)

    async def main(session: aiohttp.ClientSession) -> None:
        with pytest.raises((aiohttp.ClientError, TimeoutError)) as caught:
            await _send(session, "POST", server.url, data=b"1", headers=NO_KEY)
        assert server.effects == 1
        assert "its outcome is unknown" in "".join(caught.value.__notes__)
        assert server.keys == [None]

    _with(server, main)


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent", "half"])
def test_B103_a_post_with_a_key_is_repeated_with_that_key(fault: str) -> None:
    server = FlakyServer(fault, fault, dedupe=True)

    async def main(session: aiohttp.ClientSession) -> None:
        headers = {"Idempotency-Key": "mine"}
        assert (await _send(session, "POST", server.url, data=b"1", headers=headers))[1] == "1"
        assert server.effects == 1
        assert set(server.keys) == {"mine"}

    _with(server, main)


def test_C69_what_was_never_sent_is_repeated_without_a_key() -> None:
    async def main() -> None:
        async with _session() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as caught:
                await _send(session, "POST", f"http://127.0.0.1:{free_port()}/", headers=NO_KEY)
            assert len(attempts_of(caught.value)) == 3

    run(main())


def test_C54_aiohttps_own_repeat_does_not_double_the_attempts() -> None:
    server = FlakyServer(*["ok", *["act-reset"] * 3, "ok", *["act-reset"] * 9])

    async def main(session: aiohttp.ClientSession) -> None:
        for _ in range(2):
            await _send(session, "GET", server.url)
            before = len(server.requests)
            with pytest.raises(aiohttp.ClientError):
                await _send(session, "GET", server.url)
            assert len(server.requests) - before == 3

    _with(server, main)


def test_C58_B110_one_key_for_a_call_and_another_for_the_next() -> None:
    server = FlakyServer("act-reset", "act-reset", dedupe=True)

    async def main(session: aiohttp.ClientSession) -> None:
        await _send(session, "POST", server.url, data=b"1")
        await _send(session, "POST", server.url, data=b"1")
        assert len(server.keys) == 4
        assert None not in server.keys
        assert len(set(server.keys[:3])) == 1
        assert server.keys[3] != server.keys[0]

    _with(server, main)


def test_inside_keyed_work_a_rerun_sends_the_same_keys_and_the_request_id() -> None:
    server = FlakyServer("act-reset")

    async def main(session: aiohttp.ClientSession) -> None:
        for _ in range(2):
            with entered(RequestContext("request-1", key="ab" * 32)):
                await _send(session, "POST", server.url)
                await _send(session, "PUT", server.url)
        assert server.keys[0] == server.keys[1]
        assert server.keys[1:3] == server.keys[3:]
        assert {headers["x-request-id"] for _, headers, _ in server.requests} == {"request-1"}

    _with(server, main)


@pytest.mark.parametrize("busy", ["503 Busy|Retry-After: 0", "429 Slow", "429 Slow|Retry-After: 0"])
def test_C64_C66_an_answer_that_asks_for_a_retry_gets_one(busy: str) -> None:
    server = FlakyServer(busy)

    async def main(session: aiohttp.ClientSession) -> None:
        assert await _send(session, "POST", server.url, data=b"1") == (200, "1")

    _with(server, main)


@pytest.mark.parametrize("no", ["503 Down", "404 No", "503 Busy|Retry-After: 3600"])
def test_C64_C67_a_definite_no_and_a_long_wait_are_returned_as_they_are(no: str) -> None:
    server = FlakyServer(no)

    async def main(session: aiohttp.ClientSession) -> None:
        assert await _send(session, "GET", server.url) == (int(no[:3]), "busy")
        assert len(server.requests) == 1

    _with(server, main)


class _Anew:
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"pa"
        yield b"rt"


def test_B107_bodies_that_can_be_replayed_are_the_same_each_time() -> None:
    file = io.BytesIO(b"..part")
    file.seek(2)

    for body in (b"part", "part", _Anew(), file):
        server = FlakyServer("act-reset", "429 Slow")

        async def main(
            session: aiohttp.ClientSession, server: FlakyServer = server, body: Any = body
        ) -> None:
            assert (await _send(session, "POST", server.url, data=body))[1] == "part"
            assert server.bodies == [b"part"] * 3

        _with(server, main)


def test_C57_B108_a_one_shot_body_is_not_sent_again_and_it_is_said_why() -> None:
    server = FlakyServer("429 Slow", "act-reset")

    async def parts() -> AsyncIterator[bytes]:
        yield b"part"

    async def main(session: aiohttp.ClientSession) -> None:
        async with session.put(server.url, data=parts()) as answer:
            assert answer.status == 429
            assert "can't be replayed" in vars(answer)["retrysafe_note"]
        with pytest.raises(aiohttp.ClientError) as caught:
            await _send(session, "PUT", server.url, data=parts())
        assert "can't be replayed" in "".join(caught.value.__notes__)
        assert server.bodies == [b"part"] * 2

    _with(server, main)


def test_an_open_breaker_refuses_before_anything_is_sent() -> None:
    breaker = CircuitBreaker("one", BreakerPolicy(min_calls=2, failure_rate=0.5))
    server = FlakyServer(*["502 Bad"] * 9)

    async def main(session: aiohttp.ClientSession) -> None:
        with pytest.raises(BreakerOpen):
            await _send(session, "GET", server.url)
        assert len(server.requests) == 2

    _with(server, main, breaker=breaker)


def test_C51_an_attempt_waits_no_longer_than_the_deadline_around_it() -> None:
    server = FlakyServer("act-silent")

    async def main(session: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        with deadline(0.3), pytest.raises(TimeoutError):
            await _send(session, "GET", server.url, timeout=timeout)

    _with(server, main)


def test_a_middleware_around_it_may_repeat_the_request() -> None:
    server = FlakyServer("act-reset")

    async def twice(
        request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        with pytest.raises(aiohttp.ClientError):
            await handler(request)
        return await handler(request)

    async def main(session: aiohttp.ClientSession) -> None:
        once = retry_middleware(policy=POLICY.but(attempts=1))
        async with session.get(server.url, middlewares=(twice, once)) as answer:
            assert answer.status == 200

    _with(server, main)


def test_C68_R15_a_problem_that_was_not_read_yet_has_its_word() -> None:
    server = FlakyServer(f"502 Bad|{PROBLEM}|{NO}", f"422 No|{PROBLEM}|{YES}")

    async def main(session: aiohttp.ClientSession) -> None:
        assert await _send(session, "GET", server.url) == (502, NO)
        assert len(server.requests) == 1
        assert (await _send(session, "POST", server.url, headers=NO_KEY))[0] == 200

    _with(server, main)
