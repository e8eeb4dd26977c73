"""What is known about the exceptions of Python and of the clients: found by name along the class's
ancestors, so that no client is imported to know its errors.

Each says two things apart: was the request sent at all, and may it have had its effect.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

from retrysafe.answers import answer_of, classify_status, is_status
from retrysafe.outcomes import Classification, Outcome

__all__ = ["chain", "known"]

_DEPTH = 20  # how far a chain of causes is followed

Rule = Classification | Callable[[Any], "Classification | None"]

_NEVER_SENT = Classification(Outcome.TRANSIENT, reason="never sent", sent=False)
_NOT_ACTED_ON = Classification(Outcome.TRANSIENT, reason="refused for now")
_BROKEN = Classification(Outcome.TRANSIENT, reason="connection failed", may_have_run=True)
_CUT = Classification(Outcome.UNKNOWN, reason="connection cut after sending")
_TIMEOUT = Classification(Outcome.UNKNOWN, reason="timed out after sending")
_THROTTLED = Classification(Outcome.THROTTLED, reason="throttled")
_REFUSED = Classification(Outcome.REJECTED, reason="definite refusal")
_UNTRUSTED = Classification(Outcome.REJECTED, reason="certificate", sent=False, proves_health=False)
_MALFORMED = Classification(Outcome.PROTOCOL, reason="malformed answer", may_have_run=True)
# An error of the program itself: it fails the same way again, and says nothing of any endpoint.
_PROGRAM = Classification(Outcome.REJECTED, reason="error in the program", proves_health=None)


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it was raised from, or while handling, nearest first; bounded."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < _DEPTH:
        yield at
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def known(error: BaseException) -> Classification | None:
    """What is known about this very exception, its causes left aside."""
    for cls in type(error).__mro__:
        rule = _RULES.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if rule is not None:
            found = rule if isinstance(rule, Classification) else rule(error)
            if found is not None:
                return found
    return _by_response(error)


def _has(error: BaseException, *names: str) -> bool:
    return any(cls.__name__ in names for each in chain(error) for cls in type(each).__mro__)


_CONNECT = frozenset(
    code
    for name in ("ECONNREFUSED", "EADDRNOTAVAIL", "ENETDOWN", "EHOSTDOWN")
    if (code := getattr(errno, name, None)) is not None
)
_PASSING = frozenset(
    {errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOBUFS}
)
_CUT_CODES = frozenset(
    {errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.EIO, errno.ENOTCONN}
)


def _os_error(error: OSError) -> Classification:
    code = error.errno
    if code in _CONNECT:
        return _NEVER_SENT
    if code in _PASSING:
        return _NOT_ACTED_ON
    if code in _CUT_CODES:
        return _CUT
    if code == errno.ETIMEDOUT:
        return _TIMEOUT
    if code is None or code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return _BROKEN
    return _REFUSED


def _connecting(error: BaseException) -> Classification:
    return _UNTRUSTED if _has(error, "SSLCertVerificationError") else _NEVER_SENT


def _by_response(error: BaseException) -> Classification | None:
    """An error that stands for an answer, of whatever client or server."""
    response = getattr(error, "response", None)
    answer = answer_of(error if response is None else response)
    if answer is None and response is None:
        status: Any = getattr(error, "code", None)  # urllib's
        answer = (status, getattr(error, "headers", None)) if is_status(status) else None
    if answer is None or answer[0] < 400:
        return None
    return classify_status(*answer, response)


def _httpx_protocol(error: BaseException) -> Classification:
    # A server that hung up, before its answer or within it: nothing malformed was answered.
    text = str(error).lower()
    return _CUT if "disconnected" in text or "closed connection" in text else _MALFORMED


def _aiohttp_answer(error: BaseException) -> Classification | None:
    # It puts a status of 400 on answers that it can't read.
    return _MALFORMED if _has(error, "HttpProcessingError") else _by_response(error)


def _reason(error: Any) -> Classification | None:
    """An error of requests or urllib3 that carries the one it stands for, as `reason` or first
    argument."""
    if _has(error, "SSLCertVerificationError"):
        return _UNTRUSTED
    inner = getattr(error, "reason", None)
    for each in (inner, *error.args[:2]):
        if isinstance(each, BaseException) and each is not error and (found := known(each)):
            return found
    return _CUT


def _redis_connection(error: BaseException) -> Classification:
    # Only its text tells: what it was raised while handling may be the failure of another server.
    text = str(error)
    if text.startswith("Error") and " connecting" in text:
        return _connecting(error)
    return _CUT


def _redis_timeout(error: BaseException) -> Classification:
    return _NEVER_SENT if str(error).startswith("Timeout connecting") else _TIMEOUT


def _redis_answer(error: BaseException) -> Classification:
    word = str(error).partition(" ")[0]
    passing = ("LOADING", "BUSY", "TRYAGAIN", "MASTERDOWN", "CLUSTERDOWN", "NOREPLICAS", "READONLY")
    return _NOT_ACTED_ON if word in passing else _REFUSED


def _grpc(error: Any) -> Classification | None:
    code = getattr(error, "code", None)
    name = getattr(code() if callable(code) else code, "name", "")
    metadata = getattr(error, "trailing_metadata", None)
    wait: float | None = None
    for key, value in (metadata() if callable(metadata) else None) or ():
        if key == "grpc-retry-pushback-ms":
            text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
            if not (text.isascii() and text.isdigit()):
                return Classification(Outcome.REJECTED, reason="pushback: don't retry")
            wait = min(float(text), 1e300) / 1000
    outcome, may_have_run = _GRPC.get(name, (Outcome.REJECTED, False))
    return Classification(outcome, wait, f"grpc {name}", may_have_run=may_have_run)


_GRPC = {
    "UNAVAILABLE": (Outcome.TRANSIENT, True),
    "ABORTED": (Outcome.TRANSIENT, False),
    "RESOURCE_EXHAUSTED": (Outcome.THROTTLED, False),
    "DEADLINE_EXCEEDED": (Outcome.UNKNOWN, True),
    "UNKNOWN": (Outcome.UNKNOWN, True),
    "INTERNAL": (Outcome.UNKNOWN, True),
    "DATA_LOSS": (Outcome.UNKNOWN, True),
}


def _table(root: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"{root}.{name}": rule for names, rule in rules.items() for name in names.split()}


_HTTPX: dict[str, Rule] = {
    "ConnectError ProxyError": _connecting,
    "ConnectTimeout PoolTimeout": _NEVER_SENT,
    "ReadTimeout WriteTimeout TimeoutException": _TIMEOUT,
    "ReadError WriteError CloseError NetworkError": _CUT,
    "RemoteProtocolError": _httpx_protocol,
    "LocalProtocolError UnsupportedProtocol TooManyRedirects InvalidURL StreamError": _PROGRAM,
    "DecodingError": _MALFORMED,
    "HTTPStatusError": _by_response,
}

_RULES: dict[str, Rule] = {
    **_table(
        "builtins",
        {
            "ConnectionRefusedError": _NEVER_SENT,
            "ConnectionResetError ConnectionAbortedError BrokenPipeError EOFError": _CUT,
            "ConnectionError": _BROKEN,
            "TimeoutError": _TIMEOUT,
            "BlockingIOError InterruptedError": _NOT_ACTED_ON,
            "FileNotFoundError FileExistsError PermissionError IsADirectoryError "
            "NotADirectoryError ChildProcessError ProcessLookupError": _REFUSED,
            "OSError": _os_error,
            "TypeError ValueError AssertionError LookupError AttributeError NameError "
            "ArithmeticError NotImplementedError RecursionError ImportError SyntaxError "
            "BufferError StopIteration StopAsyncIteration": _PROGRAM,
        },
    ),
    **_table("socket", {"gaierror herror": _NEVER_SENT}),
    **_table("ssl", {"SSLCertVerificationError": _UNTRUSTED, "SSLError": _CUT}),
    **_table(
        "http",
        {"RemoteDisconnected IncompleteRead": _CUT, "BadStatusLine HTTPException": _MALFORMED},
    ),
    **_table("json", {"JSONDecodeError": _MALFORMED}),
    **_table(
        "urllib",
        {"HTTPError": _by_response, "ContentTooShortError": _CUT, "URLError": _reason},
    ),
    **_table("httpx", _HTTPX),
    **_table("httpx2", _HTTPX),
    **_table(
        "httpcore",
        {
            "ConnectError ProxyError": _connecting,
            "ConnectTimeout PoolTimeout": _NEVER_SENT,
            "TimeoutException": _TIMEOUT,
            "NetworkError": _CUT,
            "RemoteProtocolError": _httpx_protocol,
        },
    ),
    **_table(
        "requests",
        {
            "ConnectTimeout": _NEVER_SENT,
            "Timeout": _TIMEOUT,
            "ProxyError": _connecting,
            "SSLError": _connecting,
            "ConnectionError RetryError": _reason,
            "ChunkedEncodingError": _CUT,
            "ContentDecodingError InvalidJSONError": _MALFORMED,
            "HTTPError": _by_response,
            "RequestException": _PROGRAM,
        },
    ),
    **_table(
        "urllib3",
        {
            "ConnectTimeoutError NewConnectionError PoolError": _NEVER_SENT,
            "MaxRetryError": _reason,
            "ReadTimeoutError TimeoutError": _TIMEOUT,
            "ProxyError": _connecting,
            "SSLError": _connecting,
            "ProtocolError": _CUT,
            "DecodeError": _MALFORMED,
        },
    ),
    **_table(
        "aiohttp",
        {
            "ClientConnectorCertificateError ServerFingerprintMismatch": _UNTRUSTED,
            "ClientConnectorError ConnectionTimeoutError": _connecting,
            "ServerTimeoutError": _TIMEOUT,
            "ClientPayloadError ClientConnectionError": _CUT,
            "ContentTypeError": _MALFORMED,
            "ClientResponseError": _aiohttp_answer,
            "TooManyRedirects InvalidURL NonHttpUrlClientError": _PROGRAM,
        },
    ),
    **_table(
        "redis",
        {
            "AuthenticationError AuthorizationError NoPermissionError ExternalAuthProviderError "
            "DataError LockError": _REFUSED,
            "MaxConnectionsError": _NEVER_SENT,
            "BusyLoadingError ClusterDownError TryAgainError MasterDownError ReadOnlyError "
            "WatchError AskError MovedError SlotNotCoveredError": _NOT_ACTED_ON,
            "OutOfMemoryError": _THROTTLED,
            "ConnectionError": _redis_connection,
            "TimeoutError": _redis_timeout,
            "InvalidResponse": _MALFORMED,
            "ResponseError": _redis_answer,
        },
    ),
    **_table("grpc", {"RpcError": _grpc}),
}
