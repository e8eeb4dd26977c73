"""How many receipts one caller may have at a time."""

from __future__ import annotations

from retrysafe import keys
from retrysafe.commands import millis
from retrysafe.receipts import Call
from retrysafe.stores import Store
from retrysafe.stores.doors import async_door


async def note(store: Store, call: Call, ttl: float, most: int) -> float | None:
    """Count a call's receipt as its caller's for `ttl` seconds, once however often it is noted.

    None: counted. Else there are `most` already, and the first of them ends in so many seconds.
    Raises StoreUnavailable.
    """
    namespace = store.namespace
    caller = f"{namespace}:n:{keys.digest(namespace, call.scope, '').hex()}"
    receipt = keys.digest(namespace, call.scope, call.key)
    reply: int = await async_door(store).eval("caller_note", [caller], (receipt, millis(ttl), most))
    return reply / 1e3 if reply else None
