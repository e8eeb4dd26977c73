"""What an HTTP answer says: its status, its `Retry-After`, and the word of who sent it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from retrysafe import retry_after
from retrysafe.outcomes import Classification, Outcome
from retrysafe.timing import timing

__all__ = ["PEEKED", "answer_of", "body_may_say", "classify_status", "header", "is_status"]

# A producer's own word, the first one found: it wins over every status (S1, "not covered").
_WORDS = ("Should-Retry", "X-Should-Retry", "Stripe-Should-Retry")
_LARGEST_BODY = 64 * 1024
# Attributes in which the clients keep a body that was read; never a property, which may read it.
PEEKED = "retrysafe_body"  # where our own clients put one that they read ahead
_BODIES = (PEEKED, "_content", "_body", "content", "body", "text")


def answer_of(subject: object) -> tuple[int, Any] | None:
    """(status, headers) where `subject` is a response of any client or server; else None."""
    headers = getattr(subject, "headers", None)
    for name in ("status_code", "status"):
        status: Any = getattr(subject, name, None)
        if is_status(status):
            return int(status), headers
    return None


def is_status(value: object) -> bool:
    """Whether this can be an HTTP status."""
    return isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599


def header(headers: Any, name: str) -> str | None:
    """The value of a header in whatever mapping (or list of pairs) a client keeps them."""
    found = None
    if isinstance(headers, Mapping) or hasattr(headers, "items"):
        found = headers.get(name)
        if found is None:
            found = next((v for k, v in headers.items() if _text(k).lower() == name.lower()), None)
    elif isinstance(headers, list | tuple):
        found = next((v for k, v in headers if _text(k).lower() == name.lower()), None)
    return None if found is None else _text(found)


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def classify_status(status: int, headers: Any, response: object = None) -> Classification:
    """Judge an answer by its status and headers, and by a problem body that was read already.

    200-399 are successes. Retried: 408, 425, 429, and 503 and 409 with Retry-After (none of these
    was acted upon); 502 and 504, and all other 5xx as UNKNOWN (may have been). Not retried: 503
    without Retry-After (no word of when it gets better, S2), 501, 505 and every other 4xx.
    `Should-Retry`, or `retryable` in an `application/problem+json`, wins over all of that.
    """
    if status < 400:
        return Classification(Outcome.SUCCESS, reason=f"status {status}")
    wait = retry_after.parse(header(headers, "Retry-After"), timing().wall())
    found = _by_status(status, wait)
    said = _word(headers)
    if said is not None:
        name, word = said
        return found.told(word == "true", f"status {status}, {name}: {word}")
    problem = _problem(headers, response)
    if problem is not None:
        return found.told(problem, f"status {status}, retryable: {str(problem).lower()}")
    return found


def _by_status(status: int, wait: float | None) -> Classification:
    reason = f"status {status}"
    if status == 429:
        return Classification(Outcome.THROTTLED, wait, reason)
    if status in (408, 425):
        return Classification(Outcome.TRANSIENT, wait, reason, proves_health=True)
    if status == 409 and wait is not None:
        return Classification(Outcome.NOT_READY, wait, reason)
    if status < 500 or status in (501, 505):
        return Classification(Outcome.REJECTED, wait, reason)
    if status == 503:
        if wait is not None:
            return Classification(Outcome.TRANSIENT, wait, reason)
        reason = "status 503 without Retry-After"
        return Classification(Outcome.REJECTED, None, reason, proves_health=False)
    if status in (502, 504):
        return Classification(Outcome.TRANSIENT, wait, reason, may_have_run=True)
    return Classification(Outcome.UNKNOWN, wait, reason)


def _word(headers: Any) -> tuple[str, str] | None:
    """The producer's word in a header: which one, and `true` or `false`."""
    for name in _WORDS:
        word = (header(headers, name) or "").strip().lower()
        if word in ("true", "false"):
            return name, word
    return None


def body_may_say(status: int, headers: Any) -> bool:
    """Whether a body that was not read yet is worth reading for the producer's word: a problem
    document of known, small size whose headers don't say."""
    length = header(headers, "Content-Length") or ""
    return (
        status >= 400
        and _is_problem(headers)
        and length.isascii()
        and length.isdigit()
        and len(length) < 10
        and 0 < int(length) <= _LARGEST_BODY
        and header(headers, "Content-Encoding") is None
        and _word(headers) is None
    )


def _is_problem(headers: Any) -> bool:
    kind = (header(headers, "Content-Type") or "").split(";")[0].strip().lower()
    return kind == "application/problem+json"


def _problem(headers: Any, response: object) -> bool | None:
    """`retryable` in a problem document, where it is a boolean."""
    if not _is_problem(headers):
        return None
    try:
        held = vars(response)
    except TypeError:
        return None
    for name in _BODIES:
        body = held.get(name)
        if isinstance(body, bytes | str) and 0 < len(body) <= _LARGEST_BODY:
            try:
                document = json.loads(body)
            except (ValueError, RecursionError):
                return None
            word = document.get("retryable") if isinstance(document, dict) else None
            return word if isinstance(word, bool) else None
    return None
