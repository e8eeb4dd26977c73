"""What a process, or an event loop, has of its own: a door to the store, an inbox, the table of
flights, the renewal of leases; and how its flows (`retrysafe.flow`) do what takes time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from retrysafe import commands as c
from retrysafe.commands import Answer, Reply
from retrysafe.errors import StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.finished import FinishedRecords
from retrysafe.flights import Flights
from retrysafe.flow import Flow, Steps, Taken, new_token
from retrysafe.stores.base import Store
from retrysafe.stores.doors import async_door, door
from retrysafe.wakers import AsyncPlace, ThreadPlace

logger = logging.getLogger("retrysafe")

T = TypeVar("T")

# The renewal thread looks up this often, so that an idle one ends soon (seconds).
_LINGER = 1.0
# How long (seconds) a subscription may take, and a refused one is not asked for again.
_HEAR = 1.0
_DEAF = 5.0
# And how much longer than it may take an answer is looked for that may be there already.
_UNREAD = 0.02


# Leases are renewed at about a third: due from here on, looked at this often (parts of a lease).
_DUE = 0.28
_LOOK = 1 / 6


def renewal_due(taken: Taken, now: float) -> bool:
    """Whether enough of a lease is over."""
    lease = taken.claim.policy.lease
    return now >= taken.lease_until - lease * (1 - _DUE)


def _tell(taken: Taken, kind: str, detail: str = "") -> None:
    ask = taken.claim
    emit(Event(kind, ask.name, ask.scope_digest, ask.request_id, detail=detail))


def renewals(held: Iterable[Taken], now: float) -> list[tuple[Taken, c.Renew]]:
    """What is to be renewed now, as one batch."""
    return [
        (
            taken,
            c.Renew(
                taken.claim.digest,
                taken.token,
                c.micros(taken.claim.policy.lease),
                c.millis(taken.claim.policy.ttl_for(None)),
            ),
        )
        for taken in held
        if not taken.ended and not taken.lost and renewal_due(taken, now)
    ]


def renewed(taken: Taken, answer: Reply | BaseException, asked: float) -> bool:
    """Take note of one renewal's answer. Returns whether the lease was lost by it."""
    if taken.ended:
        return False
    if isinstance(answer, Reply):
        if answer.answer is Answer.REFUSED:
            if taken.finishing:
                return False  # our own finish may have come first; its reply will tell
            taken.lost = True
            _tell(taken, "lease-lost")
            return True
        if answer.answer is Answer.VANISHED:
            _tell(taken, "receipt-vanished")
        taken.lease_until = asked + taken.claim.policy.lease
        return False
    if asked >= taken.lease_until:
        taken.lost = True
        _tell(taken, "lease-lost", "the store was out of reach for a whole lease")
        return True
    _tell(taken, "renewal-failed", type(answer).__name__)
    return False


def note_renewals(
    desk: _Desk,
    due: Sequence[tuple[Taken, c.Renew]],
    answers: Sequence[Reply | Exception],
    asked: float,
) -> None:
    """Take note of a batch's answers. What one receipt's owner does about its loss is kept from
    the others."""
    for (taken, _), answer in zip(due, answers, strict=True):
        if not renewed(taken, answer, asked):
            continue
        desk.flights.leave(taken.place)  # duplicates need not wait for a result that lost
        if taken.on_lost is not None:
            try:
                taken.on_lost()
            except Exception:
                logger.exception("what was to be done about a lost lease failed")


def run(flow: Steps[T]) -> T:
    """Run a flow of a thread's desk to its end, on this thread."""
    try:
        flow.send(None)
    except StopIteration as stop:
        return cast(T, stop.value)
    raise RuntimeError("a thread's flow has nothing to wait for")


class _Desk:
    """What both colours have: the flights, the inbox, the receipts whose leases are renewed."""

    def __init__(self, store: Store, max_waiters: int, new_place: Callable[[], Any]) -> None:
        self.store = store
        self.inbox = new_token()
        self.listening = False
        self.max_waiters = max_waiters
        self.flights = Flights(new_place)
        self.finished = FinishedRecords()
        self._held: dict[int, Taken] = {}
        self._deaf_until = 0.0

    def _next_look(self) -> float | None:
        """Seconds until leases are to be looked at again; None: none is held any more."""
        for name in [name for name, taken in self._held.items() if taken.ended]:
            del self._held[name]
        if not self._held:
            return None
        return min(taken.claim.policy.lease for taken in self._held.values()) * _LOOK

    def _may_listen(self) -> bool:
        """Whether it is worth a try: after a refusal only now and then."""
        return not self.listening and time.monotonic() >= self._deaf_until

    def _heard(self, listening: bool, seconds: float) -> None:
        self.listening = listening
        if not listening and seconds > _HEAR / 2:  # less says nothing: the next call's may stand
            self._deaf_until = time.monotonic() + _DEAF
            emit(Event("inbox-lost", detail="no subscription: duplicates poll"))


