"""The envelope of a result: what a producer in any language writes, read by an allow-list.

    {"status": "done", "content": <any JSON>}
    {"status": "error", "message": "<text>", "retryable": true | false | null}

Other members are ignored. Whatever else comes is a ProtocolError, never a success and never a
reason to wait (S1).
"""

from __future__ import annotations

from typing import Any

import msgspec

from retrysafe.errors import NotEncodable, ProtocolError, StepFailed
from retrysafe.sanitize import sanitize

__all__ = ["done", "error", "opened"]

MESSAGE_LIMIT = 2000  # characters of a producer's text that are kept
_NAME_LIMIT = 60


def done(content: Any) -> bytes:
    """The payload of a success. Raises NotEncodable."""
    return _encoded({"status": "done", "content": content})


def error(message: str, retryable: bool | None = None) -> bytes:
    """The payload of a failure; `retryable`: whether the producer thinks that a retry may help."""
    if not isinstance(message, str):
        raise TypeError(f"message takes text, not {message!r}")
    if retryable is not None and not isinstance(retryable, bool):
        raise TypeError(f"retryable takes True, False or None, not {retryable!r}")
    payload: dict[str, Any] = {"status": "error", "message": sanitize(message, MESSAGE_LIMIT)}
    if retryable is not None:
        payload["retryable"] = retryable
    return _encoded(payload)


def opened(payload: bytes, step: str, server: str, content: Any = Any) -> Any:
    """The content of a success, converted to the type `content`.

    Raises StepFailed with the producer's words, made safe; ProtocolError for anything else.
    """

    def malformed(reason: str) -> ProtocolError:
        return ProtocolError(step, server, reason, payload)

    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        raise malformed("invalid_utf8") from None
    try:
        envelope = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError):
        raise malformed("not_json") from None
    if not isinstance(envelope, dict):
        raise malformed("not_an_object")
    if "status" not in envelope:
        raise malformed("missing_status")
    status = envelope["status"]
    if not isinstance(status, str):
        raise malformed("status_not_text")
    if status == "done":
        try:
            return msgspec.convert(envelope.get("content"), content)
        except (msgspec.ValidationError, RecursionError):
            raise malformed("content_of_another_type") from None
    if status == "error":
        message = envelope.get("message", "")
        if not isinstance(message, str):
            raise malformed("message_not_text")
        retryable = envelope.get("retryable")
        if retryable is not None and not isinstance(retryable, bool):
            raise malformed("retryable_not_boolean")
        raise StepFailed(step, server, sanitize(message, MESSAGE_LIMIT), retryable)
    raise malformed(f"unknown_status:{sanitize(status, _NAME_LIMIT)}")


def _encoded(envelope: dict[str, Any]) -> bytes:
    try:
        payload = msgspec.json.encode(envelope)
        payload.decode("utf-8")
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise NotEncodable(f"the result can't be written as JSON: {error}") from error
    return payload
