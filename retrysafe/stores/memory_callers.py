"""The script that counts a caller's receipts, mirrored for the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors


@mirrors("caller_note")
def _note(keys: Keyspace, key: str, args: Sequence[Any]) -> int:
    digest, ttl, most = args
    now = keys.now_us // 1000
    ends: dict[bytes, int] = keys.get(key) or {}
    ends = {each: end for each, end in ends.items() if end > now}
    if digest not in ends and len(ends) >= most:
        return max(1, min(ends.values()) - now)
    ends[digest] = now + ttl
    keys.set(key, ends, max(ends.values()) - now)
    return 0