class AsyncDesk(_Desk):
    """What one event loop has of a store."""

    def __init__(self, store: Store, max_waiters: int) -> None:
        super().__init__(store, max_waiters, AsyncPlace)
        self.door = async_door(store)
        self.loop = asyncio.get_running_loop()
        self._listen_lock = asyncio.Lock()
        if self.door.forgotten is not None:
            self.finished = FinishedRecords(self._hear_forgotten)
        self._ask_again = 0.0  # when to subscribe to what is forgotten, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # What a flow asks for: coroutines, which its `yield from` takes as it takes another flow.

    def execute(self, command: c.Command, end: float | None = None) -> Steps[Reply]:
        asked = self.door.execute(command) if end is None else self._execute_by(command, end)
        return asked  # type: ignore[return-value]

    def wait(self, place: Any, seconds: float) -> Steps[Any]:
        return place.wait(seconds)  # type: ignore[no-any-return]

    def sleep(self, seconds: float) -> Steps[None]:
        return asyncio.sleep(seconds)  # type: ignore[return-value]

    def listen(self, seconds: float) -> Steps[bool]:
        return self._listen(seconds)  # type: ignore[return-value]

    def spawn(self, flow: Flow[Any]) -> None:
        async def alone() -> None:
            await flow

        task = self.loop.create_task(alone(), name="retrysafe-background")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute_by(self, command: c.Command, end: float) -> Reply:
        asked = self.loop.create_task(self.door.execute(command))
        try:
            # Then a moment more: the loop may have stood still, and the answer lie there unread.
            for seconds in (end - time.monotonic(), _UNREAD):
                await asyncio.wait({asked}, timeout=seconds)
                if asked.done():
                    return asked.result()
        finally:
            asked.cancel()
            del asked  # its error's traceback has this frame
        raise StoreUnavailable(reason="no answer within the wait")

    def hold(self, taken: Taken) -> None:
        """Renew a receipt's lease until `drop`."""
        self._held[id(taken)] = taken
        look = self.loop.time() + taken.claim.policy.lease * _LOOK
        if self._timer is None or self._timer.when() > look:
            self._schedule()

    def drop(self, taken: Taken) -> None:
        self._held.pop(id(taken), None)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        look = self._next_look()
        self._timer = None if look is None else self.loop.call_later(look, self._tick)

    def _tick(self) -> None:
        self._timer = None
        due = renewals(self._held.values(), time.monotonic())
        if due:
            task = self.loop.create_task(self._renew(due), name="retrysafe-renewal")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._schedule()

    async def _renew(self, due: list[tuple[Taken, c.Renew]]) -> None:
        asked = time.monotonic()
        answers = await self.door.execute_many([command for _, command in due])
        note_renewals(self, due, answers, asked)

    def _hear_forgotten(self) -> None:
        now = self.loop.time()
        if now >= self._ask_again:
            self._ask_again = now + _DEAF
            task = self.loop.create_task(self._subscribe(), name="retrysafe-forgotten")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _subscribe(self) -> None:
        channel = self.door.forgotten
        assert channel is not None
        forget = self.finished.forget
        self.finished.heard = await self.door.subscribe(channel, forget, _HEAR)

    async def _listen(self, seconds: float) -> bool:
        end = self.loop.time() + seconds
        try:
            async with asyncio.timeout_at(end):
                await self._listen_lock.acquire()
        except TimeoutError:
            return self.listening  # another call's subscription is under way for so long
        try:
            if not self._may_listen():
                return self.listening
            loop, nudge = self.loop, self.flights.nudge
            same = threading.get_ident()

            def on_message(name: bytes, value: bytes) -> None:
                if threading.get_ident() == same:
                    nudge(name, value)
                elif not loop.is_closed():
                    loop.call_soon_threadsafe(nudge, name, value)

            left = end - loop.time()
            self._heard(await self.door.listen(self.inbox, on_message, left), left)
            return self.listening
        finally:
            self._listen_lock.release()


