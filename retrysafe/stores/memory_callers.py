"""The script that counts a caller's receipts, mirrored for the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors


@mirrors("caller_note")
def _note(keys: Keyspace, key: str, args: Sequence[Any]) -> int:
    digest, ttl, most = args
    now = keys.now_us // 1000
    held: dict[bytes, int] = keys.get(key) or {}
    ends = {each: end for each, end in held.items() if end > now}
    if ttl:
        if digest not in ends and len(ends) >= most:
            return max(1, min(ends.values(), default=now) - now)
        ends[digest] = now + ttl
    else:
        ends.pop(digest, None)
    if ends:
        keys.set(key, ends, max(ends.values()) - now)
    else:
        keys.delete(key)
    return 0
