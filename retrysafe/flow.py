"""The receipt protocol, written once, for both colours: generators that leave all that takes time
to their desk (`retrysafe.desks`).

An event loop's desk yields futures, and its flows are awaited; a thread's does at once what it is
asked, and its flows never yield.
"""

from __future__ import annotations

import os
import time
import types
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Generator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, Protocol, TypeVar

import msgspec

from retrysafe import commands as c
from retrysafe.commands import Answer
from retrysafe.errors import (
    Abandoned,
    FingerprintMismatch,
    InFlight,
    RecordCorrupt,
    RecordSealed,
    StoreUnavailable,
)
from retrysafe.events import Event, emit, heard
from retrysafe.finished import FinishedRecords
from retrysafe.flights import Flights, Place
from retrysafe.policy import ResolvedPolicy
from retrysafe.records import (
    NO_KEYS,
    AbandonedReceipt,
    CorruptRecord,
    Record,
    Running,
    decode,
    encode_done,
    mismatched,
)
from retrysafe.values import Value, replace

FIRST_POLL = 0.1
LAST_POLL = 2.0
LAST_POLL_DEAF = 0.25  # without a subscription the poll is all there is
FOREGROUND = 2.0  # how long a caller waits for a finish that the store doesn't take
_LISTEN = 1.0
_LAST_LOOK = 0.5  # how long a waiter's look at the store may outlast its wait
# A receipt that is granted later than this part of its lease is renewed before its work starts.
_LATE = 1 / 3


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
Steps = Generator[Any, Any, T]

if TYPE_CHECKING:

    class Flow(Generator[Any, Any, T_co], Awaitable[T_co]):
        """A part of the protocol: `yield from` it in another, `await` it on an event loop, `run`
        it on a thread (`retrysafe.desks`)."""

    def _flow(function: Callable[P, Steps[T]]) -> Callable[P, Flow[T]]: ...

else:
    Flow = Generator
    _flow = types.coroutine


class FlowDesk(Protocol):
    """What a flow needs of the process, or event loop, that it runs in."""

    flights: Flights
    finished: FinishedRecords
    inbox: bytes
    listening: bool
    max_waiters: int

    def execute(self, command: c.Command, end: float | None = None) -> Steps[c.Reply]:
        """Ask the store; by `end`, on the monotonic clock, at the latest."""
        ...

    def wait(self, place: Place, seconds: float) -> Steps[Any]:
        """Sleep on a place for at most `seconds`: its signal, or None."""
        ...

    def sleep(self, seconds: float) -> Steps[None]: ...

    def listen(self, seconds: float) -> Steps[bool]:
        """Make sure, for at most `seconds`, that the inbox is subscribed: whether it is."""
        ...

    def spawn(self, flow: Flow[Any]) -> None:
        """Let a flow go on by itself, in the background."""
        ...


class Claim(Value, frozen=True):
    """What is asked: a call's digest and what travels with it."""

    secret: ClassVar[frozenset[str]] = frozenset({"key", "scope"})

    digest: bytes
    key: str
    scope: str
    fingerprint: bytes
    request_id: str
    policy: ResolvedPolicy

    @property
    def name(self) -> str:
        return self.digest.hex()

    @property
    def scope_digest(self) -> str:
        """Scopes may hold credentials: only their digest is told."""
        return blake2b(self.scope.encode(), digest_size=8).hexdigest()


class Taken(msgspec.Struct, eq=False):
    """A receipt that is ours. `lease_until` is on this process's monotonic clock."""

    claim: Claim
    token: bytes
    place: Place
    fence: int
    abandoned: AbandonedReceipt | None
    since: float
    lease_until: float
    lost: bool = False
    finishing: bool = False
    ended: bool = False
    on_lost: Callable[[], object] | None = None


def new_token() -> bytes:
    """16 printable bytes, unguessable and unique."""
    # From the system each time: bytes kept here would come twice from a machine that is cloned.
    return urlsafe_b64encode(os.urandom(12))


