"""Problems as `application/problem+json` (RFC 9457), typed `urn:retrysafe:problem:<name>`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from retrysafe import errors


@dataclass(frozen=True, slots=True)
class Problem:
    """One answer in place of the work. `retryable`: whether the same request may succeed later;
    `retry_after` is seconds."""

    status: int
    name: str
    title: str
    detail: str
    retryable: bool
    retry_after: float | None = None

    def render(self, request_id: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body."""
        body = json.dumps(
            {
                "type": f"urn:retrysafe:problem:{self.name}",
                "title": self.title,
                "status": self.status,
                "detail": self.detail,
                "request_id": request_id,
                "retryable": self.retryable,
            }
        ).encode()
        headers = [
            (b"content-type", b"application/problem+json"),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
            (b"should-retry", b"true" if self.retryable else b"false"),
        ]
        if self.retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(self.retry_after))))
        return headers, body


def body_too_large(limit: int) -> Problem:
    """413: over the cap, whether it was declared or sent."""
    return Problem(
        413,
        "body-too-large",
        "The request body is too large",
        f"A request with an idempotency key may carry at most {limit} bytes.",
        retryable=False,
    )


def too_many_receipts(limit: int, retry_after: float) -> Problem:
    """429: the caller has as many receipts as it may. `retry_after`: until the first expires."""
    return Problem(
        429,
        "too-many-receipts",
        "Too many requests are on record",
        f"At most {limit} requests of one caller may be on record at a time. Nothing was run; "
        "requests that are on record are answered.",
        retryable=True,
        retry_after=retry_after,
    )


SCOPE_FAILED = Problem(
    500,
    "scope-failed",
    "The caller could not be told",
    "The service could not tell whose request this is; nothing was run.",
    retryable=True,
)

RESULT_NOT_KEPT = Problem(
    409,
    "result-not-kept",
    "The result was not kept",
    "A request with this key was done, but its result was not kept. It is not run again.",
    retryable=False,
)


def of(error: errors.RetrySafeError) -> Problem:
    """The problem that tells a client of one of our errors."""
    match error:
        case errors.KeyMissing():
            return Problem(400, "key-missing", "The key is missing", str(error), False)
        case errors.KeyInvalid():
            return Problem(400, "key-invalid", "The key can't be used", str(error), False)
        case errors.FingerprintMismatch():
            return Problem(
                422,
                "fingerprint-mismatch",
                "The key belongs to another request",
                "This key was first used with another method, path, query or body. "
                "Use a new key for a new request.",
                False,
            )
        case errors.InFlight():
            return Problem(
                409,
                "in-flight",
                "A request with this key is running",
                str(error),
                error.retryable,
                error.retry_after,
            )
        case errors.Abandoned():
            return Problem(
                409,
                "abandoned",
                "The outcome of the first request is unknown",
                str(error),
                False,
            )
        case errors.StoreUnavailable():
            return Problem(
                503,
                "store-unavailable",
                "The receipt can't be written",
                "The store of receipts is unavailable. Nothing was run; retry with the same key.",
                True,
                error.retry_after,
            )
        case _:
            raise error
