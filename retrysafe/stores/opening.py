"""`open_store`: from a URL to a store."""

from __future__ import annotations

import logging
import threading

from retrysafe import setting_kinds as kinds
from retrysafe.errors import SettingsError
from retrysafe.settings import Settings
from retrysafe.stores.base import Store
from retrysafe.stores.memory import MemoryStore
from retrysafe.stores.redis import RedisStore
from retrysafe.stores.sealed import sealed
from retrysafe.urls import URL_FORMS

logger = logging.getLogger("retrysafe")

_shared: dict[tuple[str, str, int], Store] = {}
_lock = threading.Lock()


def open_store(
    url: str | None = None, *, namespace: str | None = None, replicas: int | None = None
) -> Store:
    """The store behind a URL, one object per URL, namespace and replicas in a process.

    `redis://`, `rediss://`, `unix://`: Redis >= 6.2 or Valkey >= 7.2. `redis+sentinel://h1,h2/name`:
    the primary that Sentinel names; `redis+cluster://h1,h2`: a Cluster; `rediss+…` for both: over
    TLS. `memory://`: this process alone. Without a URL: RETRYSAFE_REDIS_URL, or memory with one
    warning. `replicas` (RETRYSAFE_REPLICAS): how many must hold a receipt before its work starts;
    a shortfall is refused as StoreUnavailable. Nothing is connected until the first call. Raises
    SettingsError for what can't be used.
    """
    settings = Settings.from_env()
    if namespace is None:
        namespace = settings.namespace
    else:
        try:
            kinds.NAMESPACE.check(namespace)
        except ValueError as error:
            raise SettingsError(
                [f"namespace holds {namespace!r} ({error}); it takes {kinds.NAMESPACE.takes}"]
            ) from None
    if replicas is None:
        replicas = settings.replicas
    elif isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
        raise SettingsError([f"replicas holds {replicas!r}; it takes a whole number of at least 0"])
    warned = False
    if url is None:
        url = settings.redis_url
        warned = url is None
    with _lock:
        key = ("memory://" if url is None else url, namespace, replicas)
        if key not in _shared:
            made = sealed(_make(*key))
            if warned:
                logger.warning(
                    "receipts are kept in this process's memory: they don't span processes and "
                    "end with it; set RETRYSAFE_REDIS_URL (memory:// to say that this is meant)"
                )
            _shared[key] = made
        return _shared[key]


def _make(url: str, namespace: str, replicas: int) -> Store:
    scheme = url.partition("://")[0]
    if scheme == "memory":
        if replicas:
            raise SettingsError(
                [
                    f"RETRYSAFE_REPLICAS holds {replicas}; memory takes 0: it has no replicas, and "
                    "a receipt that is less safe than asked for is none"
                ]
            )
        return MemoryStore(namespace)
    try:
        # Imported where asked for: few programs need more than one of them.
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            from retrysafe.stores.sentinel import SentinelStore

            return SentinelStore(url, namespace, replicas)
        if scheme in ("redis+cluster", "rediss+cluster"):
            from retrysafe.stores.cluster import ClusterStore

            return ClusterStore(url, namespace, replicas)
        if scheme in ("redis", "rediss", "unix"):
            return RedisStore(url, namespace, replicas)
    except ValueError as error:
        raise SettingsError(
            [f"the store's URL can't be used: {error}; it takes {URL_FORMS}"]
        ) from None
    raise SettingsError([f"the store's URL has the scheme {scheme!r}; it takes {URL_FORMS}"])
