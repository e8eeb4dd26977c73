"""Who serves which key in a Cluster, and where a command goes next: no I/O, one for both doors.

Source: the Redis Cluster specification (hash slots, MOVED and ASK redirection, TRYAGAIN).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from redis.crc import key_slot

from retrysafe.stores.hosts import Address

SLOTS = 16384
# The errors that say "not here" or "not now"; any other is the caller's.
REDIRECTS = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "LOADING", "READONLY", "MASTERDOWN")
LOST = "LOST"
"""In place of an error reply: the node's connection is gone."""

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.1
# So many redirects in a row without a break are a map that runs in circles.
_HOPS = 5
# Commands without a key: any node answers them.
_KEYLESS = {
    *("CLIENT", "CLUSTER", "CONFIG", "DBSIZE", "ECHO", "INFO", "KEYS", "PING", "PUBLISH"),
    *("PUBSUB", "SCAN", "SCRIPT", "TIME", "WAIT"),
}


@dataclass(frozen=True, slots=True)
class Send:
    """Send the command to a node, after ASKING where told so; answered with the reply, or with a
    Refusal."""

    address: Address
    asking: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error reply of REDIRECTS, or LOST, with the rest of its text."""

    word: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Refresh:
    """Ask for the map of slots, unless that was done a moment ago."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait, seconds, for what was refused as `reason`."""

    seconds: float
    reason: str


Step = Send | Refresh | Pause


def key_of(args: Sequence[Any]) -> bytes | None:
    """The key that a command is about; None for a command without one."""
    name = _bytes(args[0]).decode().upper()
    if name in ("EVAL", "EVALSHA"):
        return _bytes(args[3]) if int(args[2]) else None
    return None if len(args) < 2 or name in _KEYLESS else _bytes(args[1])


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class Topology:
    """The map of slots, as last heard. `seeds`: the URL's hosts, asked when nobody else answers."""

    def __init__(self, seeds: Sequence[Address]) -> None:
        self._order = list(seeds)
        self._slots: list[Address | None] = [None] * SLOTS
        self.masters: frozenset[Address] = frozenset()

    def owner(self, key: bytes) -> Address | None:
        """The node that serves a key, as far as known."""
        return self._slots[key_slot(key)]

    def nodes(self) -> list[Address]:
        """Every node that may be asked, who answered last first."""
        return list(self._order)

    def learn(self, slots: Any, asked: Address) -> bool:
        """Read the reply to CLUSTER SLOTS of a node. False: it was none, nothing was learnt."""
        owners: list[Address | None] = [None] * SLOTS
        known: list[Address] = [asked]
        masters: set[Address] = set()
        try:
            for first, last, primary, *others in slots:
                address = _address(primary, asked)
                masters.add(address)
                owners[first : last + 1] = [address] * (last + 1 - first)
                known += (address, *(_address(each, asked) for each in others))
        except (TypeError, ValueError, IndexError):
            return False
        if not masters or len(owners) != SLOTS:
            return False
        self._slots = owners
        self.masters = frozenset(masters)
        self._order = list(dict.fromkeys((*known, *self._order)))[:1000]
        return True

    def failed(self, address: Address) -> None:
        """It didn't answer: the others are asked first."""
        # A new list: threads may be reading the old one.
        self._order = [each for each in self._order if each != address] + [address]

    def moved(self, rest: str, asked: Address) -> Address | None:
        """Note what follows the word MOVED (`slot host:port`), and return the address."""
        slot, address = _redirect(rest, asked)
        if address is not None:
            self._slots[slot] = address
        return address


def route(topology: Topology, key: bytes) -> Generator[Step, Any, Any]:
    """Drive one command to the node that serves its key. Returns the reply; it never gives up,
    its driver does, past the deadline."""
    pause = _FIRST_PAUSE
    hops = 0
    address: Address | None = None
    asking = False
    while True:
        address = address or topology.owner(key)
        if address is None:
            yield Refresh()
            address = topology.owner(key)
            if address is None:
                yield Pause(pause, "no node of the cluster is known to serve the slot")
                pause = min(pause * 2, _LAST_PAUSE)
                continue
        reply = yield Send(address, asking)
        if not isinstance(reply, Refusal):
            return reply
        hops += 1
        if reply.word == "MOVED":
            to, asking = topology.moved(reply.rest, address), False
            yield Refresh()
            address = to
        elif reply.word == "ASK":
            address, asking = _redirect(reply.rest, address)[1], True
        elif reply.word == "TRYAGAIN":
            # Some of its keys are here and some are there: the same node, in a moment.
            yield Pause(pause, "TRYAGAIN")
            pause = min(pause * 2, _LAST_PAUSE)
            continue
        else:
            yield Pause(pause, f"{reply.word} {reply.rest}".strip())
            pause = min(pause * 2, _LAST_PAUSE)
            yield Refresh()
            address, asking = None, False
        if hops > _HOPS:
            yield Pause(pause, reply.word)
            pause = min(pause * 2, _LAST_PAUSE)


def _redirect(rest: str, asked: Address) -> tuple[int, Address | None]:
    """`slot host:port`, where an empty host is the one that was asked."""
    try:
        slot, place = rest.split()[:2]
        host, _, port = place.rpartition(":")
        if int(slot) not in range(SLOTS):
            return 0, None
        return int(slot), (host.strip("[]") or asked[0], int(port))
    except ValueError:
        return 0, None


def _address(node: Any, asked: Address) -> Address:
    host, port = node[0], node[1]
    text = host.decode() if isinstance(host, bytes) else (host or "")
    return (asked[0] if text in ("", "?") else text), int(port)
