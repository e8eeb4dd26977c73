"""Deliberate bugs, put into a worker of the harness from outside. The checker must find each."""

from __future__ import annotations

import asyncio
from typing import Any

from retrysafe import breaker_shared, commands, desks, flights
from retrysafe.breaker_permit import ProbePermit
from retrysafe.breaker_shared import SharedCore
from retrysafe.breaker_states import Verdict
from retrysafe.stores import redis as redis_store
from retrysafe.stores import wire

BUGS = ("no-fencing", "publish-before-record", "forgotten-inbox", "double-release")

_PUBLISH = b"""
local value = redis.call('GET', KEYS[1])
if value then wake(value, ARGV[4], ARGV[6] .. ARGV[2]) end
return {1, 0, ''}
"""
GAP = 1.0
"""How long (seconds) the publishing bug takes from its message to its record."""


def plant(bug: str) -> None:
    """Make this process have the bug."""
    {
        "no-fencing": _no_fencing,
        "publish-before-record": _publish_before_record,
        "forgotten-inbox": _forgotten_inbox,
        "double-release": _double_release,
    }[bug]()


def _no_fencing() -> None:
    """Whoever finishes overwrites what is there."""
    text = wire._text

    def unfenced(name: str) -> bytes:
        if name != "finish":
            return text(name)
        kept = text(name).replace(b"if ours then return 'r11' end", b"")
        kept = kept.replace(b"return {3, 0, value}", b"")
        return kept.replace(b"if not ours then return 'r10' end", b"")

    wire._text = unfenced
    wire.script.cache_clear()


def _publish_before_record() -> None:
    """The waiters hear of a result that isn't recorded yet."""
    right = redis_store.AsyncRedisBackend.execute

    async def execute(self: Any, command: commands.Command) -> commands.Reply:
        if isinstance(command, commands.Finish):
            _, key, args = self._wire.pack(command)
            await self.command(b"EVAL", wire._text("wake") + _PUBLISH, 1, key, *args)
            await asyncio.sleep(GAP)
        return await right(self, command)

    redis_store.AsyncRedisBackend.execute = execute  # type: ignore[method-assign]


def _forgotten_inbox() -> None:
    """Neither the messages nor the polls wake a waiter."""
    flights.Flights.nudge = lambda self, digest, value: None  # type: ignore[method-assign]
    waker: Any = desks.AsyncDesk.__init__.__globals__["AsyncPlace"]
    waker_sync: Any = desks.Desk.__init__.__globals__["ThreadPlace"]
    right, right_sync = waker.wait, waker_sync.wait

    async def wait(self: Any, seconds: float) -> Any:
        return await right(self, max(seconds, 8.0))

    def wait_sync(self: Any, seconds: float) -> Any:
        return right_sync(self, max(seconds, 8.0))

    waker.wait = wait
    waker_sync.wait = wait_sync


def _double_release() -> None:
    """A probe's slot is given back a first time while the probe is still running."""
    right = breaker_shared.SharedCore.aacquire

    async def aacquire(self: SharedCore) -> Any:
        permit = await right(self)
        if isinstance(permit, ProbePermit) and permit._core is self:
            await self.asettle(permit, Verdict.RELEASE)
        return permit

    SharedCore.aacquire = aacquire  # type: ignore[method-assign]
