"""A peer that speaks no Redis, or lies in its words: an error of ours in bounded time."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from retrysafe import errors
from retrysafe.receipts import AsyncReceipts, Receipts
from retrysafe.stores.redis import RedisStore
from tests.receipting import CALL, policy
from tests.support import run


class Hostile:
    """Answers the hello and what else redis-py asks at connect, then `words` to everything."""

    def __init__(self, words: bytes) -> None:
        self._words = words
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._socket.getsockname()[1]}/0"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._speak, args=(connection,), daemon=True).start()

    def _speak(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            try:
                while data := connection.recv(65536):
                    begun = b"EVAL" in data or b"SUBSCRIBE" in data
                    # One word for each command of a pipeline, which redis-py sends at connect.
                    hellos = b"".join(
                        b"%1\r\n$5\r\nproto\r\n:3\r\n" if b"HELLO" in each else b"+OK\r\n"
                        for each in data.split(b"\r\n*")
                    )
                    connection.sendall(self._words if begun else hellos)
            except OSError:
                return

    def close(self) -> None:
        self._socket.close()


WORDS = {
    "noise": bytes(range(256)) * 20,
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "no script's": b"+OK\r\n",
    "a number": b":1\r\n",
    "short": b"*1\r\n:1\r\n",
    "nested": b"*1\r\n" * 5_000,
    "a long array": b"*100000\r\n",
    "a huge string": b"$536870911\r\nab",
    "no answer of ours": b"*3\r\n:99\r\n:0\r\n$0\r\n\r\n",
    "taken, by whom": b"*3\r\n:1\r\n:5\r\n$4\r\nr1D!\r\n",
    "done, with what": b"*3\r\n:3\r\n:0\r\n$3\r\nabc\r\n",
    "a text for a number": b"*3\r\n$1\r\n1\r\n$1\r\n1\r\n$0\r\n\r\n",
    "nil": b"$-1\r\n",
    "nil of RESP3": b"_\r\n",
    "an error inside": b"*3\r\n-ERR x\r\n:0\r\n$0\r\n\r\n",
    "a push nobody asked for": b">3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n*1\r\n:7\r\n",
    "an empty push": b">0\r\n*1\r\n:7\r\n",
    "a short push": b">1\r\n$7\r\nmessage\r\n*1\r\n:7\r\n",
    "too many replies": b"*1\r\n:7\r\n" * 50,
}
# What the multiplexer's own parser gets over, redis-py's does not: a push without a word in it.
ASYNC_ONLY = {"an empty push"}


@pytest.fixture(params=WORDS)
def hostile(request: pytest.FixtureRequest) -> Iterator[str]:
    server = Hostile(WORDS[request.param])
    yield server.url
    server.close()


def test_async_whatever_a_peer_says_nothing_runs_and_the_call_ends(hostile: str) -> None:
    async def main() -> None:
        receipts = AsyncReceipts(RedisStore(hostile, "hostile"), policy(wait=0, lease=0.5))
        async with asyncio.timeout(8):
            with pytest.raises(errors.StoreUnavailable):
                await receipts.begin(CALL)

    run(main())


@pytest.mark.parametrize("words", [name for name in WORDS if name not in ASYNC_ONLY])
def test_sync_whatever_a_peer_says_nothing_runs_and_the_call_ends(words: str) -> None:
    server = Hostile(WORDS[words])
    receipts = Receipts(RedisStore(server.url, "hostile"), policy(wait=0, lease=0.5))
    with pytest.raises(errors.StoreUnavailable):
        receipts.begin(CALL)
    server.close()
