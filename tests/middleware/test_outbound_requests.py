"""The adapter for requests, against a server that fails as servers do."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from retrysafe import attempts_of, deadline
from retrysafe.backoff import Fixed
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.context import RequestContext, entered
from retrysafe.errors import BreakerOpen
from retrysafe.middleware.requests import RetryAdapter
from retrysafe.retrying import RetryPolicy
from tests.middleware.flaky import FlakyServer
from tests.servers import free_port

POLICY = RetryPolicy(attempts=3, deadline=None, backoff=Fixed(0.001))
NO_KEY = {"Idempotency-Key": ""}
PROBLEM = "Content-Type: application/problem+json"
NO, YES = '{"retryable": false}', '{"retryable": true}'
# Not among the faults: an answer that breaks off in its headers, which http.client takes as whole.


class _Session(requests.Session):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.trust_env = False
        self.mount("http://", RetryAdapter(**{"policy": POLICY, **options}))

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", 0.5)
        return super().request(*args, **kwargs)


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_B103_idempotent_methods_are_repeated_after_every_fault(method: str, fault: str) -> None:
    with FlakyServer(fault) as server, _Session() as session:
        assert session.request(method, server.url).status_code == 200


@pytest.mark.parametrize("fault", ["act-reset", "act-silent"])
def test_B103_a_post_without_a_key_acts_once_and_the_error_says_why(fault: str) -> None:
    with FlakyServer(fault) as server, _Session() as session:
        with pytest.raises(requests.RequestException) as caught:
            session.post(server.url, data=b"1", headers=NO_KEY)
        assert server.effects == 1
        assert "its outcome is unknown" in "".join(caught.value.__notes__)
        assert server.keys == [None]


@pytest.mark.parametrize("fault", ["close", "act-reset", "act-silent"])
def test_B103_a_post_with_a_key_is_repeated_with_that_key(fault: str) -> None:
    with FlakyServer(fault, fault, dedupe=True) as server, _Session() as session:
        answer = session.post(server.url, data=b"1", headers={"Idempotency-Key": "mine"})
        assert answer.status_code == 200
        assert server.effects == 1
        assert set(server.keys) == {"mine"}


def test_an_answer_that_trickles_in_is_waited_for_and_not_repeated() -> None:
    with FlakyServer("act-reset", "slow-body", dedupe=True) as server, _Session() as session:
        assert session.post(server.url, data=b"x" * 100).content == b"x" * 100
        assert (len(server.requests), server.effects) == (2, 1)


def test_C69_what_was_never_sent_is_repeated_without_a_key() -> None:
    with _Session() as session, pytest.raises(requests.ConnectionError) as caught:
        session.post(f"http://127.0.0.1:{free_port()}/", data=iter([b"1"]), headers=NO_KEY)
    assert len(attempts_of(caught.value)) == 3


def test_C58_B110_one_key_for_a_call_and_another_for_the_next() -> None:
    with FlakyServer("act-reset", "act-reset", dedupe=True) as server, _Session() as session:
        request = requests.Request("POST", server.url, data=b"1").prepare()
        session.send(request)
        session.send(request)
        assert len(server.keys) == 4
        assert None not in server.keys
        assert len(set(server.keys[:3])) == 1
        assert server.keys[3] != server.keys[0]
        assert server.effects == 2


def test_inside_keyed_work_a_rerun_sends_the_same_keys_and_the_request_id() -> None:
    with FlakyServer("act-reset") as server, _Session() as session:
        for _ in range(2):
            with entered(RequestContext("request-1", key="ab" * 32)):
                session.post(server.url)
                session.put(server.url)
        assert server.keys[0] == server.keys[1]
        assert server.keys[1:3] == server.keys[3:]
        assert {headers["x-request-id"] for _, headers, _ in server.requests} == {"request-1"}


@pytest.mark.parametrize("busy", ["503 Busy|Retry-After: 0", "429 Slow", "429 Slow|Retry-After: 0"])
def test_C64_C66_an_answer_that_asks_for_a_retry_gets_one(busy: str) -> None:
    with FlakyServer(busy) as server, _Session() as session:
        assert session.post(server.url, data=b"1").text == "1"


@pytest.mark.parametrize("no", ["503 Down", "404 No", "503 Busy|Retry-After: 3600"])
def test_C64_C67_a_definite_no_and_a_long_wait_are_returned_as_they_are(no: str) -> None:
    with FlakyServer(no) as server, _Session() as session:
        answer = session.get(server.url)
        assert (answer.status_code, answer.text) == (int(no[:3]), "busy")
        assert len(server.requests) == 1


class _Anew:
    def __iter__(self) -> Iterator[bytes]:
        yield b"pa"
        yield b"rt"


def test_B107_bodies_that_can_be_replayed_are_the_same_each_time() -> None:
    file = io.BytesIO(b"..part")
    file.seek(2)
    for body in (b"part", "part", _Anew(), file):
        with FlakyServer("act-reset", "429 Slow") as server, _Session() as session:
            assert session.post(server.url, data=body).text == "part"
            assert server.bodies == [b"part"] * 3


def test_C57_B108_a_one_shot_body_is_not_sent_again_and_it_is_said_why() -> None:
    with FlakyServer("429 Slow", "act-reset") as server, _Session() as session:
        answer: Any = session.put(server.url, data=iter([b"part"]))
        assert answer.status_code == 429
        assert "can't be replayed" in answer.retrysafe_note
        with pytest.raises(requests.ConnectionError) as caught:
            session.put(server.url, data=iter([b"part"]))
        assert "can't be replayed" in "".join(caught.value.__notes__)
        assert server.bodies == [b"part"] * 2


def test_an_open_breaker_refuses_before_anything_is_sent() -> None:
    breaker = CircuitBreaker("one", BreakerPolicy(min_calls=2, failure_rate=0.5))
    with FlakyServer(*["502 Bad"] * 9) as server, _Session(breaker=breaker) as session:
        with pytest.raises(BreakerOpen):
            session.get(server.url)
        assert len(server.requests) == 2


def test_a_second_layer_of_retries_is_refused() -> None:
    with pytest.raises(TypeError, match="max_retries"):
        RetryAdapter(max_retries=3)


def test_C51_an_attempt_waits_no_longer_than_the_deadline_around_it() -> None:
    with (
        FlakyServer("act-silent") as server,
        _Session() as session,
        deadline(0.3),
        pytest.raises(requests.ReadTimeout),
    ):
        session.get(server.url, timeout=None)


def test_C68_R15_a_problem_that_was_not_read_yet_has_its_word() -> None:
    with FlakyServer(f"502 Bad|{PROBLEM}|{NO}") as server, _Session() as session:
        answer = session.get(server.url)
        assert (answer.status_code, answer.json()) == (502, {"retryable": False})
        assert len(server.requests) == 1
    with FlakyServer(f"422 No|{PROBLEM}|{YES}") as server, _Session() as session:
        assert session.post(server.url, headers=NO_KEY).status_code == 200


def test_a_problem_that_is_to_be_streamed_is_left_to_the_caller() -> None:
    with FlakyServer(f"422 No|{PROBLEM}|{NO}") as server, _Session() as session:
        assert session.get(server.url, stream=True).raw.read() == NO.encode()
