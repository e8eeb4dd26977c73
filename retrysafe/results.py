"""Results that arrive out of band: a producer writes a key and nudges a channel, a reader waits.

The producer may be written in any language: `SET <key> <envelope> EX <seconds>`, then
`PUBLISH <channel> <anything>`. The envelope is that of `retrysafe.envelopes`.

One job ID has one result: the first that is written stands, until it is acknowledged or forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from retrysafe import commands, envelopes, result_waiting, units
from retrysafe.deadlines import remaining
from retrysafe.errors import StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.flow import new_token
from retrysafe.nudges import async_nudges_of, nudges_of
from retrysafe.result_waiting import Ask, Effect, Join, Look
from retrysafe.settings import Settings
from retrysafe.stores.base import Store
from retrysafe.stores.doors import async_door, door
from retrysafe.wakers import AsyncWaker, ThreadWaker

__all__ = ["Result", "ResultReader", "ResultWriter"]

T = TypeVar("T")

Mode = Literal["take", "acknowledge"]
MAX_SIZE = 16 * 1024 * 1024
_PLACE = "{job_id}"

_settling: set[asyncio.Future[None]] = set()


@dataclass(frozen=True, slots=True)
class Result:
    """A success. `content` is what the producer sent."""

    job_id: str
    step: str
    server: str
    content: Any
    _store: Store = field(repr=False, compare=False)
    _key: str = field(repr=False)
    _digest: str = field(repr=False)

    async def ack(self) -> bool:
        """Delete the result if it is still the one that was read; returns whether it was.

        For mode `acknowledge`: commit your own state first. Raises StoreUnavailable: then it may
        come again, to whoever waits for it next.
        """
        return bool(
            await async_door(self._store).eval("result_ack", (self._key,), (self._digest,)) == 1
        )

    def ack_sync(self) -> bool:
        """`ack`, for threads."""
        return bool(door(self._store).eval("result_ack", (self._key,), (self._digest,)) == 1)


class _Names:
    """Where the results of a store lie."""

    def __init__(self, store: Store, key: str | None, channel: str | None) -> None:
        self.store = store
        default = f"{store.namespace}:result:{_PLACE}"
        for name, template in (("key", key), ("channel", channel)):
            if template is not None and (not isinstance(template, str) or _PLACE not in template):
                raise ValueError(f"{name} takes a Redis name with {_PLACE} in it, not {template!r}")
        self._key = default if key is None else key
        self._channel = default if channel is None else channel

    def _named(self, job_id: str) -> tuple[str, bytes]:
        """Key and channel of one job. Raises ValueError, TypeError."""
        if not isinstance(job_id, str):
            raise TypeError(f"job_id takes text, not {type(job_id).__name__}")
        try:
            size = len(job_id.encode("utf-8"))
        except UnicodeEncodeError:
            size = 0
        if not 1 <= size <= 512:
            raise ValueError("job_id takes 1 to 512 bytes of text")
        return self._key.replace(_PLACE, job_id), self._channel.replace(_PLACE, job_id).encode()


class ResultReader(_Names):
    """Waits for results, from coroutines (`wait`) and threads (`wait_sync`).

    key, channel: literal Redis names with `{job_id}` in them; default
        `<namespace>:result:{job_id}`, both.
    content: the type that a success holds; another one is a ProtocolError. Default: any.
    max_size: most bytes of a payload; a larger one is a ProtocolError. Default 16 MiB.

    Raises ValueError for names and sizes that can't be used.
    """

    def __init__(
        self,
        store: Store,
        key: str | None = None,
        channel: str | None = None,
        *,
        content: Any = Any,
        max_size: int = MAX_SIZE,
    ) -> None:
        super().__init__(store, key, channel)
        self._content = content
        self._max_size = units.check_integer(max_size, 1)
        self._ttl_ms = commands.millis(Settings.from_env().ttl)

    async def wait(
        self,
        job_id: str,
        *,
        step: str,
        server: str,
        timeout: float,  # noqa: ASYNC109 - mandatory, and followed by a last look
        mode: Mode = "take",
    ) -> Result:
        """The result of a job, as soon as it is there (S1).

        timeout: seconds, the hard cap; a `retrysafe.deadline` in force may shorten it.
        mode: `take` reads and deletes in one step: at most once; another reader gets AlreadyTaken.
            `acknowledge` reads; `result.ack()` deletes, after your own commit: at least once.

        Raises StepFailed (the producer said so), ProtocolError (it can't be understood),
        AlreadyTaken: all at once and for good; `retrysafe.errors.is_terminal` knows them.
        ResultTimeout: nothing came, not even at a last look. Store faults are waited out. A
        cancelled wait takes a last look too: what did arrive is returned or raised instead.
        """
        ask = self._ask(job_id, step, server, timeout, mode)
        backend = async_door(self.store)
        nudges = async_nudges_of(backend)
        waker = AsyncWaker()

        async def look(limit: float) -> Any:
            try:
                async with asyncio.timeout(limit):
                    return await backend.eval("result_look", (ask.key,), ask.script_args)
            except TimeoutError:
                return StoreUnavailable(reason="no answer in time")
            except StoreUnavailable as error:
                return error

        async def perform(effect: Effect) -> Any:
            if isinstance(effect, Look):
                return await look(effect.limit)
            if isinstance(effect, Join):
                return await nudges.join(ask.channel, waker, effect.limit)
            return await waker.wait(effect.seconds)

        try:
            payload = await _run(result_waiting.waiting(ask), perform)
        except asyncio.CancelledError:
            # A look that was under way may have taken it: the same token finds it again.
            seen = await _to_its_end(look(result_waiting.LAST_LOOK))
            rescued = (
                None if isinstance(seen, StoreUnavailable) else result_waiting.found(ask, seen)
            )
            if rescued is None:
                raise
            payload = rescued
            emit(Event("result-rescued"))
        finally:
            nudges.leave(ask.channel, waker)
        if mode == "take":
            # Not awaited: a cancellation here would lose what only this wait has.
            task = asyncio.ensure_future(self._settle(ask))
            _settling.add(task)
            task.add_done_callback(_settling.discard)
        return self._opened(ask, payload)

    def wait_sync(
        self, job_id: str, *, step: str, server: str, timeout: float, mode: Mode = "take"
    ) -> Result:
        """`wait`, for threads. An interrupt (KeyboardInterrupt) ends it at once."""
        ask = self._ask(job_id, step, server, timeout, mode)
        backend = door(self.store)
        nudges = nudges_of(backend)
        waker = ThreadWaker()
        steps = result_waiting.waiting(ask)
        given: Any = None
        try:
            while True:
                try:
                    effect = steps.send(given)
                except StopIteration as stop:
                    payload: bytes = stop.value
                    break
                if isinstance(effect, Look):
                    end = time.monotonic() + effect.limit
                    try:
                        given = backend.eval("result_look", (ask.key,), ask.script_args, end)
                    except StoreUnavailable as error:
                        given = error
                elif isinstance(effect, Join):
                    given = nudges.join(ask.channel, waker, effect.limit)
                else:
                    given = waker.wait(effect.seconds)
        finally:
            nudges.leave(ask.channel, waker)
        if mode == "take":
            try:
                backend.eval("result_settle", (ask.key,), (ask.token,))
            except StoreUnavailable as error:
                _unsettled(error)
        return self._opened(ask, payload)

    async def forget(self, job_id: str) -> bool:
        """Delete a result, read or unread, so that the ID may be used again; whether there was
        one. Raises StoreUnavailable."""
        key, _ = self._named(job_id)
        return bool(await async_door(self.store).eval("result_forget", (key,), ()) == 1)

    def forget_sync(self, job_id: str) -> bool:
        """`forget`, for threads."""
        key, _ = self._named(job_id)
        return bool(door(self.store).eval("result_forget", (key,), ()) == 1)

    async def _settle(self, ask: Ask) -> None:
        try:
            await async_door(self.store).eval("result_settle", (ask.key,), (ask.token,))
        except StoreUnavailable as error:
            _unsettled(error)

    def _ask(self, job_id: str, step: str, server: str, timeout: float, mode: str) -> Ask:
        key, channel = self._named(job_id)
        for name, value in (("step", step), ("server", server)):
            if not isinstance(value, str):
                raise TypeError(f"{name} takes text, not {type(value).__name__}")
        if mode not in ("take", "acknowledge"):
            raise ValueError(f"mode takes 'take' or 'acknowledge', not {mode!r}")
        try:
            timeout = units.check_duration(timeout)
        except ValueError as error:
            raise ValueError(
                f"timeout takes a number of seconds, the hard cap of a wait, not {timeout!r} "
                f"({error})"
            ) from None
        left = remaining()
        return Ask(
            job_id=job_id,
            key=key,
            channel=channel,
            step=step,
            server=server,
            mode=mode,
            timeout=timeout if left is None else min(timeout, left),
            token=new_token(),
            ttl_ms=self._ttl_ms,
            max_size=self._max_size,
        )

    def _opened(self, ask: Ask, payload: bytes) -> Result:
        content = envelopes.opened(payload, ask.step, ask.server, self._content)
        digest = hashlib.sha1(payload, usedforsecurity=False).hexdigest()
        return Result(ask.job_id, ask.step, ask.server, content, self.store, ask.key, digest)


class ResultWriter(_Names):
    """The producer's side; `done` and `error` for coroutines, `done_sync` and `error_sync`.

    ttl: seconds a result waits for its reader; default RETRYSAFE_TTL.
    """

    def __init__(
        self,
        store: Store,
        key: str | None = None,
        channel: str | None = None,
        *,
        ttl: float | None = None,
    ) -> None:
        super().__init__(store, key, channel)
        seconds = Settings.from_env().ttl if ttl is None else units.check_duration(ttl)
        self._ttl_ms = commands.millis(seconds)

    async def done(self, job_id: str, content: Any) -> bool:
        """Write a success. Returns False where the job has another result already: that stands.

        Raises NotEncodable, StoreUnavailable (call it again: writing twice does no harm).
        """
        return await self._write(job_id, envelopes.done(content))

    async def error(self, job_id: str, message: str, retryable: bool | None = None) -> bool:
        """Write a failure; `retryable`: whether a retry may help, None: unknown. Else as `done`."""
        return await self._write(job_id, envelopes.error(message, retryable))

    def done_sync(self, job_id: str, content: Any) -> bool:
        """`done`, for threads."""
        return self._write_sync(job_id, envelopes.done(content))

    def error_sync(self, job_id: str, message: str, retryable: bool | None = None) -> bool:
        """`error`, for threads."""
        return self._write_sync(job_id, envelopes.error(message, retryable))

    async def _write(self, job_id: str, payload: bytes) -> bool:
        keys, args = self._script(job_id, payload)
        return bool(await async_door(self.store).eval("result_write", keys, args) == 1)

    def _write_sync(self, job_id: str, payload: bytes) -> bool:
        keys, args = self._script(job_id, payload)
        return bool(door(self.store).eval("result_write", keys, args) == 1)

    def _script(self, job_id: str, payload: bytes) -> tuple[tuple[str], tuple[Any, ...]]:
        key, channel = self._named(job_id)
        return (key,), (payload, self._ttl_ms, channel, job_id.encode())


async def _to_its_end(look: Coroutine[Any, Any, T]) -> T:
    """Whatever is cancelled meanwhile: what a look has taken nobody else will get."""
    task = asyncio.ensure_future(look)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    return task.result()


async def _run(steps: Generator[Effect, Any, bytes], perform: Any) -> bytes:
    given: Any = None
    while True:
        try:
            effect = steps.send(given)
        except StopIteration as stop:
            payload: bytes = stop.value
            return payload
        given = await perform(effect)


def _unsettled(error: StoreUnavailable) -> None:
    """The result is read; its tombstone keeps the payload until its TTL."""
    emit(Event("result-unsettled", outcome=type(error).__name__))
