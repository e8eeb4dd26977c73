"""A TCP proxy between the library and a server: it loses replies, cuts, holds and refuses."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType


class Proxy:
    """Listens on a free port and passes bytes on to `upstream`, until it is told otherwise.

    `lose_reply(word)`: the next request that holds `word` is passed on, its reply is dropped and
    the connection cut: the command ran, and the caller doesn't know. `hold()`: connections stay
    open, nothing passes. `cut()`: every connection is closed now.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lose: list[bytes] = []
        self.lost = 0
        self.connections = 0
        self.passed = bytearray()  # everything that clients sent
        self._open = threading.Event()
        self._open.set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply(self, word: bytes) -> None:
        with self._lock:
            self._lose.append(word)

    def hold(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def cut(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._close(pair)

    def close(self) -> None:
        self._closed = True
        self._open.set()
        self._listener.close()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
            except OSError:
                if self._closed:
                    return
                with contextlib.suppress(UnboundLocalError):
                    client.close()
                continue
            pair = (client, server)
            with self._lock:
                self.connections += 1
                self._pairs.add(pair)
            threading.Thread(target=self._pass, args=(pair,), daemon=True).start()

    def _pass(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, server = pair
        losing = False
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            try:
                while True:
                    for key, _ in selector.select():
                        source, target = key.fileobj, key.data
                        assert isinstance(source, socket.socket)
                        data = source.recv(65536)
                        self._open.wait()
                        if not data:
                            return
                        if source is client:
                            losing = losing or self._matches(data)
                        elif losing:
                            self.lost += 1
                            return
                        target.sendall(data)
            except (OSError, ValueError):
                return
            finally:
                self._close(pair)

    def _matches(self, data: bytes) -> bool:
        with self._lock:
            self.passed += data
            for word in self._lose:
                if word in data:
                    self._lose.remove(word)
                    return True
        return False

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with self._lock:
            self._pairs.discard(pair)
        for each in pair:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
