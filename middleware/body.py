"""A request body that was read once, to be read again by the app."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, Any

_IN_MEMORY = 1 << 20
_PIECE = 64 * 1024

Message = dict[str, Any]


class TooLarge(Exception):
    """The body is over the cap."""


class Disconnected(Exception):
    """The client left before the body was whole."""


class Body:
    """Up to a MiB as the chunks that came, beyond it in a temporary file; never both."""

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._at = 0  # what is given next: a chunk, or an offset in the file
        self._given = False

    def append(self, chunk: bytes) -> None:
        """Add the next chunk."""
        if not chunk:
            return
        self.size += len(chunk)
        if self._file is None and self.size > _IN_MEMORY:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the request
            for each in self._chunks:
                self._file.write(each)
            self._chunks.clear()
        if self._file is None:
            self._chunks.append(chunk)
        else:
            self._file.write(chunk)

    def whole(self) -> bytes:
        """The whole body in one piece."""
        if self._file is None:
            return b"".join(self._chunks)
        self._file.seek(0)
        return self._file.read()

    def next(self) -> Message | None:
        """The ASGI message of the next piece, from the first one on; None after the last."""
        if self._given:
            return None
        if self._file is not None:
            self._file.seek(self._at)
            piece = self._file.read(_PIECE)
            self._at += len(piece)
            self._given = self._at >= self.size
        else:
            piece = self._chunks[self._at] if self._chunks else b""
            self._at += 1
            self._given = self._at >= len(self._chunks)
        return {"type": "http.request", "body": piece, "more_body": not self._given}

    def close(self) -> None:
        """Drop what was kept."""
        self._given = True
        self._chunks.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


async def read_body(
    body: Body,
    receive: Any,
    declared: int | None,
    limit: int,
    on_chunk: Callable[[bytes], None],
) -> None:
    """Read the whole body. Raises TooLarge, Disconnected.

    What is over the limit is read on, to a bound, and dropped: a client that still sends would
    not read the answer, and the connection could not be used again.
    """
    too_large = declared is not None and declared > limit
    drain = 4 * limit + (1 << 20)
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk, more = message.get("body", b""), message.get("more_body", False)
        if not too_large and body.size + len(chunk) > limit:
            too_large = True
            body.close()
        if too_large:
            drain -= len(chunk)
            if drain < 0 or not more:
                raise TooLarge
            continue
        on_chunk(chunk)
        body.append(chunk)
        if not more:
            return
