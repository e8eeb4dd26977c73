"""The script that counts a caller's receipts, mirrored for the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors


@mirrors("caller_note")
def _note(keys: Keyspace, key: str, args: Sequence[Any]) -> list[int]:
    digest, ttl, most, own = args
    now = keys.now_us // 1000
    held: dict[bytes, int] = keys.get(key) or {}
    if own and held.get(digest) != own:
        return [1, 0]
    ends = {each: end for each, end in held.items() if end > now}
    if ttl:
        if digest not in ends and most and len(ends) >= most:
            return [0, max(1, min(ends.values()) - now)]
        ends[digest] = now + ttl
    else:
        ends.pop(digest, None)
    if ends:
        keys.set(key, ends, max(ends.values()) - now)
    else:
        keys.delete(key)
    return [1, ends.get(digest, 0)]
