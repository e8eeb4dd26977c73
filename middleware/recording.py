"""The app's answer on its way out: passed on as it comes, recorded before its last byte."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrysafe.errors import RecordCorrupt
from retrysafe.events import Event, emit
from retrysafe.middleware.response_record import Headers, encode
from retrysafe.receipts import AsyncHeld
from retrysafe.records import Record

if TYPE_CHECKING:
    from retrysafe.middleware.responder import Responder

logger = logging.getLogger("retrysafe")

Scope = MutableMapping[str, Any]

# Definite answers are kept. These 4xx are not definite: the same request may do better later, or
# says nothing about the work (a caller who was not let in, a version conflict, a limit).
NOT_KEPT = frozenset({400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 423, 425, 429})

_HINTS = frozenset({"http.response.early_hint", "http.response.push", "http.response.debug"})


def kept_by_default(status: int) -> bool:
    """Whether a response is recorded: 2xx, 3xx and definite 4xx."""
    return 200 <= status < 500 and status not in NOT_KEPT


class Recording:
    """The `send` of one keyed request."""

    def __init__(self, responder: Responder, held: AsyncHeld) -> None:
        self._responder = responder
        self._held = held
        self._start: MutableMapping[str, Any] | None = None
        self._start_sent = False
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._size = 0
        self._trailers: Headers = []
        self._concluded = False
        self.send_error: Exception | None = None
        self._gone = False

    @staticmethod
    def prepare(scope: Scope) -> None:
        """Make the scope the app's: without extensions whose bytes can't be recorded, and with the
        spec version in which an app goes on when its client leaves. Below 2.4 Starlette's streams
        stop at a disconnect; the work would be released after its side effect."""
        extensions = dict(scope.get("extensions") or {})
        extensions.pop("http.response.zerocopysend", None)
        scope["extensions"] = extensions
        scope["asgi"] = {**scope.get("asgi", {}), "spec_version": "2.4"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """ASGI's send, as the app sees it."""
        kind = message["type"]
        if kind == "http.response.start" and self._start is None:
            self._begin(message)
        elif self._concluded or kind in _HINTS or self._start is None:
            await self.flush()
            await self._forward(message)
        elif kind == "http.response.body":
            self._keep(message.get("body", b""))
            ended = not message.get("more_body", False)
            await self._pass(message, last=ended and not self._start.get("trailers"))
        elif kind == "http.response.pathsend":
            await self._file(message)
        elif kind == "http.response.trailers":
            self._trailers += [(bytes(n), bytes(v)) for n, v in message.get("headers", ())]
            await self._pass(message, last=not message.get("more_trailers", False))
        else:
            await self.flush()  # nothing overtakes the start
            await self._forward(message)

    async def flush(self) -> None:
        """Pass on a start that was held back."""
        if self._start is not None and not self._start_sent:
            self._start_sent = True
            await self._forward(self._start)

    def _begin(self, message: MutableMapping[str, Any]) -> None:
        # Held until the next message: until then another owner's record can still be answered.
        self._status = message["status"]
        self._headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
        self._start = {**message, "headers": self._responder.identified(self._headers)}

    async def _file(self, message: MutableMapping[str, Any]) -> None:
        path, cap = Path(message["path"]), self._responder.policy.max_response_body
        try:
            size = (await asyncio.to_thread(path.stat)).st_size
            if size > cap:
                self._size = size
                self._chunks.clear()
            else:
                self._keep(await asyncio.to_thread(path.read_bytes))
        except OSError:
            logger.exception("a file that was sent can't be recorded")
            self._size = cap + 1
        assert self._start is not None
        await self._pass(message, last=not self._start.get("trailers"))

    def _keep(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._responder.policy.max_response_body:
            self._chunks.clear()
        elif chunk:
            self._chunks.append(bytes(chunk))

    async def _pass(self, message: MutableMapping[str, Any], *, last: bool) -> None:
        if not last:
            await self.flush()
            await self._forward(message)
            return
        # Before the app goes on: what it does after its answer may block this loop for longer than
        # the lease, or end the process.
        self._concluded = True
        won: list[Any] | None = None
        if self._kept():
            payload, ttl = self._result()
            won = self._answer_of(await self._held.finish(payload, ttl))
            self._responder.recorded(ttl)
        else:
            await self._responder.release(self._held)
        if won is None:
            won = [message] if self._start_sent else [self._start, message]
            self._start_sent = True
        await self._forward(*won)

    def _result(self) -> tuple[bytes | None, float]:
        """What is recorded, and for how many seconds."""
        responder = self._responder
        policy = responder.policy
        payload = None
        if self._size <= policy.max_response_body:
            own = responder.middleware.id_header
            payload = encode(
                self._status, self._headers, b"".join(self._chunks), self._trailers, own
            )
        else:
            emit(
                Event(
                    "result-not-kept",
                    self._held.name,
                    request_id=responder.request_id,
                    detail="too large",
                )
            )
        self._chunks.clear()
        return payload, policy.ttl_for(self._status)

    def _answer_of(self, won: Record | None) -> list[Any] | None:
        """Another owner's answer, where that is the one that stands and nothing was sent yet."""
        if won is None or won.payload is None or self._start_sent:
            return None
        try:
            answer = self._responder.replay_of(won)
        except RecordCorrupt:
            return None  # the work is done: its own answer is the truth that is left
        self._start_sent = True
        return answer

    def _kept(self) -> bool:
        decision = self._held.control.decision
        if decision is not None:
            return decision
        keep = self._responder.policy.keep
        if keep is None:
            return kept_by_default(self._status)
        try:
            return bool(keep(self._status, self._headers))
        except Exception:
            # The work is done: the default decides, the answer isn't lost.
            logger.exception("policy.keep failed; the default decides")
            return kept_by_default(self._status)

    async def _forward(self, *messages: MutableMapping[str, Any]) -> None:
        """Send to the client. A client that is gone ends the sending, not the work."""
        if self._gone:
            return
        try:
            for message in messages:
                await self._responder.send(message)
        except OSError:
            self._gone = True
        except Exception as error:
            self._gone = True
            self.send_error = error
