"""What the workers and the server hold: sampled, put beside each other, judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

MIB = 1 << 20

# What may be more afterwards, as (a part of what it was, so much): the rest may not grow at all.
# Memory that was freed may stay with the process (there are holes between what is used) and with
# the server (its clients' buffers, its script cache), so that its figures move around a level.
# `blocks` are the interpreter's own: caches that fill up to a limit, and what each connection that
# is open has of them.
ROOM: dict[str, tuple[float, int]] = {
    "rss": (0.10, 8 * MIB),
    "blocks": (0.02, 2_000),
    "memory": (0.0, 2 * MIB),
}
# A pool opens as many connections as its threads ask for at once, and faults close those that lie
# idle: up to a full one (64 a worker, of three) and what else a worker has is not growth. Neither
# are the threads and channels that come with the first need: of a worker, its threads beside the
# pool, and two inboxes; of all, what is forgotten and the breaker.
FULL = {
    "sockets": 64 + 10,
    "files": 64 + 26,
    "clients": 3 * (64 + 4),
    "threads": 64 + 5,
    "channels": 3 * 2 + 2,
}
A_CONNECTIONS = 64  # blocks
SHOWN = {"rss": "RSS (KiB)", "memory": "memory (KiB)", "lasting": "keys without TTL"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, before and after."""

    of: str
    name: str
    before: int
    after: int
    more: int = 0  # that it has for what there is more of, which is judged by itself

    @property
    def limit(self) -> int:
        part, room = ROOM.get(self.name, (0.0, 0))
        most = self.before + self.more + max(int(self.before * part), room)
        return max(most, FULL.get(self.name, 0))

    @property
    def grew(self) -> bool:
        return self.after > self.limit


Sample = dict[str, dict[str, int]]
"""Of each process: its figures."""


def server_figures(client: redis.Redis) -> dict[str, int]:
    """What a server holds. `client` is one connection of it, the same each time."""
    clients: dict[str, Any] = client.info("clients")
    memory: dict[str, Any] = client.info("memory")
    names = list(client.scan_iter(count=1000))
    return {
        "clients": clients["connected_clients"],
        "channels": len(client.pubsub_channels()),
        "memory": memory["used_memory"],
        # -1 is "no TTL"; -2 is a key that expired since the scan.
        "lasting": sum(client.pttl(name) == -1 for name in names),
        "keys": len(names),
    }


def compare(before: Sample, after: Sample) -> list[Figure]:
    """Every figure of every process that both have."""

    def more(of: str, name: str) -> int:
        if name != "blocks":
            return 0
        return A_CONNECTIONS * (after[of]["sockets"] - before[of]["sockets"])

    return [
        Figure(of, name, before[of][name], value, more(of, name))
        for of, found in after.items()
        for name, value in found.items()
        if name in before.get(of, {})
    ]


def table(found: Sequence[Figure]) -> str:
    """For a person."""
    lines = [f"{'':10}{'':18}{'before':>10}{'after':>10}{'at most':>10}"]
    for each in found:
        unit = 1024 if each.name in ("rss", "memory") else 1
        numbers = [value // unit for value in (each.before, each.after, each.limit)]
        line = f"{each.of:10}{SHOWN.get(each.name, each.name):18}"
        line += "".join(f"{number:>10}" for number in numbers)
        lines.append(line + ("  GREW" if each.grew else ""))
    return "\n".join(lines)
