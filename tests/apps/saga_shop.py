"""A saga of five steps whose effects are lines in a file, and ways to die on the way.

Run in processes of their own by tests/faults/test_saga_crashes.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrysafe import Fixed, RetryPolicy, Saga
from retrysafe.stores.redis import RedisStore

STEPS = "abcde"
LEASE = 0.4


class Refused(Exception):
    retryable = False


class Death:
    """Kills this process before or after the n-th event of a kind ("eval", or "a", "-b", …)."""

    def __init__(self, kind: str = "", number: int = 0, moment: str = "") -> None:
        self.kind, self.number, self.moment = kind, number, moment
        self.seen: dict[str, int] = {}

    def around(self, kind: str, act: Callable[[], Any]) -> Any:
        self._meet(kind, "before")
        result = act()
        self._meet(kind, "after")
        return result

    async def aaround(self, kind: str, act: Callable[[], Any]) -> Any:
        self._meet(kind, "before")
        result = await act()
        self._meet(kind, "after")
        return result

    def _meet(self, kind: str, moment: str) -> None:
        if moment == "before":
            self.seen[kind] = self.seen.get(kind, 0) + 1
        if (kind, self.seen[kind], moment) == (self.kind, self.number, self.moment):
            os.kill(os.getpid(), signal.SIGKILL)


class DyingStore(RedisStore):
    """A real store; its process dies around one of its scripts. Renewals come when they come and
    are not counted."""

    death = Death()

    def open(self) -> Any:
        return _Door(super().open(), self.death)

    def open_async(self) -> Any:
        return _AsyncDoor(super().open_async(), self.death)


class _Door:
    def __init__(self, door: Any, death: Death) -> None:
        self._door, self._death = door, death

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)

    def eval(self, script: str, keys: Any, args: Any) -> Any:
        if script == "saga_renew":
            return self._door.eval(script, keys, args)
        return self._death.around("eval", lambda: self._door.eval(script, keys, args))


class _AsyncDoor(_Door):
    async def eval(self, script: str, keys: Any, args: Any) -> Any:
        if script == "saga_renew":
            return await self._door.eval(script, keys, args)
        return await self._death.aaround("eval", lambda: self._door.eval(script, keys, args))


def built(url: str, ledger: Path, colour: str, death: Death, **options: Any) -> Saga:
    """The shop's saga. The order says at which step it fails ("" for none)."""
    store = DyingStore(url, "tests")
    store.death = death
    options = {"lease": LEASE, "undo_backoff": Fixed(0.05), **options}
    options.setdefault("retry", RetryPolicy(attempts=2, deadline=5, backoff=Fixed(0.01)))
    saga = Saga(f"shop-{colour}", store, **options)

    def note(ctx: Any, what: str) -> None:
        line = f"{ctx.saga_id} {what} {ctx.key}\n".encode()
        with ledger.open("ab", buffering=0) as file:
            death.around(what, lambda: file.write(line))

    def add(name: str) -> None:
        def do(ctx: Any, fails: str) -> dict[str, str]:
            if name == fails:
                raise Refused
            note(ctx, name)
            return {"made": name}

        def undo(ctx: Any, data: dict[str, str] | None) -> None:
            assert data == {"made": name} or (data is None and ctx.maybe)
            note(ctx, f"-{name}")

        async def ado(ctx: Any, fails: str) -> dict[str, str]:
            await asyncio.sleep(0)
            return do(ctx, fails)

        async def aundo(ctx: Any, data: dict[str, str] | None) -> None:
            await asyncio.sleep(0)
            undo(ctx, data)

        sync = colour == "sync"
        saga.step(name=name, undo=undo if sync else aundo)(do if sync else ado)

    for each in STEPS:
        add(each)
    return saga


def call(saga: Saga, colour: str, name: str, *args: Any) -> Any:
    """One of the saga's methods, in its colour."""
    if colour == "sync":
        return getattr(saga, f"{name}_sync")(*args)

    async def main() -> Any:
        return await getattr(saga, name)(*args)

    return asyncio.run(main())


def run(url: str, ledger: Path, colour: str, id: str, fails: str, death: tuple[Any, ...]) -> None:
    """A process that runs one saga, and may die of it."""
    from retrysafe.errors import SagaFailed

    saga = built(url, ledger, colour, Death(*death))
    try:
        call(saga, colour, "run", id, fails)
    except SagaFailed as failed:
        assert failed.step == fails, failed


def recover(url: str, ledger: Path, colour: str, death: tuple[Any, ...], out: Any = None) -> None:
    """A process that recovers until nothing is left, and may die of it."""
    import time

    saga = built(url, ledger, colour, Death(*death))
    taken: list[tuple[str, str]] = []
    end = time.monotonic() + 60
    while call(saga, colour, "unfinished"):
        found = call(saga, colour, "recover")
        taken += [(each.id, each.status) for each in found]
        assert time.monotonic() < end, "there is always something left"
        time.sleep(0.02)
    if out is not None:
        out.put(taken)


def many(url: str, ledger: Path, count: int) -> None:
    """A process that dies while it runs many sagas, each in its third step."""

    async def main() -> None:
        saga = built(url, ledger, "async", Death())
        inside: list[str] = []

        @saga.step(name="f")
        async def last(ctx: Any, fails: str) -> None:
            inside.append(ctx.saga_id)
            if len(inside) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)

        await asyncio.gather(*(saga.run(f"many-{n}", "") for n in range(count)))

    asyncio.run(main())


def recover_many(url: str, ledger: Path, out: Any) -> None:
    """One of several processes that recover what `many` left."""
    import time

    async def main() -> None:
        saga = built(url, ledger, "async", Death())

        @saga.step(name="f")
        async def last(ctx: Any, fails: str) -> None:
            with ledger.open("ab", buffering=0) as file:
                file.write(f"{ctx.saga_id} f {ctx.key}\n".encode())

        taken: list[tuple[str, str]] = []
        end = time.monotonic() + 60
        while await saga.unfinished():
            taken += [(each.id, each.status) for each in await saga.recover()]
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        out.put(taken)

    asyncio.run(main())


def terminated(url: str, ledger: Path, ready: Any) -> None:
    """A process that is told to end (SIGTERM) while its third step runs, as a server is."""

    async def main() -> None:
        saga = built(url, ledger, "async", Death())

        @saga.step(name="f")
        async def last(ctx: Any, fails: str) -> None:
            ready.set()
            await asyncio.sleep(60)

        task = asyncio.ensure_future(saga.run("term", ""))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await task

    asyncio.run(main())


def nothing(ctx: Any, data: Any) -> None:
    """The undo of what is known not to have happened."""


def sleeper(url: str, ledger: Path, ready: Any) -> None:
    """A process that stands still (SIGSTOP) in a step, right before it acts."""
    saga = built(url, ledger, "sync", Death())

    @saga.step(name="f", undo=nothing)
    def last(ctx: Any, fails: str) -> None:
        ready.set()
        os.kill(os.getpid(), signal.SIGSTOP)
        ctx.check()
        with ledger.open("ab", buffering=0) as file:
            file.write(f"{ctx.saga_id} LATE {ctx.key}\n".encode())

    saga.run_sync("late", "")
