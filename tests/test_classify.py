"""What the end of a call means: exceptions, answers, and the word of who sent them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import json
import socket
import ssl
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import httpx2
import pydantic
import pytest
import redis
import requests
import urllib3

from retrysafe import errors, retry_after
from retrysafe.answers import body_may_say
from retrysafe.classify import Classification, Outcome, classify

NOW = 1_800_000_000.0
TRANSIENT, THROTTLED, REJECTED = Outcome.TRANSIENT, Outcome.THROTTLED, Outcome.REJECTED
UNKNOWN, PROTOCOL, NOT_READY = Outcome.UNKNOWN, Outcome.PROTOCOL, Outcome.NOT_READY


def answer(status: int, headers: Any = None, **more: Any) -> Any:
    return SimpleNamespace(status_code=status, headers=headers or {}, **more)


def refused() -> OSError:
    return OSError(errno.ECONNREFUSED, "refused")


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def connector_error() -> Exception:
    return aiohttp.ClientConnectorError(
        SimpleNamespace(host="h", port=1, ssl=None),  # type: ignore[arg-type]
        ConnectionRefusedError(),
    )


POOL: Any = urllib3.HTTPConnectionPool("h")
REQUEST: Any = SimpleNamespace(real_url="http://h/")

NEVER_SENT = [
    ConnectionRefusedError("down"),
    refused(),
    socket.gaierror(-2, "no such name"),
    httpx.ConnectError("refused"),
    httpx.ConnectTimeout("slow"),
    httpx.PoolTimeout("full"),
    httpx2.ConnectError("refused"),
    requests.ConnectTimeout("slow"),
    requests.ConnectionError(
        urllib3.exceptions.MaxRetryError(
            POOL, "/", urllib3.exceptions.NewConnectionError(POOL, "refused")
        )
    ),
    urllib3.exceptions.NameResolutionError("h", POOL, socket.gaierror(-2, "x")),
    connector_error(),
    aiohttp.ConnectionTimeoutError("slow"),
    redis.ConnectionError("Error 111 connecting to h:1. Connection refused."),
    redis.ConnectionError("Error 113 connecting to h:1. No route to host."),
    redis.ConnectionError("Error -2 connecting to h:1. Name or service not known."),
    redis.TimeoutError("Timeout connecting to server"),
    redis.exceptions.MaxConnectionsError("full"),
    errors.StoreUnavailable(reason="down"),
    errors.BreakerOpen("pay", 3.0),
]

MAY_HAVE_RUN = [
    ConnectionResetError("reset"),
    BrokenPipeError(),
    TimeoutError(),
    TimeoutError(),
    concurrent.futures.TimeoutError(),
    OSError(errno.ETIMEDOUT, "timed out"),
    asyncio.IncompleteReadError(b"", 3),
    httpx.ReadTimeout("slow"),
    httpx.WriteError("broken"),
    httpx.RemoteProtocolError("Server disconnected without sending a response."),
    httpx2.ReadError("reset"),
    requests.ReadTimeout("slow"),
    requests.ConnectionError(
        urllib3.exceptions.ProtocolError("Connection aborted.", ConnectionResetError())
    ),
    requests.exceptions.ChunkedEncodingError("cut"),
    aiohttp.ServerDisconnectedError(),
    aiohttp.SocketTimeoutError("slow"),
    aiohttp.ClientPayloadError("cut"),
    redis.ConnectionError("Connection closed by server."),
    redis.TimeoutError("slow"),
]

PROGRAM = [
    TypeError("x"),
    ValueError("x"),
    AssertionError("x"),
    KeyError("x"),
    AttributeError("x"),
    ZeroDivisionError("x"),
    NotImplementedError("x"),
    httpx.UnsupportedProtocol("ftp"),
    requests.exceptions.MissingSchema("no scheme"),
]

DEFINITE = [
    PermissionError(errno.EACCES, "denied"),
    FileNotFoundError(errno.ENOENT, "gone"),
    redis.exceptions.AuthenticationError("wrong password"),
    redis.exceptions.NoPermissionError("no"),
    redis.exceptions.ResponseError("WRONGTYPE of value"),
    errors.FingerprintMismatch("k"),
    errors.StepFailed("ocr", "s1", "bad input", retryable=False),
    errors.StepFailed("ocr", "s1", "bad input"),
    errors.Reentered("k"),
]

MALFORMED = [
    json.JSONDecodeError("x", "", 0),
    httpx.DecodingError("gzip"),
    httpx.RemoteProtocolError("illegal status line"),
    requests.exceptions.ContentDecodingError("gzip"),
    aiohttp.ContentTypeError(REQUEST, (), status=200, message="html"),
    errors.ProtocolError("ocr", "s1", "no status"),
]


def name(value: Any) -> str:
    return f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"


@pytest.mark.parametrize("error", NEVER_SENT, ids=name)
def test_C69_what_never_left_is_transient_and_safe_to_repeat(error: Exception) -> None:
    found = classify(error)
    assert (found.outcome, found.sent, found.may_have_run) == (TRANSIENT, False, False)


@pytest.mark.parametrize("error", MAY_HAVE_RUN, ids=name)
def test_B103_what_broke_after_sending_is_of_unknown_outcome(error: Exception) -> None:
    found = classify(error)
    assert found.outcome is UNKNOWN
    assert found.retryable(repeatable=True)
    assert not found.retryable(repeatable=False)


@pytest.mark.parametrize("error", [ConnectionError("x"), OSError("x")], ids=name)
def test_a_bare_connection_error_will_pass_and_may_have_run(error: Exception) -> None:
    found = classify(error)
    assert (found.outcome, found.may_have_run) == (TRANSIENT, True)


@pytest.mark.parametrize("error", PROGRAM, ids=name)
def test_B090_an_error_of_the_program_is_final_and_says_nothing_of_the_endpoint(
    error: Exception,
) -> None:
    found = classify(error)
    assert (found.outcome, found.proves_health) == (REJECTED, None)


def test_B090_a_validation_error_of_pydantic_is_final() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("x")
    assert classify(caught.value).outcome is REJECTED


@pytest.mark.parametrize("error", DEFINITE, ids=name)
def test_a_definite_refusal_is_final(error: Exception) -> None:
    assert classify(error).outcome is REJECTED


@pytest.mark.parametrize("error", MALFORMED, ids=name)
def test_an_answer_that_cannot_be_understood_is_a_protocol_failure(error: Exception) -> None:
    found = classify(error)
    assert (found.outcome, found.retryable(True)) == (PROTOCOL, False)


def test_a_certificate_that_is_not_trusted_is_final_wherever_it_is_found() -> None:
    cause = ssl.SSLCertVerificationError("self signed")
    for error in (cause, caused(httpx.ConnectError("tls"), cause)):
        assert classify(error).outcome is REJECTED
    assert classify(requests.exceptions.SSLError(cause)).outcome is not UNKNOWN


@pytest.mark.parametrize(
    "error",
    [
        redis.exceptions.BusyLoadingError("loading"),
        redis.exceptions.ReadOnlyError("failover"),
        redis.exceptions.TryAgainError("slots move"),
        redis.exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
        BlockingIOError(errno.EAGAIN, "again"),
    ],
    ids=name,
)
def test_what_a_server_puts_off_was_not_run(error: Exception) -> None:
    found = classify(error)
    assert (found.outcome, found.may_have_run) == (TRANSIENT, False)


def test_a_call_in_flight_is_not_ready_and_says_when() -> None:
    found = classify(errors.InFlight("k", retry_after=2.5))
    assert (found.outcome, found.retry_after) == (NOT_READY, 2.5)


def test_what_nothing_is_known_about_is_unknown_and_not_retried() -> None:
    class InsufficientBalance(Exception):
        pass

    found = classify(InsufficientBalance("no"))
    assert (found.outcome, found.recognised) == (UNKNOWN, False)
    assert not found.retryable(repeatable=True)


@pytest.mark.parametrize("word", [True, False])
def test_C68_an_error_that_says_whether_to_retry_is_believed(word: bool) -> None:
    class Vendor(Exception):
        retryable: Any = word

    assert classify(Vendor()).retryable(False) is word
    Vendor.retryable = "yes"  # not a typed flag
    assert not classify(Vendor()).recognised
    found = classify(errors.StepFailed("ocr", "s1", "out of memory", retryable=word))
    assert found.retryable(False) is word


def test_causes_are_walked_and_a_known_error_in_front_of_them_wins() -> None:
    assert classify(caused(RuntimeError("call failed"), ConnectionResetError())).outcome is UNKNOWN
    assert classify(caused(ValueError("bad"), ConnectionResetError())).outcome is REJECTED
    hidden = RuntimeError("x")
    hidden.__context__ = ConnectionResetError()
    assert classify(hidden).recognised
    hidden.__suppress_context__ = True
    assert not classify(hidden).recognised


def test_B103_what_was_only_being_handled_is_no_proof_that_nothing_ran() -> None:
    # A fallback: the refusal is another server's, and what the fallback did is not known.
    error = RuntimeError("lost")
    error.__context__ = ConnectionRefusedError()
    found = classify(error)
    assert (found.outcome, found.sent, found.may_have_run) == (TRANSIENT, True, True)
    assert found.retryable(True)
    assert not found.retryable(False)
    found = classify(caused(RuntimeError("lost"), ConnectionRefusedError()))
    assert (found.sent, found.may_have_run) == (False, False)
    behind = caused(RuntimeError("lost"), error)
    assert classify(behind).may_have_run


def test_B103_a_cut_connection_is_not_excused_by_the_refusal_of_another_server() -> None:
    cut = redis.ConnectionError("Connection closed by server.")
    cut.__context__ = ConnectionRefusedError(111, "the primary")
    assert classify(cut).outcome is UNKNOWN


def test_a_circle_of_causes_and_a_very_long_chain_end() -> None:
    one, two = RuntimeError(), RuntimeError()
    one.__cause__, two.__cause__ = two, one
    assert not classify(one).recognised
    error: Exception = ConnectionResetError()
    for _ in range(5000):
        error = caused(RuntimeError(), error)
    assert not classify(error).recognised


def test_the_member_that_forbids_most_decides_a_group() -> None:
    def group(*members: Exception) -> Classification:
        return classify(ExceptionGroup("g", members))

    assert group(refused(), refused()).outcome is TRANSIENT
    assert group(refused(), TimeoutError()).outcome is UNKNOWN
    assert group(refused(), ExceptionGroup("in", [ValueError()])).outcome is REJECTED
    assert not group(refused(), RuntimeError()).recognised
    assert group(refused(), errors.InFlight("k", 4.0)).retry_after == 4.0
    assert not group(*[refused() for _ in range(500)]).retryable(True)


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit(), GeneratorExit()]
)
def test_C42_what_is_no_exception_is_never_classified(error: BaseException) -> None:
    with pytest.raises(TypeError, match="never classified"):
        classify(error)


def test_a_cancelled_cause_is_not_looked_behind() -> None:
    assert not classify(caused(RuntimeError(), asyncio.CancelledError())).recognised


@pytest.mark.parametrize("status", [200, 204, 301, 304])
def test_B088_no_failure_is_a_success(status: int) -> None:
    assert classify(answer(status)).outcome is Outcome.SUCCESS


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 409, 410, 413, 421, 422, 501])
def test_B088_a_definite_status_is_final(status: int) -> None:
    found = classify(answer(status))
    assert (found.outcome, found.proves_health) == (REJECTED, True)


@pytest.mark.parametrize(
    ("status", "outcome", "without_key"),
    [
        (408, TRANSIENT, True),
        (425, TRANSIENT, True),
        (429, THROTTLED, True),
        (500, UNKNOWN, False),
        (502, TRANSIENT, False),
        (504, TRANSIENT, False),
        (599, UNKNOWN, False),
    ],
)
def test_B089_a_passing_status_is_retried_where_that_is_safe(
    status: int, outcome: Outcome, without_key: bool
) -> None:
    found = classify(answer(status))
    assert found.outcome is outcome
    assert found.retryable(repeatable=True)
    assert found.retryable(repeatable=False) is without_key


def test_C67_a_503_is_retried_only_with_word_of_when_it_gets_better() -> None:
    found = classify(answer(503, {"Retry-After": "7"}))
    assert (found.outcome, found.retry_after, found.proves_health) == (TRANSIENT, 7.0, False)
    found = classify(answer(503))
    assert (found.outcome, found.proves_health) == (REJECTED, False)


def test_B089_a_409_with_retry_after_is_not_ready() -> None:
    assert classify(answer(409, {"Retry-After": "1"})).outcome is NOT_READY


@pytest.mark.parametrize("header", ["Should-Retry", "X-Should-Retry", "Stripe-Should-Retry"])
def test_C67_the_word_of_who_answers_wins_over_the_status(header: str) -> None:
    assert classify(answer(409, {header: "true"})).retryable(repeatable=False)
    assert classify(answer(500, {header.lower(): "True"})).outcome is TRANSIENT
    found = classify(answer(429, {header: "false", "Retry-After": "1"}))
    assert (found.outcome, found.retryable(True)) == (REJECTED, False)
    assert classify(answer(500, {header: "false"})).proves_health is False
    assert classify(answer(429, {header: "maybe"})).outcome is THROTTLED


def test_C68_a_problem_document_has_a_word_where_it_is_a_boolean() -> None:
    kind = {"content-type": "application/problem+json; charset=utf-8"}

    def problem(word: object, status: int = 422) -> Classification:
        body = json.dumps({"retryable": word}).encode()
        return classify(httpx.Response(status, headers=kind, content=body))

    assert problem(True).outcome is TRANSIENT
    assert problem(False, 429).outcome is REJECTED
    assert problem("true").outcome is REJECTED
    assert problem(None, 429).outcome is THROTTLED
    assert classify(answer(429, kind, content=b"{no json")).outcome is THROTTLED
    plain = httpx.Response(422, json={"retryable": True})
    assert classify(plain).outcome is REJECTED


@pytest.mark.parametrize(
    ("status", "more", "worth"),
    [
        (422, {}, True),
        (200, {}, False),
        (422, {"Content-Type": "application/json"}, False),
        (422, {"Content-Length": "65537"}, False),
        (422, {"Content-Length": "0"}, False),
        (422, {"Content-Length": "٣"}, False),
        (422, {"Content-Length": "9" * 5000}, False),
        (422, {"Content-Encoding": "gzip"}, False),
        (422, {"Should-Retry": "true"}, False),
        (422, {"Should-Retry": "maybe"}, True),
    ],
)
def test_C68_a_small_problem_whose_headers_dont_say_is_worth_reading(
    status: int, more: dict[str, str], worth: bool
) -> None:
    headers = {"Content-Type": "application/problem+json", "Content-Length": "20", **more}
    assert body_may_say(status, headers) is worth
    assert not body_may_say(status, None)


def test_a_body_that_was_not_read_is_left_alone() -> None:
    def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    kind = {"content-type": "application/problem+json"}
    assert classify(httpx.Response(429, headers=kind, content=body())).outcome is THROTTLED


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(429, headers={"retry-after": "3"}),
        httpx2.Response(429, headers={"retry-after": "3"}),
        SimpleNamespace(status=429, headers={"RETRY-AFTER": "3"}),
        SimpleNamespace(status=429, headers=[(b"retry-after", b"3")]),
    ],
)
def test_the_answers_of_every_client_are_read(response: Any) -> None:
    found = classify(response)
    assert (found.outcome, found.retry_after) == (THROTTLED, 3.0)


def test_an_error_that_stands_for_an_answer_is_judged_as_the_answer() -> None:
    request: Any = httpx.Request("GET", "http://h/")
    given = httpx.Response(503, headers={"Retry-After": "9"}, request=request)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        given.raise_for_status()
    assert classify(caught.value).retry_after == 9.0
    old = requests.Response()
    old.status_code = 429
    assert classify(requests.HTTPError(response=old)).outcome is THROTTLED
    error = aiohttp.ClientResponseError(REQUEST, (), status=404)
    assert classify(error).outcome is REJECTED

    class Vendor(Exception):
        status_code = 429
        headers = {"Retry-After": "2"}  # noqa: RUF012

    assert classify(Vendor()).retry_after == 2.0


def test_any_other_value_is_a_success() -> None:
    for value in (None, 7, {"status": 500}, SimpleNamespace(status="open", headers={})):
        assert classify(value).outcome is Outcome.SUCCESS


def grpc_error(code: str, *trailers: tuple[str, str]) -> Exception:
    """As the real one, by name."""
    base = type("RpcError", (Exception,), {"__module__": "grpc"})
    error: Any = type("Failed", (base,), {})()
    error.code = lambda: SimpleNamespace(name=code)
    error.trailing_metadata = lambda: trailers
    result: Exception = error
    return result


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("UNAVAILABLE", TRANSIENT),
        ("RESOURCE_EXHAUSTED", THROTTLED),
        ("DEADLINE_EXCEEDED", UNKNOWN),
        ("INVALID_ARGUMENT", REJECTED),
    ],
)
def test_the_codes_of_grpc_are_known(code: str, outcome: Outcome) -> None:
    assert classify(grpc_error(code)).outcome is outcome


def test_C67_a_pushback_of_grpc_wins() -> None:
    pushback = "grpc-retry-pushback-ms"
    assert classify(grpc_error("UNAVAILABLE", (pushback, "250"))).retry_after == 0.25
    for text in ("-1", "soon"):
        assert classify(grpc_error("UNAVAILABLE", (pushback, text))).outcome is REJECTED


def test_a_registered_type_is_judged_by_its_function_until_taken_back() -> None:
    class Base(Exception):
        pass

    class Special(Base, ConnectionResetError):
        pass

    take_back = classify.register(Base, lambda error: Outcome.THROTTLED)
    try:
        assert classify(Base()).outcome is THROTTLED
        assert classify(Special()).outcome is THROTTLED
        assert classify(caused(RuntimeError(), Base())).outcome is THROTTLED
    finally:
        take_back()
    assert not classify(Base()).recognised


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, BaseException, 3])
def test_C42_only_a_type_of_exception_can_be_registered(kind: Any) -> None:
    with pytest.raises(TypeError):
        classify.register(kind, lambda error: Outcome.TRANSIENT)


# --- Retry-After ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5.0),
        (" 5 ", 5.0),
        ("0", 0.0),
        ("60.0", 60.0),
        ("60.001", 60.001),
        ("0.5", 0.5),
        ("1.5", 1.5),
        (b"5", 5.0),
        ("9" * 20, 1e20),
    ],
)
def test_C64_B096_a_number_of_seconds_is_a_wait(text: str, seconds: float) -> None:
    assert retry_after.parse(text, NOW) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "-5",
        "1e3",
        "٣",
        "",
        " ",
        "abc",
        "5, 10",
        "NaN",
        "inf",
        "7s",
        "500ms",
        "+5",
        ".5",
        "5.",
        None,
    ],
)
def test_C64_B096_anything_else_is_none(text: str | None) -> None:
    assert retry_after.parse(text, NOW) is None


def test_B096_a_number_beyond_all_floats_is_a_finite_wait() -> None:
    found = retry_after.parse("1" + "0" * 400, NOW)
    assert found == retry_after.LARGEST


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (formatdate(NOW + 30, usegmt=True), 30.0),
        (formatdate(NOW + 60, usegmt=True), 60.0),
        (formatdate(NOW - 30, usegmt=True), 0.0),
        (formatdate(NOW + 2 * 86400 + 29, usegmt=True), 2 * 86400 + 29.0),
        (formatdate(NOW + 30), 30.0),
        ("Sun Nov  6 08:49:37 1994", 0.0),
        ("Sunday, 06-Nov-94 08:49:37 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00", 0.0),
        ("Fri, 15 Jan 2027 08:00:30 GMT", 30.0),
        ("Friday, 15-Jan-27 08:00:30 GMT", 30.0),
        ("Fri Jan 15 08:00:30 2027", 30.0),
    ],
)
def test_C65_a_date_is_a_wait_of_all_the_seconds_until_it(text: str, seconds: float) -> None:
    assert retry_after.parse(text, NOW) == seconds


def test_C64_the_year_9999_is_a_very_long_wait() -> None:
    found = retry_after.parse("Fri, 31 Dec 9999 23:59:59 GMT", NOW)
    assert found is not None
    assert found > 1e11


@pytest.mark.parametrize(
    "text",
    [
        "Wed, 31 Feb 2027 07:28:00 GMT",
        "Wed, 21 Foo 2027 07:28:00 GMT",
        "Wed, 21 Oct 2027 25:28:00 GMT",
        "Wed, 21 Oct 2027 07:28:00 PST",
        "2027-10-21T07:28:00Z",
        "21 Oct 2027",
    ],
)
def test_C64_another_date_is_none(text: str) -> None:
    assert retry_after.parse(text, NOW) is None