@_flow
def claim(
    desk: FlowDesk, ask: Claim, on_wait: Callable[[], object] = lambda: None
) -> Steps[Taken | Record]:
    """Take the receipt, or come back with the record that answers the call. `on_wait` is called
    before each wait for another call.

    Raises InFlight, Abandoned, FingerprintMismatch, RecordCorrupt, StoreUnavailable.
    """
    flights = desk.flights
    began = time.monotonic()
    known = desk.finished.get(ask.digest, began)
    if known is not None:
        if mismatched(known.fingerprint, ask.fingerprint):
            _tell(ask, "mismatch", began)
            raise FingerprintMismatch(ask.name)
        _tell(ask, "replayed", began)
        return known
    end = began + ask.policy.wait
    place = flights.enter(ask.digest, ask.fingerprint)
    taken = False
    try:
        if not place.leads:
            flights.count(place, desk.max_waiters, 1.0, ask.name)
            left = end - time.monotonic()
            on_wait()
            signal = (yield from desk.wait(place, left)) if left > 0 else None
            if signal is None:
                raise _in_flight(ask, 1.0)
            if isinstance(signal, StoreUnavailable):
                raise type(signal)(ask.name, signal.reason)
            if isinstance(signal, Record):
                if mismatched(signal.fingerprint, ask.fingerprint):
                    raise FingerprintMismatch(ask.name)
                _tell(ask, "waited", began)
                return signal
            place.leads = True
        try:
            result = yield from _lead(desk, ask, place, end, on_wait)
        except StoreUnavailable as error:
            # Each would find out for itself, one after another; but if it is only that this one's
            # time was over, the next may still be answered.
            if not place.counted or time.monotonic() < end:
                flights.fail(place, error)
            raise
        if isinstance(result, Taken):
            taken = True
            flights.discount(place)
            _tell(ask, "taken-over" if result.abandoned else "acquired", began)
        else:
            flights.settle(place, result)
            _tell(ask, "replayed", began)
        return result
    finally:
        if not taken:
            flights.leave(place)


@_flow
def _lead(
    desk: FlowDesk, ask: Claim, place: Place, end: float, on_wait: Callable[[], object]
) -> Steps[Taken | Record]:
    policy = ask.policy
    token = new_token()
    begin = c.Begin(
        key=ask.digest,
        token=token,
        fingerprint=ask.fingerprint,
        lease_us=c.micros(policy.lease),
        ttl_ms=c.millis(policy.ttl_for(None)),
        inbox=desk.inbox,
        take_over=policy.on_abandoned != "refuse",
        request_id=ask.request_id,
    )
    poll = FIRST_POLL
    while True:
        asked = time.monotonic()
        changes = desk.finished.changes
        granted: float | None = asked
        limit = end + _LAST_LOOK if place.counted else None
        try:
            reply = yield from desk.execute(begin, limit)
            if reply.answer is Answer.OK and time.monotonic() - asked > policy.lease * _LATE:
                granted = yield from _in_time(desk, ask, token, limit)
        except GeneratorExit:
            raise
        except BaseException as error:
            # The store may have taken the command; nobody will do the work under this token.
            desk.spawn(_give_up(desk, ask, c.Release(ask.digest, token)))
            if isinstance(error, StoreUnavailable):
                _tell(ask, "store-unavailable", asked, detail=type(error).__name__)
                error.key = ask.name
            raise
        match reply.answer:
            case Answer.OK:
                if granted is None:
                    continue
                abandoned = _predecessor(ask, reply.value) if reply.value else None
                desk.flights.confirm(place)
                return Taken(
                    ask, token, place, reply.number, abandoned, asked, granted + policy.lease
                )
            case Answer.DONE:
                record = _decode(ask, reply.value)
                if not isinstance(record, Record):
                    raise _corrupt(ask, "a receipt at work where a finished one should be")
                desk.finished.keep(ask.digest, record, asked, reply.number / 1e3, changes)
                return record
            case Answer.MISMATCH:
                _tell(ask, "mismatch", asked)
                raise FingerprintMismatch(ask.name)
            case Answer.ABANDONED:
                _tell(ask, "abandoned", asked)
                raise Abandoned(ask.name)
            case Answer.RUNNING:
                pass
            case _:
                raise _corrupt(ask, "no receipt")
        desk.flights.confirm(place)
        lease_left = reply.number / 1e6
        left = end - time.monotonic()
        if left <= 0:
            raise _in_flight(ask, lease_left)
        desk.flights.count(place, desk.max_waiters, min(1.0, lease_left), ask.name)
        if not desk.listening and (yield from desk.listen(min(left, _LISTEN))):
            continue  # it may have finished before the subscription stood: look once more
        on_wait()
        last = LAST_POLL if desk.listening else LAST_POLL_DEAF
        signal = yield from desk.wait(
            place, max(0.001, min(poll, last, lease_left + 0.005, end - time.monotonic()))
        )
        if signal is None:
            poll = min(poll * 2, last)
        elif signal:
            try:
                record = _decode(ask, signal)
            except RecordCorrupt:
                continue  # whatever was said there, the store has the word
            if isinstance(record, Record):
                if mismatched(record.fingerprint, ask.fingerprint):
                    raise FingerprintMismatch(ask.name)
                return record