class Desk(_Desk):
    """What one process has of a store, for its threads."""

    def __init__(self, store: Store, max_waiters: int) -> None:
        super().__init__(store, max_waiters, ThreadPlace)
        self.door = door(store)
        self._listen_lock = threading.Lock()
        self._held_changed = threading.Condition(threading.Lock())
        self._renewer: threading.Thread | None = None

    # What a flow asks for: done at once, so that none of these ever yields.

    def execute(self, command: c.Command, end: float | None = None) -> Steps[Reply]:
        return self.door.execute(command, end)
        yield

    def wait(self, place: Any, seconds: float) -> Steps[Any]:
        return place.wait(seconds)
        yield

    def sleep(self, seconds: float) -> Steps[None]:
        time.sleep(seconds)
        return
        yield

    def listen(self, seconds: float) -> Steps[bool]:
        return self._listen(seconds)
        yield

    def spawn(self, flow: Flow[Any]) -> None:
        threading.Thread(target=run, args=(flow,), name="retrysafe-background", daemon=True).start()

    def hold(self, taken: Taken) -> None:
        """Renew a receipt's lease until `drop`."""
        with self._held_changed:
            self._held[id(taken)] = taken
            if self._renewer is None or not self._renewer.is_alive():
                self._renewer = threading.Thread(
                    target=self._renew_all, name="retrysafe-renewal", daemon=True
                )
                self._renewer.start()
            elif taken.claim.policy.lease * _LOOK < _LINGER:
                self._held_changed.notify()

    def drop(self, taken: Taken) -> None:
        with self._held_changed:
            self._held.pop(id(taken), None)

    def _renew_all(self) -> None:
        while True:
            with self._held_changed:
                look = self._next_look()
                if look is None:
                    self._renewer = None
                    return
                # A shorter lease may come in while this thread sleeps: `hold` wakes it.
                self._held_changed.wait(min(look, _LINGER))
                asked = time.monotonic()
                due = renewals(self._held.values(), asked)
            try:
                answers = self.door.execute_many([command for _, command in due])
            except Exception:
                # Whatever it was, the other leases must not end for it: tried again at once.
                logger.exception("a renewal failed")
                continue
            note_renewals(self, due, answers, asked)

    def _listen(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        if not self._listen_lock.acquire(timeout=seconds):
            return self.listening  # another call's subscription is under way for so long
        try:
            if self._may_listen():
                left = end - time.monotonic()
                self._heard(self.door.listen(self.inbox, self.flights.nudge, left), left)
            return self.listening
        finally:
            self._listen_lock.release()


# A desk lives as long as its process or loop; stores are few and live as long.
_desks: dict[int, Desk] = {}
_async_desks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, AsyncDesk]] = (
    weakref.WeakKeyDictionary()
)
# The desk that was asked for last, by its store: most processes have one loop.
_recent: dict[int, AsyncDesk] = {}
_lock = threading.Lock()


def desk_for(store: Store, max_waiters: int) -> Desk:
    """This process's desk for a store."""
    desk = _desks.get(id(store))
    if desk is None:
        with _lock:
            desk = _desks.get(id(store)) or _desks.setdefault(id(store), Desk(store, max_waiters))
    return desk


def async_desk_for(store: Store, max_waiters: int) -> AsyncDesk:
    """The running loop's desk for a store."""
    loop = asyncio.get_running_loop()
    recent = _recent.get(id(store))
    if recent is not None and recent.store is store and recent.loop is loop:
        return recent
    desks = _async_desks.get(loop)
    if desks is None:
        # A desk holds its loop, so the weak key alone would keep both for ever.
        for ended in [each for each in _async_desks if each.is_closed()]:
            del _async_desks[ended]
        desks = _async_desks[loop] = {}
    desk = desks.get(id(store))
    if desk is None:
        desk = desks[id(store)] = AsyncDesk(store, max_waiters)
    _recent[id(store)] = desk
    return desk


def _after_fork() -> None:
    """A child opens its own: sockets, threads and locks of the parent are not its to use."""
    global _lock
    _lock = threading.Lock()
    _desks.clear()
    _async_desks.clear()
    _recent.clear()


os.register_at_fork(after_in_child=_after_fork)
