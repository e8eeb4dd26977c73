"""The scripts of sagas, mirrored for the memory store: the same answers, in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors

_PARKED = 9_000_000_000_000_000


def _text(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@mirrors("saga_begin")
def _begin(space: Keyspace, key: str, args: Sequence[Any]) -> list[Any]:
    token, mode, fingerprint, lease, ttl, document = args
    now = space.now_us
    held = space.get(key)
    if held is None:
        if mode != "run":
            return [0, b"0", 0, b"", b"", 0]
        held = {"o": token, "f": now, "l": now + lease, "p": fingerprint}
        held.update(s="running", u=0, d=_text(document), n=0)
        space.set(key, held, ttl)
        return [1, _text(now), 0, b"running", held["d"], 0]
    status, fence = held["s"], held["f"]
    if mode == "run" and held["p"] != fingerprint:
        return [4, _text(fence), 0, _text(status), b"", 0]
    if status in ("done", "undone") or (status == "parked" and mode != "resume"):
        return [3, _text(fence), 0, _text(status), held["d"], held["n"]]
    mine = held["o"] == token and held["l"] > now
    if held["l"] > now and not mine:
        return [2, _text(fence), held["l"] - now, _text(status), held["d"], 0]
    if held["u"] > now and not mine and mode != "resume":
        return [5, _text(fence), held["u"] - now, _text(status), held["d"], 0]
    fence = fence if mine else max(fence + 1, now)
    space.set(key, {**held, "o": token, "f": fence, "l": now + lease}, ttl)
    return [1, _text(fence), 0, _text(status), held["d"], held["n"]]


@mirrors("saga_write")
def _write(space: Keyspace, key: str, args: Sequence[Any]) -> int:
    token, number, status, document, due, lease, ttl = args
    held = space.get(key)
    if held is None or held["o"] != token:
        return 0
    if held["n"] >= number:
        return 1
    now = space.now_us
    changed = {
        "n": number,
        "s": status,
        "d": _text(document),
        "u": now + due if due > 0 else 0,
        "l": now + lease if lease > 0 else 0,
    }
    space.set(key, {**held, **changed}, ttl)
    return 1


@mirrors("saga_renew")
def _renew(space: Keyspace, key: str, args: Sequence[Any]) -> int:
    token, lease, ttl = args
    held = space.get(key)
    if held is None or held["o"] != token or held["l"] == 0:
        return 0
    space.set(key, {**held, "l": space.now_us + lease if lease > 0 else 0}, ttl)
    return 1


@mirrors("saga_look")
def _look(space: Keyspace, key: str, args: Sequence[Any]) -> list[Any]:
    held, now = space.get(key), space.now_us
    if held is not None and args[0] and held["s"] not in ("done", "undone"):
        space.set(key, held, args[0])
    if held is None:
        return [0, b"", b"", 0, 0]
    left, due = max(0, held["l"] - now), max(0, held["u"] - now)
    return [1, _text(held["s"]), held["d"], left, due]


@mirrors("saga_list")
def _list(space: Keyspace, key: str, args: Sequence[Any]) -> int:
    name, delay, ttl = args
    now = space.now_us
    listed = dict(space.get(key) or {})
    listed[name] = now + delay if delay >= 0 else _PARKED
    dead = now - 2000 * ttl
    space.set(key, {each: look for each, look in listed.items() if look > dead}, 2 * ttl)
    return 1


@mirrors("saga_unlist")
def _unlist(space: Keyspace, key: str, args: Sequence[Any]) -> int:
    listed = dict(space.get(key) or {})
    name, seen = args
    if name not in listed or (seen != "" and int(seen) != listed[name]):
        return 0
    del listed[name]
    if listed:
        space.replace(key, listed)
    else:
        space.delete(key)
    return 1


@mirrors("saga_due")
def _due(space: Keyspace, key: str, args: Sequence[Any]) -> list[bytes]:
    which, skip, count = args
    last = space.now_us if which == "due" else _PARKED
    listed = space.get(key) or {}
    found = sorted((look, name) for name, look in listed.items() if look <= last)
    return [_text(each) for look, name in found[skip : skip + count] for each in (name, look)]
