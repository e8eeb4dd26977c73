"""The scripts on results, mirrored for the memory store. Each says more in its Lua file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors


class _Taken:
    """A tombstone."""

    def __init__(self, token: bytes, payload: bytes) -> None:
        self.token = token
        self.payload = payload


@mirrors("result_look")
def _look(keys: Keyspace, key: str, args: Sequence[Any]) -> list[Any]:
    mode, token, ttl, most, kept = args
    found = keys.get(key)
    if found is None:
        return [0, b""]
    if isinstance(found, _Taken):
        mine = mode == "take" and found.token == token
        return [1, found.payload] if mine else [2, b""]
    state, payload, held = 1, found, found
    if len(found) > most:
        state, payload, held = 3, found[:kept], b""
    if mode == "take":
        keys.set(key, _Taken(token, held), ttl)
    return [state, payload]


@mirrors("result_settle")
def _settle(keys: Keyspace, key: str, args: Sequence[Any]) -> int:
    found = keys.get(key)
    if not isinstance(found, _Taken) or found.token != args[0]:
        return 0
    found.payload = b""
    return 1


@mirrors("result_ack")
def _ack(keys: Keyspace, key: str, args: Sequence[Any]) -> int:
    found = keys.get(key)
    if not isinstance(found, bytes):
        return 0
    if hashlib.sha1(found, usedforsecurity=False).hexdigest() != args[0]:
        return 0
    keys.delete(key)
    return 1


@mirrors("result_write")
def _write(keys: Keyspace, key: str, args: Sequence[Any]) -> int:
    payload, ttl, channel, message = args
    old = keys.get(key)
    if old is not None and old != payload:
        return 0
    if old is None:
        keys.set(key, payload, ttl)
    keys.announce(channel, message)
    return 1


@mirrors("result_forget")
def _forget(keys: Keyspace, key: str, args: Sequence[Any]) -> int:
    return int(keys.delete(key))
