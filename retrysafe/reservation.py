"""Counted stock that is held for a while: confirmed, or back by itself.

S2's implicit rollback: "hold the goods, wait 15 minutes for the payment, release them if none
came". Nothing has to be undone, whatever dies: an expiry is the rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrysafe.errors import (
    FingerprintMismatch,
    OutOfStock,
    ReservationConfirmed,
    ReservationExpired,
    UnknownItem,
)
from retrysafe.keys import digest
from retrysafe.stores import Store, open_store
from retrysafe.stores.doors import async_door, door
from retrysafe.units import check_duration, check_integer

__all__ = ["Held", "Reservation", "Stock"]

_LARGEST = 10**15  # counted exactly by the store's scripts
_LONGEST_NAME = 512


@dataclass(frozen=True, slots=True)
class Held:
    """A hold. expires_in: seconds it has left; 0 where it is `confirmed`, which never expires."""

    item: str
    holder: str
    quantity: int
    expires_in: float
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Stock:
    """What there is of an item: free to be held, and held. What was confirmed is gone from it."""

    free: int
    held: int


class Reservation:
    """Stock in a store, one key an item: it never falls below zero, and none is lost, whatever
    dies. Every method may be repeated: the same id gets the same answer.

    store: from `open_store`, or its URL; by default the settings say.
    ttl: seconds that a hold lasts (S2: 900 for a payment). By the store's clock.
    remember: seconds that a confirmed hold, and an addition, are known by their ids: repeats later
        than that are new. keep: seconds that an item stays when nothing touches it; each call
        renews them. After that it is unknown: UnknownItem, never a count of 0.

    A call is one round trip, and now and then takes time with the number of holds: split an item
    that has more than some ten thousand at once. Methods raise StoreUnavailable; the same call can
    then be repeated. `a…` are the async forms.
    """

    def __init__(
        self,
        store: Store | str | None = None,
        ttl: float = 900.0,
        *,
        remember: float = 3600.0,
        keep: float = 365 * 86400.0,
    ) -> None:
        self._store = open_store(store) if store is None or isinstance(store, str) else store
        self.ttl = check_duration(ttl)
        self._times = (
            round(self.ttl * 1e6),
            round(check_duration(remember) * 1e6),
            round(check_duration(keep) * 1000),
        )
        if check_duration(keep) < max(self.ttl, remember):
            raise ValueError("keep takes at least ttl and remember, or holds would vanish")

    # Sync

    def hold(self, item: str, quantity: int, holder: str) -> Held:
        """Hold some of an item for `ttl` seconds. The same holder again gets the hold it has, with
        the time that is left of it.

        Raises OutOfStock; UnknownItem; FingerprintMismatch where this holder holds another
        quantity.
        """
        return self._held(item, quantity, holder, self._ask("hold", item, holder, quantity))

    def confirm(self, item: str, holder: str) -> None:
        """Take what is held for good. Twice is once. Raises ReservationExpired where the hold
        is no more (then nothing was taken), UnknownItem."""
        self._confirmed(item, holder, self._ask("confirm", item, holder))

    def release(self, item: str, holder: str) -> bool:
        """Give a hold back before it expires. Returns whether there was one: as an undo it may
        come twice, or where nothing was held. Raises ReservationConfirmed, UnknownItem."""
        return self._released(item, holder, self._ask("release", item, holder))

    def stock(self, item: str, quantity: int | None = None) -> Stock:
        """How much there is; with a quantity, say how much there is from now on, held included.

        Raises UnknownItem; OutOfStock for a quantity below what is held.
        """
        if quantity is None:
            return self._stock(item, 0, self._ask("look", item))
        return self._stock(item, quantity, self._ask("set", item, "", _count(quantity, 0)))

    def add(self, item: str, quantity: int, id: str) -> Stock:
        """More of an item (a delivery, a return). `id` names this addition: repeated, it counts
        once. Raises FingerprintMismatch where that id stands for another quantity."""
        return self._stock(item, quantity, self._ask("add", item, id, quantity))

    # Async

    async def ahold(self, item: str, quantity: int, holder: str) -> Held:
        """`hold`, for coroutines."""
        reply = await self._aask("hold", item, holder, quantity)
        return self._held(item, quantity, holder, reply)

    async def aconfirm(self, item: str, holder: str) -> None:
        """`confirm`, for coroutines."""
        self._confirmed(item, holder, await self._aask("confirm", item, holder))

    async def arelease(self, item: str, holder: str) -> bool:
        """`release`, for coroutines."""
        return self._released(item, holder, await self._aask("release", item, holder))

    async def astock(self, item: str, quantity: int | None = None) -> Stock:
        """`stock`, for coroutines."""
        if quantity is None:
            return self._stock(item, 0, await self._aask("look", item))
        reply = await self._aask("set", item, "", _count(quantity, 0))
        return self._stock(item, quantity, reply)

    async def aadd(self, item: str, quantity: int, id: str) -> Stock:
        """`add`, for coroutines."""
        return self._stock(item, quantity, await self._aask("add", item, id, quantity))

    # What both ask, and make of the answer

    def _ask(self, op: str, item: str, id: str = "", quantity: int = 0) -> list[int]:
        reply: list[int] = door(self._store).eval(*self._call(op, item, id, quantity))
        return reply

    async def _aask(self, op: str, item: str, id: str = "", quantity: int = 0) -> list[int]:
        call = self._call(op, item, id, quantity)
        reply: list[int] = await async_door(self._store).eval(*call)
        return reply

    def _call(
        self, op: str, item: str, id: str, quantity: int
    ) -> tuple[str, list[str], Sequence[Any]]:
        _name("item", item)
        if op not in ("look", "set"):
            _name("holder" if op != "add" else "id", id)
        if op in ("hold", "add"):
            _count(quantity, 1)
        key = f"{self._store.namespace}:stock:{item}"
        return "reservation_act", [key], (op, id, quantity, *self._times)

    def _known(self, item: str, id: str, reply: list[int]) -> int:
        answer = reply[0]
        if answer == -1:
            raise UnknownItem(item)
        if answer == -3:
            raise FingerprintMismatch(digest(self._store.namespace, f"stock:{item}", id).hex())
        return answer

    def _held(self, item: str, quantity: int, holder: str, reply: list[int]) -> Held:
        answer = self._known(item, holder, reply)
        if answer == 0:
            raise OutOfStock(item, quantity, max(0, reply[1]))
        return Held(item, holder, quantity, reply[3] / 1e6, answer == 2)

    def _confirmed(self, item: str, holder: str, reply: list[int]) -> None:
        if self._known(item, holder, reply) == -2:
            raise ReservationExpired(item, holder)

    def _released(self, item: str, holder: str, reply: list[int]) -> bool:
        answer = self._known(item, holder, reply)
        if answer == -4:
            raise ReservationConfirmed(item, holder)
        return answer == 1

    def _stock(self, item: str, quantity: int, reply: list[int]) -> Stock:
        if self._known(item, "", reply) == 0:
            raise OutOfStock(item, quantity, reply[2])
        return Stock(reply[1], reply[2])


def _name(what: str, text: Any) -> None:
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_NAME:
        raise ValueError(f"{what} takes text of 1-{_LONGEST_NAME} characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} takes text that UTF-8 can say") from None


def _count(quantity: int, low: int) -> int:
    try:
        check_integer(quantity, low)
    except ValueError as error:
        raise ValueError(f"quantity takes a whole number of {low} or more ({error})") from None
    if quantity > _LARGEST:
        raise ValueError(f"quantity takes at most {_LARGEST}")
    return quantity
