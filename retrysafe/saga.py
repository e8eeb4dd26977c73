"""Sagas: steps that are all done, or all undone, whatever dies in between.

Garcia-Molina & Salem, "Sagas" (1987), as S2 has it: an explicit rollback finds the step that
failed and undoes those before it in reverse, each undo given the data recorded, as JSON, when its
step ran; rather slow than wrong.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

from retrysafe.backoff import Backoff, Exponential, FullJitter, parse_backoff
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import AsyncReceipts, Receipts
from retrysafe.retrying import RetryPolicy
from retrysafe.saga_drivers import check, check_async, drive, drive_async
from retrysafe.saga_keeping import Keeping, SagaInfo
from retrysafe.saga_plan import Plan, made_step
from retrysafe.saga_requests import Rules
from retrysafe.saga_settling import NOTHING
from retrysafe.saga_state import Documents, SagaStatus
from retrysafe.settings import Settings
from retrysafe.stores import Store, open_store
from retrysafe.stores.sealed import SealedStore
from retrysafe.units import check_duration, check_integer

__all__ = ["Saga", "SagaInfo"]

F = TypeVar("F", bound=Callable[..., Any])

_YEAR = 365 * 86400.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_LONGEST_ID = 512


class Saga:
    """Steps in order, each with what undoes it, kept in a store::

        saga = Saga("order", store)

        @saga.step(undo=release_stock)
        async def reserve_stock(ctx, order: Order) -> Hold: ...

        results = await saga.run("order-17", order)  # {"reserve_stock": Hold(...), …}

    name: 1-100 of `A-Za-z0-9._-`; the steps of one name are the same in every process.
    store: from `open_store`, or its URL; by default the settings say.
    lease: seconds; a process that is silent for so long has lost its sagas to `recover()`.
        Renewed at a third of it. ttl: how long a saga that is over answers `run` with its result.
        unfinished_ttl: how long one that isn't over is kept, counted from when it was last written
        or looked at.
    retry: the `RetryPolicy` of steps that name none; by default 3 attempts within 30 s.
    undo_backoff: the growing schedule of an undo that fails (a strategy, or its text).
        undo_attempts: after so many the undo is parked: `parked()` shows it to a person. Whatever
        an undo raises is tried again. The same holds for a step after the point of no return.
    stay: seconds that `run` and `resume` wait for such a schedule in all. What is later than that
        is left to `recover()`, and `SagaFailed.pending` names it.
    grace: seconds that a cancelled `run` goes on undoing before it passes the cancellation on,
        whatever other cancellations come meanwhile. What isn't undone by then is `recover()`'s.
    on_undo_failure: "continue": an undo that fails doesn't keep the earlier ones waiting. "stop":
        strictly in reverse. Undos never run in parallel.

    Raises ValueError and TypeError for what can't be used.
    """

    def __init__(
        self,
        name: str,
        store: Store | str | None = None,
        *,
        lease: float | None = None,
        ttl: float | None = None,
        unfinished_ttl: float = _YEAR,
        retry: RetryPolicy | None = None,
        undo_backoff: Backoff | str | None = None,
        undo_attempts: int = 100,
        stay: float = 5.0,
        grace: float = 30.0,
        on_undo_failure: str = "continue",
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"a saga is named by 1-100 of A-Za-z0-9._-, not {name!r}")
        if on_undo_failure not in ("continue", "stop"):
            raise ValueError(f"on_undo_failure takes continue or stop, not {on_undo_failure!r}")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise TypeError(f"retry takes a RetryPolicy, not {retry!r}")
        if undo_backoff is None:
            undo_backoff = Exponential(0.2, cap=3600.0)
        elif isinstance(undo_backoff, str):
            undo_backoff = parse_backoff(undo_backoff)
        if isinstance(undo_backoff, type) or not isinstance(undo_backoff, Backoff):
            raise TypeError(f"undo_backoff takes a strategy, not {undo_backoff!r}")
        self.name = name
        self._retry = retry or RetryPolicy(
            attempts=3, deadline=30.0, backoff=FullJitter(0.1, cap=2.0)
        )
        self._given: dict[str, Any] = {
            "lease": None if lease is None else check_duration(lease),
            "ttl": None if ttl is None else check_duration(ttl),
        }
        self._kept: dict[str, Any] = {
            "unfinished_ttl": check_duration(unfinished_ttl),
            "undo_backoff": undo_backoff,
            "undo_attempts": check_integer(undo_attempts, 1),
            "stay": check_duration(stay, zero=True),
            "stop": on_undo_failure == "stop",
        }
        self._grace = check_duration(grace, zero=True)
        self._store = open_store(store) if isinstance(store, str) else store
        self._plan = Plan(name)
        self._lock = threading.Lock()
        self._ready: tuple[Store, Keeping, Keeping] | None = None

    def __repr__(self) -> str:
        return f"Saga({self.name!r}, steps={[step.name for step in self._plan.steps]})"

    @overload
    def step(self, function: F, /) -> F: ...

    @overload
    def step(
        self,
        function: None = None,
        /,
        *,
        undo: Callable[..., Any] | None = None,
        pivot: bool = False,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        tolerant: bool = True,
        fails: Callable[[Any], bool] | None = None,
        reserves: str | None = None,
        hold: float | None = None,
    ) -> Callable[[F], F]: ...

    def step(
        self,
        function: Any = None,
        /,
        *,
        undo: Callable[..., Any] | None = None,
        pivot: bool = False,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        tolerant: bool = True,
        fails: Callable[[Any], bool] | None = None,
        reserves: str | None = None,
        hold: float | None = None,
    ) -> Any:
        """The next step: `step(ctx, *args)`, sync or async, with the arguments of `run`. `ctx` is
        a `StepContext`: the idempotency key, the results before, `check()`.

        undo: `undo(ctx, data)`; data is what the step returned, as it was recorded. Where it is
            unknown whether the step acted (a timeout, a cancellation, a crash, a bug, an error
            that nothing is known about) its undo is called too, with `ctx.maybe` true, and data
            None: it must be right where the step never happened. tolerant=False: it isn't; such
            a step is only ever tried again, and parked in the end.
        pivot: the point of no return: once it is done, the saga only goes forward. Any step
            without an undo is one; those come last, unless one says `pivot=True`. Where such a
            step timed out, or was cut off, it is tried again as well: it can't be taken back.
            After a bug, an error that nothing is known about, or (but for a pivot) a
            cancellation, it is taken as not done, and what was before it is undone.
        retry: its `RetryPolicy`. Only failures that may pass are retried. An error that is
            definite (an answer such as 402, `retryable = False`, the policy's `classify=`) says
            that the step did nothing: its own undo is not called.
        fails: whether a returned value means failure, and that nothing was done.
        reserves, hold: what scarce thing the step holds, and for how many seconds at most (it
            must then expire by itself, as a `Reservation` does). The deadlines of the retries
            after it must fit into that (S2: nothing scarce is held while a saga waits).

        The result is recorded by its annotation, JSON where it can be; without one it is
        JSON-like. One that can't be stored fails the step. Returns the function as it was.
        Raises ValueError for a step that can't stand here, TypeError, NotEncodable.
        """
        local = sys._getframe(1).f_locals

        def declare(do: F) -> F:
            with self._lock:
                if self._ready is not None:
                    raise RuntimeError(f"saga {self.name!r} is in use: its steps are what they are")
                self._plan.add(
                    made_step(
                        do,
                        name=name,
                        undo=undo,
                        pivot=pivot,
                        retry=retry or self._retry,
                        tolerant=tolerant,
                        fails=fails,
                        reserves=reserves,
                        hold=hold,
                        local=local,
                    )
                )
            return do

        return declare if function is None else declare(function)

    # Async

    async def run(self, id: str, /, *args: Any) -> dict[str, Any]:
        """Run the saga, or get what came of it: the steps' results by name, in order.

        id: one for each run, 1-512 characters. The same id again, with the same arguments, is
        answered with the recorded end; where its process died it goes on. args: what every step
        gets; recorded by the steps' annotations.

        A cancellation cancels the step, undoes, and is raised then (see `grace`).
        Raises SagaFailed; InFlight while another process runs it; FingerprintMismatch for other
        arguments; NotEncodable for those that can't be stored; StoreUnavailable (what is begun
        is gone on with by `recover()`); SagaChanged.
        """
        self._plan.check_call(args, True)
        name = _checked(id)
        store, keeping = self._open(True)
        return await drive_async(store, lambda halt: keeping.run(halt, name, args), self._grace)

    async def resume(self, id: str, /) -> dict[str, Any]:
        """Go on with a saga now: one whose process died, that isn't due yet, or is parked (its
        attempts count anew). Answers as `run` does. Raises SagaNotFound too."""
        name = _checked(id)
        store, keeping = self._open(True)
        return await drive_async(store, lambda halt: keeping.resume(halt, name), self._grace)

    async def settle(self, id: str, step: str, /, *, result: Any = NOTHING) -> dict[str, Any]:
        """A person's word on a parked step, and go on as `resume` does.

        Without a result: nothing of the step stands any more. It never happened, or was undone by
        hand; its undo is not called, and what was before it is undone. result: the step happened,
        or was done by hand, with this result; the saga goes forward.

        Raises ValueError where the step isn't parked, where a result is given to a saga that is
        being undone, or none for a step after the point of no return; NotEncodable.
        """
        name, word = _checked(id), (step, result)
        store, keeping = self._open(True)
        return await drive_async(store, lambda halt: keeping.resume(halt, name, word), self._grace)

    async def recover(self, limit: int = 1000) -> list[SagaInfo]:
        """Go on with every saga that is due and whose process is gone, forward where it can, else
        back; `limit` at most. Call it every few seconds, in any number of processes: each saga is
        taken on by one. Tells of those this call took on. Parked ones wait for a person.

        A cancellation is passed on once the saga at hand is let go. Raises StoreUnavailable.
        """
        check_integer(limit, 1)
        store, keeping = self._open(True, patient=False)
        return await drive_async(store, lambda halt: keeping.recover(halt, limit), self._grace)

    async def parked(self) -> list[SagaInfo]:
        """The sagas that a person must look at. To ask keeps them for another `unfinished_ttl`."""
        store, keeping = self._open(True)
        parked = SagaStatus.PARKED
        return await drive_async(store, lambda halt: keeping.unfinished(halt, parked), self._grace)

    async def unfinished(self) -> list[SagaInfo]:
        """All sagas that are not over, whoever runs them."""
        store, keeping = self._open(True)
        return await drive_async(store, keeping.unfinished, self._grace)

    async def look(self, id: str, /) -> SagaInfo:
        """Where one saga is. Raises SagaNotFound."""
        name = _checked(id)
        store, keeping = self._open(True)
        return await drive_async(store, lambda halt: keeping.look(halt, name), self._grace)

    # Sync

    def run_sync(self, id: str, /, *args: Any) -> dict[str, Any]:
        """`run`, for threads; every step and undo must be sync. KeyboardInterrupt and SystemExit
        out of a step undo, and are raised then; a second one leaves it to `recover_sync()`."""
        self._plan.check_call(args, False)
        name = _checked(id)
        store, keeping = self._open(False)
        return drive(store, lambda halt: keeping.run(halt, name, args))

    def resume_sync(self, id: str, /) -> dict[str, Any]:
        """`resume`, for threads."""
        name = _checked(id)
        store, keeping = self._open(False)
        return drive(store, lambda halt: keeping.resume(halt, name))

    def settle_sync(self, id: str, step: str, /, *, result: Any = NOTHING) -> dict[str, Any]:
        """`settle`, for threads."""
        name, word = _checked(id), (step, result)
        store, keeping = self._open(False)
        return drive(store, lambda halt: keeping.resume(halt, name, word))

    def recover_sync(self, limit: int = 1000) -> list[SagaInfo]:
        """`recover`, for threads."""
        check_integer(limit, 1)
        store, keeping = self._open(False, patient=False)
        return drive(store, lambda halt: keeping.recover(halt, limit))

    def parked_sync(self) -> list[SagaInfo]:
        """`parked`, for threads."""
        store, keeping = self._open(None)
        return drive(store, lambda halt: keeping.unfinished(halt, SagaStatus.PARKED))

    def unfinished_sync(self) -> list[SagaInfo]:
        """`unfinished`, for threads."""
        store, keeping = self._open(None)
        return drive(store, keeping.unfinished)

    def look_sync(self, id: str, /) -> SagaInfo:
        """`look`, for threads."""
        name = _checked(id)
        store, keeping = self._open(None)
        return drive(store, lambda halt: keeping.look(halt, name))

    def _open(self, colour: bool | None, *, patient: bool = True) -> tuple[Store, Keeping]:
        """`colour`: True in an event loop, False in a thread, None where no step will run.
        `patient`: stays for the growing schedule; recovery has others to look at."""
        if colour is not None:
            self._plan.check_colour(colour)
        with self._lock:
            if self._ready is None:
                self._ready = self._built()
        store, stays, hurries = self._ready
        return store, stays if patient else hurries

    def _built(self) -> tuple[Store, Keeping, Keeping]:
        settings = Settings.from_env()
        store = open_store(None) if self._store is None else self._store
        documents = Documents(store.seal if isinstance(store, SealedStore) else None)
        values = {
            name: getattr(settings, name) if value is None else value
            for name, value in self._given.items()
        }
        policy = IdempotencyPolicy().resolve(settings)

        def receipts(is_async: bool) -> Any:
            kind = AsyncReceipts if is_async else Receipts
            return kind(store, policy, settings.max_waiters)

        def made(**changed: Any) -> Keeping:
            rules = Rules(**{**values, **self._kept, **changed})
            return Keeping(
                self._plan,
                store.namespace,
                documents,
                rules,
                receipts,
                lambda owned: check(store, owned),
                lambda owned: check_async(store, owned),
            )

        return store, made(), made(stay=0.0)


def _checked(id: Any) -> str:
    if not isinstance(id, str) or not 0 < len(id) <= _LONGEST_ID:
        raise ValueError(f"a saga's id is text of 1-{_LONGEST_ID} characters")
    try:
        id.encode()
    except UnicodeEncodeError:
        raise ValueError("a saga's id is text that UTF-8 can say") from None
    return id
