"""`open_store`: from a URL to a store."""

from __future__ import annotations

import logging
import threading

from retrysafe.errors import SettingsError
from retrysafe.settings import Settings
from retrysafe.stores.base import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import sealed

logger = logging.getLogger("retrysafe")

_shared: dict[tuple[str, str], Store] = {}
_lock = threading.Lock()


def open_store(url: str | None = None, *, namespace: str | None = None) -> Store:
    """The store behind a URL, one object per URL and namespace in a process.

    `redis://`, `rediss://`, `unix://`: Redis >= 6.2 or Valkey >= 7.2. `memory://`: this process
    alone. Without a URL: RETRYSAFE_REDIS_URL, or memory with one warning. Nothing is connected
    until the first call. Raises SettingsError for a URL that can't be used.
    """
    settings = Settings.from_env() if url is None or namespace is None else None
    if namespace is None:
        assert settings is not None
        namespace = settings.namespace
    if settings is not None and settings.replicas:
        raise SettingsError(
            [
                f"RETRYSAFE_REPLICAS holds {settings.replicas}; this version takes 0: it can't "
                "wait for replicas yet, and a receipt that is less safe than asked for is none"
            ]
        )
    warned = False
    if url is None:
        assert settings is not None
        url = settings.redis_url
        warned = url is None
    with _lock:
        key = ("memory://" if url is None else url, namespace)
        if key not in _shared:
            if warned:
                logger.warning(
                    "receipts are kept in this process's memory: they don't span processes and "
                    "end with it; set RETRYSAFE_REDIS_URL (memory:// to say that this is meant)"
                )
            _shared[key] = sealed(_make(*key))
        return _shared[key]


def _make(url: str, namespace: str) -> Store:
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore(namespace)
    if scheme in ("redis", "rediss", "unix"):
        try:
            return RedisStore(url, namespace)
        except ValueError as error:
            raise SettingsError([f"the store's URL can't be used: {error}"]) from None
    raise SettingsError(
        [f"the store's URL has the scheme {scheme!r}; it takes redis, rediss, unix or memory"]
    )
