"""A response as it is stored, and as it is replayed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from retrysafe.records import CorruptRecord

Headers = list[tuple[bytes, bytes]]

REPLAYED = b"idempotent-replayed"
ORIGINAL_ID = b"idempotent-original-request-id"

# Never stored, never replayed: what belongs to one connection (RFC 9110, 7.6.1), to one moment,
# or to one caller's session.
_NOT_STORED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"date",
        b"server",
        b"set-cookie",
        b"www-authenticate",
        b"authorization",
        b"authentication-info",
        # A service behind the app may be protected as well: its replays are not ours.
        REPLAYED,
        ORIGINAL_ID,
    }
)


class StoredResponse(msgspec.Struct, array_like=True, frozen=True):
    """Status, headers, body, trailers."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    trailers: list[tuple[bytes, bytes]] = []

    def __repr__(self) -> str:
        return f"StoredResponse({self.status}, {len(self.body)} bytes)"  # it may hold secrets


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredResponse)


def encode(
    status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, trailers: Headers, own: bytes
) -> bytes:
    """The payload of a receipt. `own` is the request-ID header: the retry has its own."""
    kept: Headers = []
    nominated: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"connection":
            nominated += value.lower().split(b",")
        elif lower not in _NOT_STORED and lower != own:
            kept.append((name, value))
    if nominated:  # RFC 9110, 7.6.1: a header named there belongs to the connection as well
        names = {name.strip() for name in nominated}
        kept = [pair for pair in kept if pair[0].lower() not in names]
    if status == 204:  # RFC 9110, 8.6: not allowed there
        kept = [pair for pair in kept if pair[0].lower() != b"content-length"]
    after = [pair for pair in trailers if pair[0].lower() not in _NOT_STORED]
    return _encoder.encode(StoredResponse(status, kept, body, after))


def decode(payload: bytes) -> StoredResponse:
    """Read a payload back. Raises CorruptRecord."""
    try:
        stored = _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptRecord(f"the stored response can't be read: {error}") from None
    if not 100 <= stored.status <= 999:
        raise CorruptRecord("the stored response has a status that is none")
    return stored


def replay_messages(
    stored: StoredResponse, request_id: str, method: str, trailers: bool
) -> list[dict[str, Any]]:
    """The ASGI messages of a replay. `request_id` is the first request's."""
    bodiless = stored.status in (204, 304) or stored.status < 200
    headers = list(stored.headers)
    sized = any(name.lower() == b"content-length" for name, _ in headers)
    if not sized and not bodiless and method != "HEAD":
        headers.append((b"content-length", b"%d" % len(stored.body)))
    headers.append((REPLAYED, b"true"))
    if request_id:
        headers.append((ORIGINAL_ID, request_id.encode("ascii", "replace")))
    start: dict[str, Any] = {
        "type": "http.response.start",
        "status": stored.status,
        "headers": headers,
    }
    messages = [
        start,
        {"type": "http.response.body", "body": b"" if bodiless else stored.body},
    ]
    if stored.trailers and trailers:
        start["trailers"] = True
        messages.append({"type": "http.response.trailers", "headers": stored.trailers})
    return messages
