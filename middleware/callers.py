"""How many receipts one caller may have at a time."""

from __future__ import annotations

from retrysafe import keys
from retrysafe.commands import millis
from retrysafe.errors import StoreUnavailable
from retrysafe.events import Event, emit
from retrysafe.stores import Store
from retrysafe.stores.doors import async_door


class Counted:
    """One receipt in its caller's count. Whoever owns the receipt next counts it anew; from then
    on the one before changes nothing."""

    def __init__(self, store: Store, scope: str, receipt: bytes) -> None:
        """`receipt`: its digest."""
        self._store = store
        self._caller = f"{store.namespace}:n:{keys.digest(store.namespace, scope, '').hex()}"
        self._receipt = receipt
        self._end = 0  # as it was noted: by this the entry is known as ours

    async def note(self, ttl: float, most: int) -> float | None:
        """Count it for `ttl` seconds from now, once however often it is noted.

        None: counted. Else there are `most` (0: no limit) already, and the first of them ends in
        so many seconds. Raises StoreUnavailable.
        """
        noted, number = await self._ask(millis(ttl), most)
        if not noted:
            return number / 1e3
        self._end = number
        return None

    async def keep(self, ttl: float) -> None:
        """Its result is kept for `ttl` seconds from now, and so long it counts."""
        await self._settle(millis(ttl))

    async def drop(self) -> None:
        """It was released, or is about to be."""
        await self._settle(0)

    async def _settle(self, ttl_ms: int) -> None:
        try:
            await self._ask(ttl_ms, 0)
        except StoreUnavailable as error:
            # The request is over, and its answer stands: it stays counted for as long as it was.
            emit(Event("store-unavailable", self._receipt.hex(), detail=type(error).__name__))

    async def _ask(self, ttl_ms: int, most: int) -> list[int]:
        args = (self._receipt, ttl_ms, most, self._end)
        reply: list[int] = await async_door(self._store).eval("caller_note", [self._caller], args)
        return reply
