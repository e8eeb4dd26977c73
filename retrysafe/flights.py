"""Calls of one process (and event loop) that own a receipt or wait for one.

The first call of a key leads: it alone talks to the store. The others follow at no cost and are
handed its result, or the lead, when it leaves without one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from retrysafe.errors import FingerprintMismatch, InFlight, StoreUnavailable
from retrysafe.records import Record, mismatched


class Lead:
    """The signal that hands over the lead."""


LEAD = Lead()

# A finished record, the lead, what kept the leader from the store, or a nudge from the inbox: the
# stored bytes, b"" for "look again".
Signal = Record | Lead | StoreUnavailable | bytes


class Place(Protocol):
    """One call's place in its flight; outside any (`flight` None) it leads alone. What the call
    sleeps on, too: a signal that comes before the sleep is kept."""

    flight: Flight | None
    leads: bool
    counted: bool

    def wake(self, signal: Signal) -> None: ...


class Flight:
    """All calls of one key in this process."""

    __slots__ = ("digest", "fingerprint", "followers", "known", "leader")

    def __init__(self, digest: bytes, fingerprint: bytes, leader: Place) -> None:
        self.digest = digest
        self.fingerprint = fingerprint
        # None once it is closed: the two would keep each other until the collector comes.
        self.leader: Place | None = leader
        self.followers: deque[Place] | None = None
        self.known = False  # the store has confirmed that the receipt is of this fingerprint


class Flights:
    """The table. Its lock is held for look-ups only, never while anything runs."""

    def __init__(self, new_place: Callable[[], Any]) -> None:
        self._new_place = new_place
        self._lock = threading.Lock()
        self._table: dict[bytes, Flight] = {}
        self.waiting = 0

    def __len__(self) -> int:
        return len(self._table)

    def enter(self, digest: bytes, fingerprint: bytes) -> Place:
        """Take a place. Raises FingerprintMismatch where the flight is known to be another's."""
        place: Place = self._new_place()
        place.flight, place.leads, place.counted = None, True, False
        with self._lock:
            flight = self._table.get(digest)
            if flight is None:
                place.flight = self._table[digest] = Flight(digest, fingerprint, place)
            elif not mismatched(flight.fingerprint, fingerprint):
                place.flight = flight
                place.leads = False
                if flight.followers is None:
                    flight.followers = deque()
                flight.followers.append(place)
            elif flight.known:
                raise FingerprintMismatch(digest.hex())
        return place

    def count(self, place: Place, limit: int, retry_after: float, name: str) -> None:
        """Count a call as waiting. Raises InFlight where `limit` calls wait already."""
        with self._lock:
            if place.counted:
                return
            if self.waiting >= limit:
                raise InFlight(name, retry_after)
            self.waiting += 1
            place.counted = True

    def discount(self, place: Place) -> None:
        """The call has stopped waiting."""
        if place.counted:  # by itself: a call is in one thread
            with self._lock:
                self.waiting -= 1
                place.counted = False

    def confirm(self, place: Place) -> None:
        """The store said that the receipt is of this flight's fingerprint."""
        if place.flight is not None:
            place.flight.known = True

    def leave(self, place: Place) -> None:
        """Go without a result: a leader hands the lead on, a follower just goes."""
        self.discount(place)
        flight = place.flight
        if flight is None:
            return
        with self._lock:
            if not place.leads:
                if flight.followers is not None:
                    with suppress(ValueError):
                        flight.followers.remove(place)
                        return
                # No longer in line: it was handed the lead or a record as it left.
                if flight.leader is not place:
                    return
            if self._table.get(flight.digest) is not flight or flight.leader is not place:
                return
            flight.known = False
            if not flight.followers:
                del self._table[flight.digest]
                flight.leader = None
                return
            heir = flight.followers.popleft()
            flight.leader = heir
        heir.wake(LEAD)

    def settle(self, place: Place, record: Record) -> None:
        """Answer every follower from `record` and close the flight."""
        self.discount(place)
        flight = place.flight
        if flight is None:
            return
        if mismatched(record.fingerprint, flight.fingerprint):
            self.leave(place)
            return
        self._close(flight, record)

    def fail(self, place: Place, error: StoreUnavailable) -> None:
        """The leader could not reach the store: so can't its followers."""
        self.discount(place)
        if place.flight is not None and place.flight.leader is place:
            self._close(place.flight, error)

    def _close(self, flight: Flight, signal: Signal) -> None:
        with self._lock:
            if self._table.get(flight.digest) is not flight:
                return
            del self._table[flight.digest]
            flight.leader = None
            followers, flight.followers = flight.followers, None
        for follower in followers or ():
            follower.wake(signal)

    def nudge(self, digest: bytes, value: bytes) -> None:
        """An inbox message: for one leader, or (empty digest) for all."""
        with self._lock:
            if digest:
                found = self._table.get(digest)
                leaders = [found.leader] if found else []
            else:
                leaders = [flight.leader for flight in self._table.values()]
        for leader in leaders:
            if leader is not None:
                leader.wake(value)
