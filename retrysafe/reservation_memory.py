"""The script of reservations, mirrored for the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors


class _Item:
    def __init__(self) -> None:
        self.on_hand = 0
        self.ids: dict[str, tuple[str, int, int]] = {}  # state, quantity, end (µs)

    @property
    def held(self) -> int:
        return sum(quantity for state, quantity, _ in self.ids.values() if state == "H")


@mirrors("reservation_act")
def _act(space: Keyspace, key: str, args: Sequence[Any]) -> list[int]:
    op, name, quantity, hold, memory, ttl = args
    now = space.now_us
    item: _Item | None = space.get(key)
    if item is None:
        if op not in ("set", "add"):
            return [-1, 0, 0, 0]
        item = _Item()
    item.ids = {each: known for each, known in item.ids.items() if known[2] > now}
    state, number, ends = item.ids.get(name, ("", 0, 0))
    answer, left = 1, 0
    if op == "hold":
        if state == "A" or (state and number != quantity):
            answer = -3
        elif state == "C":
            answer = 2
        elif state == "H":
            left = ends - now
        elif item.on_hand - item.held < quantity:
            answer = 0
        else:
            left = hold
            item.ids[name] = ("H", quantity, now + hold)
    elif op == "confirm":
        if state == "H":
            item.on_hand -= number
            item.ids[name] = ("C", number, now + memory)
        elif state != "C":
            answer = -2
    elif op == "release":
        if state == "H":
            del item.ids[name]
        else:
            answer = -4 if state == "C" else -2
    elif op == "add":
        if state and (state != "A" or number != quantity):
            answer = -3
        elif not state:
            item.on_hand += quantity
            item.ids[name] = ("A", quantity, now + memory)
    elif op == "set":
        if quantity < item.held:
            answer = 0
        else:
            item.on_hand = quantity
    space.set(key, item, ttl)
    return [answer, item.on_hand - item.held, item.held, left]
