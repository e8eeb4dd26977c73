"""A real HTTP server that fails as it is told, and counts what took effect."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter

__all__ = ["FlakyServer"]

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


class FlakyServer:
    """Each request takes the next word of `plan`; where none is left, `ok`.

    `ok` acts and echoes the body; `close` hangs up before reading; `act-reset`, `act-silent`,
    `slow-body` (a byte at a time), `half` (breaks off in the headers) and `half-body` act first;
    anything else is a status with headers, as `503 Busy|Retry-After: 0`, and a body where one
    begins with a brace. With `dedupe` a key acts once.
    """

    def __init__(self, *plan: str, dedupe: bool = False) -> None:
        self.plan = list(plan)
        self.dedupe = dedupe
        self.effects = 0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0
        self._acted: Counter[str] = Counter()
        self._silent = threading.Event()
        self._held: list[socket.socket] = []
        self._serving: list[threading.Thread] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/orders"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def keys(self) -> list[str | None]:
        return [headers.get("idempotency-key") for _, headers, _ in self.requests]

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.requests]

    def __enter__(self) -> FlakyServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._silent.set()
        # A shutdown wakes the accepting thread; a close alone does not.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._socket.close()
        for held in self._held:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        for thread in self._serving:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self._held.append(peer)
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._serving.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        stream = peer.makefile("rb")
        try:
            while self._one(peer, stream):
                pass
        except (OSError, ValueError):
            return
        finally:
            stream.close()
            peer.close()

    def _one(self, peer: socket.socket, stream: object) -> bool:
        if self.plan and self.plan[0] == "close":
            del self.plan[0]
            return False
        read = stream.readline  # type: ignore[attr-defined]
        first = read()
        if not first:
            return False
        headers: dict[str, str] = {}
        while (line := read().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        body = b""
        if "content-length" in headers:
            body = stream.read(int(headers["content-length"]))  # type: ignore[attr-defined]
        elif "chunked" in headers.get("transfer-encoding", ""):
            while size := int(read().strip(), 16):
                body += stream.read(size)  # type: ignore[attr-defined]
                read()
            read()
        word = self.plan.pop(0) if self.plan else "ok"
        self.requests.append((first.split()[0].decode(), headers, body))
        if word[0].isdigit():
            status, *more = word.split("|")
            answer = next((part for part in more if part[0] == "{"), "busy")
            more = [part for part in more if part[0] != "{"]
            lines = [f"HTTP/1.1 {status}", *more, f"Content-Length: {len(answer)}", "", answer]
            peer.sendall("\r\n".join(lines).encode())
            return True
        key = headers.get("idempotency-key", "")
        if not (self.dedupe and key and self._acted[key]):
            self.effects += 1
        self._acted[key] += 1
        if word == "act-reset":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        if word == "act-silent":
            self._silent.wait(30)
            return False
        if word == "slow-body":
            head, body = _OK % (len(body), body), b""
            for at in range(len(head)):
                peer.sendall(head[at : at + 1])
                time.sleep(0.005)
            return True
        if word == "half-body":
            peer.sendall(_OK % (10, b"123"))
            return False
        if word == "half":
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Le")
            return False
        peer.sendall(_OK % (len(body), body))
        return True
