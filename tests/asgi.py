"""A client that speaks ASGI itself: it sees each message, and can hang up where it likes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What came back."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(n.decode("latin-1"), v.decode("latin-1")) for n, v in self.messages[0]["headers"]]

    def header(self, name: str) -> str | None:
        found = [v for n, v in self.headers if n == name.lower()]
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.messages[1:])

    @property
    def replayed(self) -> bool:
        return self.header("idempotent-replayed") == "true"


def http_scope(
    method: str = "POST",
    path: str = "/",
    *,
    query: bytes = b"",
    headers: Iterable[tuple[str, str]] = (),
    **more: Any,
) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query,
        "headers": [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **more,
    }


class Exchange:
    """One request. `hang_up()` is the client leaving."""

    def __init__(self, app: Any, scope: dict[str, Any], chunks: Iterable[bytes] = (b"",)) -> None:
        self.answer = Answer()
        self.app = app
        self.scope = scope
        self._gone = asyncio.Event()
        self._chunks = list(chunks)
        self.send_fails: type[BaseException] | None = None
        self.watched = False  # whether anybody has asked if the client is still there

    def hang_up(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if self._chunks:
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        self.watched = True
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self.send_fails is not None:
            raise self.send_fails("gone")
        self.answer.messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self._gone.set()  # servers say so once the answer is complete

    async def run(self) -> Answer:
        await self.app(self.scope, self.receive, self.send)
        return self.answer


async def post(
    app: Any,
    path: str = "/",
    body: bytes | Iterable[bytes] = b"",
    *,
    key: str | None = "k",
    method: str = "POST",
    headers: Iterable[tuple[str, str]] = (),
    **more: Any,
) -> Answer:
    """One whole request; `key` goes into the header."""
    sent = [*headers]
    if key is not None:
        sent.append(("Idempotency-Key", key))
    chunks = [body] if isinstance(body, bytes) else list(body)
    return await Exchange(app, http_scope(method, path, headers=sent, **more), chunks).run()
