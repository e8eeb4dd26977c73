"""A breaker's state in Redis: every process that uses the name sees one breaker.

What is shared, and when:
- A call that succeeds while the breaker is closed costs no round trip. Successes are counted here
  and travel with the next failure, or with the look below.
- A failure or slow call is reported at once, in one script that adds it to the window of all
  processes and opens the breaker at the threshold. Its answer tells this process the state.
- Whoever makes it open, close or obey an operator tells so on the breaker's channel, in the same
  step: the next call of every other process asks first. That message may be lost, so:
- A process looks in the background when its last word is older than a second and a call
  comes; when that word is older than five (an idle or a new process), the call itself
  asks first.
- A half-open permit is one script: a lease on the server's clock, given back by the verdict or, if
  the holder dies, by its end. Each opening, closing and operator's word starts a new generation;
  what belongs to an older one changes nothing.
- Redis out of reach: calls go through a breaker of this process alone until it answers again; a
  verdict that can't be told is dropped, with an event. It is never the endpoint's failure.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from retrysafe.breaker_local import LocalCore
from retrysafe.breaker_permit import Permit, ProbePermit
from retrysafe.breaker_remote import STALE, Call, Era, Remote, Steps
from retrysafe.breaker_states import Verdict
from retrysafe.errors import BreakerOpen, StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.nudges import async_nudges_of, nudges_of
from retrysafe.stores.base import Store
from retrysafe.stores.doors import async_door, door

# The longest wait for one answer in async code.
LIMIT = 2.0

T = TypeVar("T")

_cores: weakref.WeakSet[SharedCore] = weakref.WeakSet()


def _after_fork() -> None:
    for core in tuple(_cores):
        core._remote.forked()


os.register_at_fork(after_in_child=_after_fork)


class SharedCore:
    """The door of one process to a breaker in Redis; `local` stands in while Redis is away."""

    here = False

    def __init__(self, store: Store, local: LocalCore) -> None:
        self._store = store
        self.local = local
        self.name = local.name
        self._clock = local.clock
        self._draw = local.draw
        self._policy = local.policy
        self._slow_call = local.policy.slow_call
        self._remote = Remote(store.namespace, local.name, local.policy, local.clock, local.draw)
        self._looking_until = float("-inf")
        self._tasks: set[asyncio.Task[Any]] = set()
        _cores.add(self)
        self._heard: weakref.WeakSet[Any] = weakref.WeakSet()  # the doors that tell us of moves

    def acquire(self) -> Permit:
        era = self._remote.era
        if era.free and self._clock() < era.fresh and not self._remote.out:
            return Permit(self, era, 0, self._clock() if self._slow_call is not None else 0.0)
        return self._run(self._admit())

    async def aacquire(self) -> Permit:
        era = self._remote.era
        if era.free and self._clock() < era.fresh and not self._remote.out:
            return Permit(self, era, 0, self._clock() if self._slow_call is not None else 0.0)
        steps = self._admit()
        try:
            first = next(steps)
        except StopIteration as done:
            permit: Permit = done.value
            return permit
        task = self._spawn(self._arun(steps, first))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The permit may be granted by now or soon: nobody is left to use it.
            task.add_done_callback(self._give_back)
            raise

    def _admit(self) -> Steps[Permit]:
        now = self._clock()
        era = self._remote.era
        if self._remote.out:
            if now >= self._remote.out_until:
                self._look_soon(now)
            return self._stand_in(now)
        self._hear()
        if now < era.asked + STALE:
            if now >= era.fresh:
                self._look_soon(now)
            if era.free:
                return Permit(self, era, 0, now)
            if era.state == "forced-open":
                raise self._refused(self._policy.open_for)
            if now < era.quiet:
                raise self._refused(era.retry_at - now)
        token = secrets.randbits(62) + 1
        rules = self._policy
        try:
            word, era, wait = self._learn((yield self._remote.ask(token)), now)
        except StoreUnavailable as fault:
            self._remote.lost(fault)
            return self._stand_in(now)
        if word == 1:
            return Permit(self, era, 0, now)
        if word == 2:
            return ProbePermit(self, era, token, now)
        if era.state == "half-open":
            wait = min(wait, rules.open_for)  # a slot may come back at any moment
        raise self._refused(rules.open_for if era.state == "forced-open" else wait)

    def _refused(self, retry_after: float) -> BreakerOpen:
        emit(Event("breaker-rejected", key=self.name, outcome=self._remote.era.state))
        return BreakerOpen(self.name, max(0.0, retry_after))

    def _stand_in(self, now: float) -> Permit:
        """Redis is away: its last word holds as long as it was meant to, then we judge alone."""
        era = self._remote.era
        if era.state == "disabled":
            return Permit(self, era, 0, now)
        if era.state == "forced-open":
            raise self._refused(self._policy.open_for)
        if era.state == "open" and now < era.quiet:
            raise self._refused(era.retry_at - now)
        return self.local.acquire()

    def succeed(self, permit: Permit) -> bool:
        return self.settle(permit, Verdict.SUCCESS)

    def settle(self, permit: Permit, verdict: Verdict) -> bool:
        """In a running event loop the report goes out in the background, and the answer is what
        this process believes; `asettle` waits for Redis's word."""
        early = self._settle_here(permit, verdict)
        if early is not None:
            return early
        steps = self._report(permit, verdict)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._run(steps)
        self._spawn(self._arun(steps))
        return permit._era is self._remote.era

    async def asettle(self, permit: Permit, verdict: Verdict) -> bool:
        early = self._settle_here(permit, verdict)
        if early is not None:
            return early
        # Shielded and bounded: a caller cancelled here still gives its slot back.
        return await asyncio.shield(self._spawn(self._arun(self._report(permit, verdict))))

    def _settle_here(self, permit: Permit, verdict: Verdict) -> bool | None:
        """Take the one verdict of this permit; None where Redis must be told."""
        with self._remote.lock:
            if permit._done:
                return False
            permit._done = True
            if permit._slot:
                return None
            era = permit._era
            if isinstance(era, Era) and era is self._remote.era:
                if era.state != "closed" or verdict is Verdict.ANSWERED:
                    return False
                if verdict is Verdict.RELEASE:
                    return True
                if verdict is Verdict.FAILURE or self._is_slow(permit):
                    return None
                era.good += 1
                return True
        emit(Event("breaker-stale", key=self.name, outcome=verdict.value))
        return False

    def _is_slow(self, permit: Permit) -> bool:
        return self._slow_call is not None and self._clock() - permit._started >= self._slow_call

    def _report(self, permit: Permit, verdict: Verdict) -> Steps[bool]:
        asked = self._clock()
        era = permit._era
        assert isinstance(era, Era)
        slow = self._is_slow(permit)
        if permit._slot:
            word = "success" if verdict is Verdict.ANSWERED else verdict.value
            if slow and verdict is Verdict.SUCCESS:
                word = "failure"
            call = self._remote.verdict(era, permit._slot, word)
        else:
            call = self._remote.report(era, verdict is Verdict.FAILURE, slow)
        try:
            counted, _, _ = self._learn((yield call), asked)
        except StoreUnavailable as fault:
            emit(Event("breaker-verdict-dropped", key=self.name, outcome=verdict.value))
            self._remote.lost(fault)
            return False
        if not counted:
            emit(Event("breaker-stale", key=self.name, outcome=verdict.value))
        return bool(counted)

    def _hear(self) -> None:
        """Be told of moves made elsewhere: one subscription for each process, or event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            here = door(self._store)
            if here not in self._heard:
                self._heard.add(here)
                try:
                    nudges_of(here).join(self._remote.channel, self._remote, 0)
                except (OSError, RuntimeError) as fault:  # no socket, or no thread, to be had
                    emit(Event("inbox-lost", key=self.name, detail=type(fault).__name__))
            return
        near = async_door(self._store)
        if near not in self._heard:
            self._heard.add(near)
            nudges = async_nudges_of(near)
            self._spawn(nudges.join(self._remote.channel, self._remote, LIMIT))

    def _learn(self, reply: Any, asked: float) -> tuple[int, Era, float]:
        if self._remote.out:
            self.local.start_over()  # it stood in, and is needed no more
        return self._remote.learn(reply, asked)

    def _look(self, tell: bool) -> Steps[None]:
        """Hear the state; `tell`: take our successes along."""
        asked = self._clock()
        era = self._remote.era
        call = self._remote.report(era, False, False) if tell else self._remote.look()
        try:
            self._learn((yield call), asked)
        except StoreUnavailable as fault:
            self._remote.lost(fault)
        finally:
            self._looking_until = float("-inf")

    def _look_soon(self, now: float) -> None:
        with self._remote.lock:
            if now < self._looking_until:
                return
            self._looking_until = now + LIMIT
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threading.Thread(
                target=self._run, args=(self._look(True),), name="retrysafe-breaker", daemon=True
            ).start()
        else:
            self._spawn(self._arun(self._look(True)))

    def look(self) -> str:
        if self._clock() >= max(self._remote.era.fresh, self._remote.out_until):
            self._run(self._look(False))
        return self._appears()

    async def alook(self) -> str:
        if self._clock() >= max(self._remote.era.fresh, self._remote.out_until):
            await self._arun(self._look(False))
        return self._appears()

    def _appears(self) -> str:
        era = self._remote.era
        if self._remote.out and era.free:
            return self.local.look() if era.state == "closed" else era.state
        return "half-open" if era.state == "open" and self._clock() >= era.quiet else era.state

    def command(self, target: str) -> None:
        self._run(self._command(target))

    async def acommand(self, target: str) -> None:
        await self._arun(self._command(target))

    def _command(self, target: str) -> Steps[None]:
        """Raises StoreUnavailable: an operator must know that the word didn't get through."""
        asked = self._clock()
        self._learn((yield self._remote.command(target)), asked)

    def _run(self, steps: Steps[T]) -> T:
        try:
            call = next(steps)
            while True:
                try:
                    reply = door(self._store).eval(*call)
                except StoreUnavailable as fault:
                    call = steps.throw(fault)
                else:
                    call = steps.send(reply)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _arun(self, steps: Steps[T], call: Call | None = None) -> T:
        try:
            call = call or next(steps)
            while True:
                try:
                    async with asyncio.timeout(LIMIT):
                        reply = await async_door(self._store).eval(*call)
                except StoreUnavailable as fault:
                    call = steps.throw(fault)
                except TimeoutError:
                    call = steps.throw(StoreUnavailable(reason=f"no answer in {LIMIT:g} s"))
                else:
                    call = steps.send(reply)
        except StopIteration as done:
            result: T = done.value
            return result

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _give_back(self, task: asyncio.Task[Permit]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().release()
