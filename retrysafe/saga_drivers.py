"""The two drivers of a saga's flow: they call steps, wait, talk to the store and renew leases."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from retrysafe.context import entered
from retrysafe.errors import InFlight, StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.saga_requests import Act, Eval, Flow, Halt, Owned, Release, Renew, Request, Sleep
from retrysafe.stores.base import Store
from retrysafe.stores.doors import async_door, door
from retrysafe.timing import timing

__all__ = ["check", "check_async", "drive", "drive_async"]

T = TypeVar("T")
Outcome = tuple[str, Any]

_RENEW_AGAIN = 1.0  # seconds, at most, after a renewal that failed


def check(store: Store, owned: Owned) -> None:
    """Raises InFlight where another owns the saga now."""
    request = owned.renewal()
    _still_owned(owned, door(store).eval(request.script, [request.key], request.args))


async def check_async(store: Store, owned: Owned) -> None:
    """Raises InFlight where another owns the saga now."""
    request = owned.renewal()
    reply = await async_door(store).eval(request.script, [request.key], request.args)
    _still_owned(owned, reply)


def _still_owned(owned: Owned, reply: Any) -> None:
    if reply != 1 and not owned.lost:
        owned.lost = True
        emit(Event("lease-lost", key=owned.digest, detail="saga"))
    if owned.lost:
        raise InFlight(owned.digest, owned.rules.lease)


def _pause(owned: Owned, failed: bool) -> float:
    third = owned.rules.lease / 3
    return min(third / 3, _RENEW_AGAIN) if failed else third


def _renewal_failed(owned: Owned, fault: StoreUnavailable) -> None:
    emit(Event("renewal-failed", key=owned.digest, detail=f"saga: {fault.reason}"))


def drive(store: Store, flow_of: Callable[[Halt], Flow[T]]) -> T:
    """Run a flow on this thread."""
    return _Driver(store).run(flow_of)


class _Driver:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._halt = Halt()
        self._renewing: dict[int, threading.Event] = {}

    def run(self, flow_of: Callable[[Halt], Flow[T]]) -> T:
        flow = flow_of(self._halt)
        answer: Any = None
        fault: StoreUnavailable | None = None
        try:
            while True:
                request = flow.send(answer) if fault is None else flow.throw(fault)
                answer, fault = None, None
                try:
                    answer = self._meet(request)
                except StoreUnavailable as error:
                    fault = error
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()
            for stop in self._renewing.values():
                stop.set()

    def _meet(self, request: Request) -> Any:
        match request:
            case Act():
                return self._act(request)
            case Renew():
                self._renew(request.owned)
            case Release():
                self._renewing.pop(id(request.owned)).set()
            case Eval() | Sleep():
                return self._unless_interrupted(request)
        return None

    def _unless_interrupted(self, request: Eval | Sleep) -> Any:
        """An interrupt turns the saga back at its next act. Scripts may be sent twice."""
        while True:
            try:
                if isinstance(request, Sleep):
                    if not (request.breakable and self._halt.asked):
                        timing().sleep(request.seconds)
                    return None
                return door(self._store).eval(request.script, [request.key], request.args)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                if self._halt.asked:
                    raise
                self._halt.asked, self._halt.cause = True, interrupt

    def _act(self, act: Act) -> Outcome:
        try:
            with entered(act.request):
                result = act.call()
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise TypeError("a step that is not async returned an awaitable: await run(…)")
            return "ok", result
        except Exception as error:
            return "error", error
        except BaseException as interrupt:
            return "interrupted", interrupt

    def _renew(self, owned: Owned) -> None:
        stop = self._renewing[id(owned)] = threading.Event()
        threading.Thread(
            target=self._renewal, args=(owned, stop), name="retrysafe-saga", daemon=True
        ).start()

    def _renewal(self, owned: Owned, stop: threading.Event) -> None:
        failed = False
        while not stop.wait(_pause(owned, failed)):
            try:
                check(self._store, owned)
                failed = False
            except InFlight:
                return
            except StoreUnavailable as fault:
                failed = True
                _renewal_failed(owned, fault)


async def drive_async(store: Store, flow_of: Callable[[Halt], Flow[T]], grace: float) -> T:
    """Run a flow in a task of its own: a cancellation of the caller turns it back, waits for that
    at most `grace` seconds, whatever other cancellations come, and passes on then."""
    driver = _AsyncDriver(store)
    runner = asyncio.get_running_loop().create_task(driver.run(flow_of))
    try:
        return await asyncio.shield(runner)
    except asyncio.CancelledError:
        driver.interrupt()
        end = time.monotonic() + grace
        while not runner.done() and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({runner}, timeout=left)
        if not runner.done():
            driver.abort()
            runner.cancel()
        # How it ended is recorded; who asked wanted no answer.
        runner.add_done_callback(lambda task: task.cancelled() or task.exception())
        raise


class _AsyncDriver:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._halt = Halt()
        self._renewing: dict[int, asyncio.Task[None]] = {}
        self._breakable: asyncio.Task[Any] | None = None

    def interrupt(self) -> None:
        """The caller was cancelled: so is the step that runs. An undo is not."""
        self._halt.asked = True
        if self._breakable is not None:
            self._breakable.cancel()

    def abort(self) -> None:
        """Stop wherever it is; what is left is `recover()`'s, once the lease has ended."""
        self._halt.asked = self._halt.aborted = True

    async def run(self, flow_of: Callable[[Halt], Flow[T]]) -> T:
        flow = flow_of(self._halt)
        answer: Any = None
        fault: StoreUnavailable | None = None
        try:
            while True:
                request = flow.send(answer) if fault is None else flow.throw(fault)
                answer, fault = None, None
                try:
                    answer = await self._meet(request)
                except StoreUnavailable as error:
                    fault = error
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()
            for task in self._renewing.values():
                task.cancel()

    async def _meet(self, request: Request) -> Any:
        loop = asyncio.get_running_loop()
        match request:
            case Act():
                acting = loop.create_task(self._work(request))
                breakable = request.breakable and request.is_async
                await self._end_of(acting, breakable)
                return self._outcome(acting, breakable)
            case Renew():
                self._renewing[id(request.owned)] = loop.create_task(self._renewal(request.owned))
            case Release():
                self._renewing.pop(id(request.owned)).cancel()
            case Sleep():
                if not (request.breakable and self._halt.asked):
                    waiting = loop.create_task(timing().asleep(request.seconds))
                    await self._end_of(waiting, request.breakable)
            case Eval():
                asking = loop.create_task(self._eval(request))
                await self._end_of(asking, False)
                return asking.result()
        return None

    async def _end_of(self, task: asyncio.Task[Any], breakable: bool) -> None:
        """Wait for the end of a task. A cancellation (of this very task: its loop is closing)
        is for the flow to act on."""
        self._breakable = task if breakable else None
        try:
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError:
                    if self._halt.aborted:
                        task.cancel()
                        raise
                    self.interrupt()
        finally:
            self._breakable = None

    def _outcome(self, acting: asyncio.Task[Any], breakable: bool) -> Outcome:
        if acting.cancelled():
            error: BaseException | None = asyncio.CancelledError()
        else:
            error = acting.exception()
        if error is None:
            return "ok", acting.result()
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        return "interrupted" if breakable and self._halt.asked else "error", error

    async def _work(self, act: Act) -> Any:
        with entered(act.request):
            if act.is_async:
                return await act.call()
            result = await asyncio.to_thread(act.call)
            return await result if inspect.isawaitable(result) else result

    async def _eval(self, request: Eval) -> Any:
        return await async_door(self._store).eval(request.script, [request.key], request.args)

    async def _renewal(self, owned: Owned) -> None:
        failed = False
        while True:
            await asyncio.sleep(_pause(owned, failed))
            try:
                await check_async(self._store, owned)
                failed = False
            except InFlight:
                return
            except StoreUnavailable as fault:
                failed = True
                _renewal_failed(owned, fault)