@_flow
def _in_time(desk: FlowDesk, ask: Claim, token: bytes, limit: float | None) -> Steps[float | None]:
    """Renew a lease that was granted late: when the one was asked for that we hold now. None: it
    isn't ours any more.

    The grant may come after the lease's end (a slow network, a process that was stopped): by then
    another may be at work. Raises StoreUnavailable where each renewal's answer does, too.
    """
    lease = ask.policy.lease
    for _ in range(3):
        asked = time.monotonic()
        reply = yield from desk.execute(
            c.Renew(ask.digest, token, c.micros(lease), c.millis(ask.policy.ttl_for(None))), limit
        )
        if reply.answer is not Answer.OK:
            return None
        if time.monotonic() - asked <= lease * _LATE:
            return asked
    if time.monotonic() - asked < lease:
        return asked
    raise StoreUnavailable(reason="its answers take too long for the lease")


@_flow
def finish(desk: FlowDesk, taken: Taken, payload: bytes | None, ttl: float) -> Steps[Record | None]:
    """Record the result. None: ours stands, or will; a Record: another's won, answer from it."""
    ask = taken.claim
    taken.finishing = True
    record = Record(ask.fingerprint, taken.token, taken.fence, ask.request_id, payload)
    command = c.Finish(ask.digest, taken.token, encode_done(record), c.millis(ttl))
    try:
        reply = yield from _insist(desk, command, min(FOREGROUND, ask.policy.lease))
    except GeneratorExit:
        raise
    except BaseException as error:
        # Cancelled, also between two tries, or out of reach: the work is done all the same.
        desk.spawn(_finish_later(desk, taken, record, command))
        if not isinstance(error, StoreUnavailable):
            raise
        _tell(ask, "result-unrecorded", taken.since, outcome="retrying")
        return None
    return (yield from _conclude(desk, taken, record, reply, wait=True))


@_flow
def _finish_later(desk: FlowDesk, taken: Taken, record: Record, command: c.Finish) -> Steps[None]:
    """Go on trying until the lease ends."""
    ask = taken.claim
    try:
        reply = yield from _insist(desk, command, ask.policy.lease)
        yield from _conclude(desk, taken, record, reply, wait=False)
    except StoreUnavailable:
        _tell(ask, "result-unrecorded", taken.since, outcome="given-up")
    finally:
        taken.ended = True
        desk.flights.leave(taken.place)


@_flow
def _insist(desk: FlowDesk, command: c.Command, seconds: float) -> Steps[c.Reply]:
    """Send a command until the store takes it, for `seconds`. Raises the last StoreUnavailable."""
    end = time.monotonic() + seconds
    delay = 0.02
    while True:
        try:
            reply: c.Reply = yield from desk.execute(command)
            return reply
        except StoreUnavailable:
            if time.monotonic() + delay > end:
                raise
        yield from desk.sleep(delay)
        delay = min(delay * 2, 1.0)


@_flow
def _conclude(
    desk: FlowDesk, taken: Taken, record: Record, reply: c.Reply, wait: bool
) -> Steps[Record | None]:
    ask = taken.claim
    taken.ended = True
    if reply.answer in (Answer.OK, Answer.VANISHED):
        if reply.answer is Answer.VANISHED:
            _tell(ask, "receipt-vanished", taken.since)
        desk.flights.settle(taken.place, record)
        kept = "kept" if record.payload is not None else "not-kept"
        _tell(ask, "finished", taken.since, outcome=kept)
        return None
    taken.lost = True
    _tell(ask, "finish-refused", taken.since)
    if reply.answer is Answer.DONE:
        won = _won(ask, reply.value)
        if won is not None:
            desk.flights.settle(taken.place, won)
        desk.flights.leave(taken.place)
        return won
    desk.flights.leave(taken.place)
    return (yield from _winner(desk, ask)) if wait else None


