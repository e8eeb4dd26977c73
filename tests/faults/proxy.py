"""A TCP proxy between the library and a server: it loses replies, cuts, holds and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, Literal, TypeVar

from tests.faults.resp import answers_a_command, command_end, command_name, end_of

T = TypeVar("T")
Way = Literal["requests", "replies"]
BOTH: tuple[Way, Way] = ("requests", "replies")


class Proxy:
    """Listens on a free port and passes commands and replies on, until it is told otherwise.

    It lives in a thread of its own: sync and async tests call it alike. What it saw so far:
    `commands` (names, in the order they were passed on), `connections` (accepted), `lost`
    (replies dropped by `lose_reply`).
    """

    def __init__(self, upstream: int) -> None:
        self.commands: list[str] = []
        self.connections = 0
        self.lost = 0
        self._upstream = upstream
        self._losing: list[_Nth] = []
        self._cut_after: int | None = None
        self._delay = 0.0
        self._links: set[_Link] = set()
        self._open = {way: asyncio.Event() for way in BOTH}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._closed = False
        self.port = 0
        self.resume()
        self.accept()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def lose_reply(self, word: bytes = b"", nth: int = 1) -> None:
        """The nth command from now on that holds `word` is passed on and runs, but its caller
        doesn't hear of it: the replies before it arrive, then the connection is cut. Once."""
        self._losing.append(_Nth(word, nth))

    def cut_after(self, commands: int) -> None:
        """So many commands more are passed on; the next one is not, and its connection is cut.
        Once."""
        self._cut_after = commands

    def delay_replies(self, seconds: float) -> None:
        """Replies that come in from now on are passed on so much later, in their order."""
        self._delay = seconds

    def hold(self, ways: Iterable[Way] = BOTH) -> None:
        """A black hole: connections are accepted and stay open, nothing passes in these ways."""
        self._run(self._set(ways, False))

    def resume(self, ways: Iterable[Way] = BOTH) -> None:
        """Pass on again, beginning with what was held."""
        self._run(self._set(ways, True))

    def cut(self) -> None:
        """Close every connection now; what was under way in them is lost."""
        self._run(self._cut())

    def refuse(self) -> None:
        """Refuse new connections; those that are open stay."""
        self._run(self._stop_listening())

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._listen())

    def close(self) -> None:
        """End the proxy, its connections and its thread."""
        if self._closed:
            return
        self._closed = True
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _set(self, ways: Iterable[Way], open: bool) -> None:
        for way in ways:
            if open:
                self._open[way].set()
            else:
                self._open[way].clear()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        self._server.close()

    async def _cut(self) -> None:
        for link in list(self._links):
            link.cut()

    async def _end(self) -> None:
        await self._stop_listening()
        await self._cut()
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            _close_now(writer)
            return
        link = _Link(reader, writer, *upstream)
        link.tasks = [
            asyncio.create_task(way(link))
            for way in (self._requests, self._replies, self._read_replies)
        ]
        self._links.add(link)
        if self._closed:
            link.cut()
        # The first two end it: what was read before the server's end is still passed on.
        await asyncio.wait(link.tasks[:2], return_when=asyncio.FIRST_COMPLETED)
        self._links.discard(link)
        link.end()
        for ended in await asyncio.gather(*link.tasks, return_exceptions=True):
            # A broken connection and our own cancelling are how it ends; the rest is a bug here.
            if isinstance(ended, Exception) and not isinstance(ended, OSError):
                raise ended

    async def _requests(self, link: _Link) -> None:
        waiting = bytearray()
        while data := await link.client_in.read(65536):
            waiting += data
            while (end := command_end(waiting)) is not None:
                command = bytes(waiting[:end])
                del waiting[:end]
                await self._open["requests"].wait()
                if not self._may_pass(command, link):
                    return
                link.server_out.write(command)
                await link.server_out.drain()

    def _may_pass(self, command: bytes, link: _Link) -> bool:
        """Note a command; False where the connection is to be cut before it."""
        if self._cut_after is not None:
            if self._cut_after == 0:
                self._cut_after = None
                return False
            self._cut_after -= 1
        self.commands.append(command_name(command))
        link.asked += 1
        if link.lose is None and self._is_to_lose(command):
            link.lose = link.asked
        return True

    def _is_to_lose(self, command: bytes) -> bool:
        for each in self._losing:
            if each.word in command:
                each.left -= 1
                if each.left == 0:
                    self._losing.remove(each)
                    return True
        return False

    async def _read_replies(self, link: _Link) -> None:
        try:
            while data := await link.server_in.read(65536):
                link.replies.put_nowait((self._loop.time() + self._delay, data))
        finally:
            link.replies.put_nowait((0.0, b""))

    async def _replies(self, link: _Link) -> None:
        waiting = bytearray()
        while True:
            due, data = await link.replies.get()
            await asyncio.sleep(due - self._loop.time())
            await self._open["replies"].wait()
            if not data:
                return
            waiting += data
            while waiting and (end := end_of(waiting)) is not None:
                reply = bytes(waiting[:end])
                del waiting[:end]
                link.answered += answers_a_command(reply)
                if link.answered == link.lose:
                    self.lost += 1
                    return
                link.client_out.write(reply)
            await link.client_out.drain()


class _Nth:
    """The command whose reply is to be lost: how many that hold the word are still to come."""

    def __init__(self, word: bytes, left: int) -> None:
        self.word = word
        self.left = left


class _Link:
    """One client's connection and its twin to the server."""

    def __init__(
        self,
        client_in: asyncio.StreamReader,
        client_out: asyncio.StreamWriter,
        server_in: asyncio.StreamReader,
        server_out: asyncio.StreamWriter,
    ) -> None:
        self.client_in, self.client_out = client_in, client_out
        self.server_in, self.server_out = server_in, server_out
        self.replies: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        """When each piece is due, by the loop's clock; an empty one is the end."""
        self.asked = self.answered = 0
        self.lose: int | None = None
        self.tasks: list[asyncio.Task[None]] = []

    def end(self) -> None:
        """Close both; the client still gets what was passed on to it."""
        for task in self.tasks:
            task.cancel()
        self.client_out.close()
        _close_now(self.server_out)

    def cut(self) -> None:
        _close_now(self.client_out)
        self.end()


def _close_now(writer: asyncio.StreamWriter) -> None:
    # Shut down, not only closed: a forked child may hold the socket open.
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    writer.transport.abort()
