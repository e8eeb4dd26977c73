"""Where receipts live. `open_store(url)` picks the store; every store answers the same commands."""

from __future__ import annotations

from retrysafe.stores.base import AsyncBackend, Backend, Store
from retrysafe.stores.opening import open_store

__all__ = ["AsyncBackend", "Backend", "Store", "open_store"]
