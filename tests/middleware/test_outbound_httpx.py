"""The transports for httpx2 and httpx, against a server that fails as servers do."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import httpx2
import pytest

from retrysafe import attempts_of, current_request, deadline
from retrysafe.backoff import Fixed
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.context import RequestContext, entered
from retrysafe.errors import BreakerOpen
from retrysafe.middleware.httpx import AsyncRetryTransport, RetryTransport
from retrysafe.retrying import RetryPolicy
from tests.middleware.flaky import FlakyServer
from tests.servers import free_port
from tests.support import run

POLICY = RetryPolicy(attempts=3, deadline=None, backoff=Fixed(0.001))
NO_KEY = {"Idempotency-Key": ""}
PROBLEM = "Content-Type: application/problem+json"
NO, YES = '{"retryable": false}', '{"retryable": true}'
LIBRARIES = [httpx2, httpx]


def _client(library: Any, **options: Any) -> Any:
    options.setdefault("policy", POLICY)
    transport = RetryTransport(library.HTTPTransport(), **options)
    return library.Client(transport=transport, timeout=0.5)


@pytest.fixture(params=LIBRARIES, ids=["httpx2", "httpx"])
def library(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent", "half"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_B103_idempotent_methods_are_repeated_after_every_fault(
    library: Any, method: str, fault: str
) -> None:
    with FlakyServer(fault) as server, _client(library) as client:
        assert client.request(method, server.url).status_code == 200


@pytest.mark.parametrize("fault", ["act-reset", "act-silent", "half"])
def test_B103_a_post_without_a_key_acts_once_and_the_error_says_why(
    library: Any, fault: str
) -> None:
    with FlakyServer(fault) as server, _client(library) as client:
        with pytest.raises(library.TransportError) as caught:
            client.post(server.url, content=b"1", headers=NO_KEY)
        assert server.effects == 1
        assert "its outcome is unknown" in "".join(caught.value.__notes__)
        assert server.keys == [None]


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent", "half"])
def test_B103_a_post_with_a_key_is_repeated_with_that_key(library: Any, fault: str) -> None:
    with FlakyServer(fault, fault, dedupe=True) as server, _client(library) as client:
        headers = {"Idempotency-Key": "mine"}
        assert client.post(server.url, content=b"1", headers=headers).status_code == 200
        assert server.effects == 1
        assert set(server.keys) == {"mine"}


def test_an_answer_that_trickles_in_is_waited_for_and_not_repeated(library: Any) -> None:
    with FlakyServer("act-reset", "slow-body", dedupe=True) as server, _client(library) as client:
        assert client.post(server.url, content=b"x" * 100).content == b"x" * 100
        assert (len(server.requests), server.effects) == (2, 1)


def test_C69_what_was_never_sent_is_repeated_without_a_key(library: Any) -> None:
    def parts() -> Iterator[bytes]:
        yield b"one-shot"

    with _client(library) as client, pytest.raises(library.ConnectError) as caught:
        client.post(f"http://127.0.0.1:{free_port()}/", content=parts(), headers=NO_KEY)
    assert len(attempts_of(caught.value)) == 3


def test_C58_B110_one_key_for_a_call_and_another_for_the_next(library: Any) -> None:
    with FlakyServer("act-reset", "act-reset", dedupe=True) as server, _client(library) as client:
        request = client.build_request("POST", server.url, content=b"1")
        client.send(request)
        client.send(request)
        assert len(server.keys) == 4
        assert None not in server.keys
        assert len(set(server.keys[:3])) == 1
        assert server.keys[3] != server.keys[0]
        assert server.effects == 2


def test_inside_keyed_work_a_rerun_sends_the_same_keys_and_the_request_id(library: Any) -> None:
    with FlakyServer("act-reset") as server, _client(library) as client:
        for _ in range(2):
            with entered(RequestContext("request-1", key="ab" * 32)):
                assert current_request() is not None
                client.post(server.url)
                client.put(server.url)
                client.get(server.url)
        first, again = server.keys[1:4], server.keys[4:]
        assert server.keys[0] == first[0]
        assert first == again
        assert first[0] and first[1] and first[0] != first[1]
        assert first[2] is None
        assert {headers["x-request-id"] for _, headers, _ in server.requests} == {"request-1"}


@pytest.mark.parametrize("busy", ["503 Busy|Retry-After: 0", "429 Slow", "429 Slow|Retry-After: 0"])
def test_C64_C66_an_answer_that_asks_for_a_retry_gets_one(library: Any, busy: str) -> None:
    with FlakyServer(busy) as server, _client(library) as client:
        assert client.post(server.url, content=b"1").text == "1"
        assert server.connections <= 2


def test_C64_a_wait_that_is_too_long_ends_the_retries_with_the_answer(library: Any) -> None:
    with FlakyServer("503 Busy|Retry-After: 3600") as server, _client(library) as client:
        assert client.get(server.url).status_code == 503
        assert len(server.requests) == 1


@pytest.mark.parametrize("no", ["503 Down", "404 No", "429 Slow|Should-Retry: false"])
def test_C67_a_definite_no_is_returned_as_it_is(library: Any, no: str) -> None:
    with FlakyServer(no) as server, _client(library) as client:
        response = client.get(server.url)
        assert response.status_code == int(no[:3])
        assert response.text == "busy"
        assert len(server.requests) == 1


def test_C68_the_producers_word_makes_a_failure_retryable(library: Any) -> None:
    with FlakyServer("500 Oh|Should-Retry: true") as server, _client(library) as client:
        assert client.post(server.url, headers=NO_KEY).status_code == 200


def test_C68_R15_a_problem_that_was_not_read_yet_has_its_word(library: Any) -> None:
    with FlakyServer(f"502 Bad|{PROBLEM}|{NO}") as server, _client(library) as client:
        answer = client.get(server.url)
        assert (answer.status_code, answer.json(), len(server.requests)) == (
            502,
            {"retryable": False},
            1,
        )
        assert answer.elapsed.total_seconds() > 0
    with FlakyServer(f"422 No|{PROBLEM}|{YES}") as server, _client(library) as client:
        assert client.post(server.url, headers=NO_KEY).status_code == 200
        assert server.connections == 1  # the one before was read to its end, and is used again


def test_C68_a_problem_can_be_streamed_after_its_word_was_read(library: Any) -> None:
    async def main() -> None:
        transport = AsyncRetryTransport(library.AsyncHTTPTransport(), policy=POLICY)
        with FlakyServer(f"502 Bad|{PROBLEM}|{NO}", f"422 No|{PROBLEM}|{YES}") as server:
            async with (
                library.AsyncClient(transport=transport, timeout=5) as client,
                client.stream("GET", server.url) as answer,
            ):
                assert [part async for part in answer.aiter_raw()] == [NO.encode()]
            assert len(server.requests) == 1

    run(main())
    with (
        FlakyServer(f"502 Bad|{PROBLEM}|{NO}") as server,
        _client(library) as client,
        client.stream("GET", server.url) as answer,
    ):
        assert b"".join(answer.iter_raw()) == NO.encode()


def test_the_last_answer_is_returned_when_attempts_are_used_up(library: Any) -> None:
    with FlakyServer(*["502 Bad"] * 3) as server, _client(library) as client:
        assert client.get(server.url).text == "busy"
        assert len(server.requests) == 3


def test_C57_B107_a_one_shot_body_is_not_sent_again_and_the_answer_says_so(library: Any) -> None:
    def parts() -> Iterator[bytes]:
        yield b"part"

    for body in (parts(), iter([b"part"])):
        notes: list[str] = []
        with FlakyServer("429 Slow") as server:
            transport = RetryTransport(library.HTTPTransport(), policy=POLICY)
            request = library.Request("POST", server.url, content=body)
            response = transport.handle_request(request)
            notes.append(response.retrysafe_note)
            response.close()
            transport.close()
            assert response.status_code == 429
            assert server.bodies == [b"part"]
        assert "can't be replayed" in notes[0]


def test_B108_a_one_shot_body_that_broke_is_not_sent_again_and_the_error_says_so(
    library: Any,
) -> None:
    with FlakyServer("act-reset") as server, _client(library) as client:
        with pytest.raises(library.TransportError) as caught:
            client.put(server.url, content=iter([b"part"]))
        assert "can't be replayed" in "".join(caught.value.__notes__)
        assert server.effects == 1


class _Anew:
    def __iter__(self) -> Iterator[bytes]:
        yield b"pa"
        yield b"rt"


def test_B107_bodies_that_can_be_replayed_are_the_same_each_time(library: Any) -> None:
    # httpx announces the whole file, wherever it stands: there it has to stand at its beginning.
    file = io.BytesIO(b"..part" if library is httpx2 else b"part")
    file.seek(-4, io.SEEK_END)
    for body in (b"part", "part", _Anew(), file):
        with FlakyServer("act-reset", "429 Slow") as server, _client(library) as client:
            assert client.post(server.url, content=body).text == "part"
            assert server.bodies == [b"part"] * 3


def test_a_multipart_file_is_rewound(library: Any) -> None:
    with FlakyServer("429 Slow") as server, _client(library) as client:
        client.post(server.url, files={"f": io.BytesIO(b"content")})
        first, second = server.bodies
        assert first == second
        assert b"content" in first


def test_an_open_breaker_refuses_before_anything_is_sent(library: Any) -> None:
    breaker = CircuitBreaker("one", BreakerPolicy(min_calls=2, failure_rate=0.5))
    with FlakyServer(*["502 Bad"] * 9) as server:
        with _client(library, breaker=breaker) as client, pytest.raises(BreakerOpen):
            client.get(server.url)
        assert breaker.state == "open"
        assert len(server.requests) == 2


def test_with_breaker_true_each_host_has_its_own(library: Any) -> None:
    seen: list[str] = []

    def make(host: str) -> CircuitBreaker:
        seen.append(host)
        return CircuitBreaker(host)

    with FlakyServer() as server, _client(library, breaker=make) as client:
        client.get(server.url)
        assert seen == [f"127.0.0.1:{server.port}"]
    with FlakyServer() as server, _client(library, breaker=True) as client:
        assert client.get(server.url).status_code == 200


def test_inside_another_retry_the_transport_sends_once(library: Any) -> None:
    with FlakyServer(*["act-reset"] * 20, dedupe=True) as server, _client(library) as client:
        with pytest.raises(library.TransportError):
            POLICY.call(lambda: client.post(server.url))
        assert len(server.requests) == 3
        assert len(set(server.keys)) == 1


def test_a_connection_of_an_answer_that_is_retried_goes_back(library: Any) -> None:
    limits = library.Limits(max_connections=1)
    transport = RetryTransport(library.HTTPTransport(limits=limits), policy=POLICY)
    with (
        FlakyServer("429 Slow", "429 Slow") as server,
        library.Client(transport=transport, timeout=0.5) as client,
    ):
        assert client.get(server.url).status_code == 200


def test_B109_an_answer_that_breaks_off_in_its_body_is_the_callers_to_repeat(library: Any) -> None:
    with FlakyServer("half-body") as server, _client(library) as client:
        with pytest.raises(library.RemoteProtocolError):
            client.get(server.url)
        assert len(server.requests) == 1


def test_C51_an_attempt_waits_no_longer_than_the_deadline_around_it(library: Any) -> None:
    transport = RetryTransport(library.HTTPTransport(), policy=POLICY)
    with (
        FlakyServer("act-silent") as server,
        library.Client(transport=transport, timeout=None) as client,
        deadline(0.3),
        pytest.raises(library.ReadTimeout) as caught,
    ):
        client.get(server.url)
    assert len(attempts_of(caught.value)) == 1


def test_a_wrapped_transport_finds_the_content_it_expects(library: Any) -> None:
    seen: list[bytes] = []

    class Fake(library.BaseTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            seen.append(request.content)
            return library.Response(429 if len(seen) == 1 else 200)

    with library.Client(transport=RetryTransport(Fake(), policy=POLICY)) as client:
        assert client.post("http://test/", json={"a": 1}).status_code == 200
    assert seen[0] == seen[1] != b""


def test_the_default_transport_is_of_the_clients_library(library: Any) -> None:
    with (
        FlakyServer("act-reset") as server,
        library.Client(transport=RetryTransport(policy=POLICY)) as client,
    ):
        assert type(client.get(server.url)) is library.Response


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent", "half", "429 Slow"])
def test_the_async_transport_repeats_as_the_sync_one_does(library: Any, fault: str) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"part"

    async def main() -> None:
        transport = AsyncRetryTransport(policy=POLICY)
        async with library.AsyncClient(transport=transport, timeout=0.5) as client:
            with FlakyServer(fault, dedupe=True) as server:
                assert (await client.post(server.url, content=b"1")).text == "1"
                assert server.effects == 1
                assert len(set(server.keys)) == 1
            with FlakyServer("act-reset") as server:
                with pytest.raises(library.TransportError) as caught:
                    await client.put(server.url, content=parts())
                assert "can't be replayed" in "".join(caught.value.__notes__)

    run(main())