def _won(ask: Claim, value: bytes) -> Record | None:
    """Another's record, where our caller may be answered from it. Ours is the truth otherwise:
    the work is done, and no error about the record may take its place."""
    try:
        won = _decode(ask, value)
    except RecordCorrupt:
        return None
    if not isinstance(won, Record) or mismatched(won.fingerprint, ask.fingerprint):
        return None
    return won


@_flow
def _winner(desk: FlowDesk, ask: Claim) -> Steps[Record | None]:
    """The record of the owner that fenced us out, once it has one."""
    end = time.monotonic() + ask.policy.wait
    delay = 0.02
    while True:
        try:
            reply = yield from desk.execute(c.Look(ask.digest))
        except RecordCorrupt:
            return None
        except StoreUnavailable:
            reply = None
        if reply is not None:
            if reply.answer is Answer.DONE:
                return _won(ask, reply.value)
            if reply.answer is not Answer.RUNNING:
                return None
        if time.monotonic() + delay > end:
            return None
        yield from desk.sleep(delay)
        delay = min(delay * 2, 0.5)


@_flow
def give_back(desk: FlowDesk, taken: Taken, command: c.Release | c.Interrupt) -> Steps[None]:
    """Release or interrupt; another call of this process may go ahead as soon as it is done."""
    ask = taken.claim
    kind = "released" if isinstance(command, c.Release) else "interrupted"
    try:
        reply = yield from desk.execute(command)
    except GeneratorExit:
        raise
    except StoreUnavailable:
        desk.spawn(_give_up(desk, ask, command))
        _tell(ask, kind, taken.since, outcome="retrying")
    except BaseException:
        desk.spawn(_give_up(desk, ask, command))
        raise
    else:
        refused = reply.answer is Answer.REFUSED
        _tell(ask, kind, taken.since, outcome="refused" if refused else "")
    finally:
        taken.ended = True
        desk.flights.leave(taken.place)


@_flow
def _give_up(desk: FlowDesk, ask: Claim, command: c.Release | c.Interrupt) -> Steps[None]:
    """Leave nothing of a token behind: tried until its lease would have ended anyway."""
    try:
        yield from _insist(desk, command, ask.policy.lease)
    except StoreUnavailable:
        return  # the lease has ended: the receipt counts as abandoned


def _predecessor(ask: Claim, value: bytes) -> AbandonedReceipt | None:
    running = _decode(ask, value)
    if not isinstance(running, Running):
        raise _corrupt(ask, "a finished receipt where ours should be")
    previous = running.previous
    return replace(previous, key=ask.key, scope=ask.scope) if previous else None


def _decode(ask: Claim, value: bytes) -> Record | Running:
    try:
        found = decode(value)
    except CorruptRecord as error:
        raise _corrupt(ask, str(error)) from None
    if isinstance(found, Record) and found.sealed:
        _tell(ask, "record-corrupt", None, detail=NO_KEYS)
        raise RecordSealed(ask.name, NO_KEYS)
    return found


def _corrupt(ask: Claim, reason: str) -> RecordCorrupt:
    _tell(ask, "record-corrupt", None, detail=reason)
    return RecordCorrupt(ask.name, reason)


def _in_flight(ask: Claim, lease_left: float) -> InFlight:
    _tell(ask, "in-flight", None)
    return InFlight(ask.name, round(min(max(lease_left, 0.05), 1.0), 3))


def _tell(ask: Claim, kind: str, since: float | None, outcome: str = "", detail: str = "") -> None:
    if not heard(kind):
        return
    emit(
        Event(
            kind=kind,
            key=ask.name,
            scope=ask.scope_digest,
            request_id=ask.request_id,
            duration=None if since is None else time.monotonic() - since,
            outcome=outcome,
            detail=detail,
        )
    )
