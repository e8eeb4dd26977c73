"""What one process knows of a breaker in Redis, how it asks, and what it makes of an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from retrysafe.breaker_local import emit_move
from retrysafe.breaker_policy import BreakerPolicy
from retrysafe.errors import StoreUnavailable
from retrysafe.events import Event, emit

# A word of Redis is used for FRESH seconds, then looked after in the background, and after STALE
# seconds not used before asking.
FRESH = 1.0
STALE = 5.0
# How long a full half-open round is refused here without asking Redis again.
FULL = 0.02
# How long an outage of Redis is taken for granted before the next try.
OUTAGE = 1.0
_DAY = 86_400.0

T = TypeVar("T")
Call = tuple[str, list[str], list[Any]]
Steps = Generator[Call, Any, T]


def breaker_keys(namespace: str, name: str) -> list[str]:
    """State, permits, window: one hash tag, so one Cluster slot."""
    tag = name.replace("{", "%7B").replace("}", "%7D")
    return [f"{namespace}:b:{{{tag}}}{part}" for part in ("", ":permits", ":window")]


def _us(seconds: float) -> int:
    return max(1, round(seconds * 1_000_000))


class Era:
    """One generation in one state, as this process knows it. Times are of the local clock."""

    __slots__ = ("asked", "free", "fresh", "gen", "good", "quiet", "retry_at", "state")

    def __init__(self, state: str, gen: str) -> None:
        self.state = state
        self.gen = gen
        self.free = state in ("closed", "disabled")
        self.asked = self.fresh = float("-inf")
        self.quiet = self.retry_at = float("-inf")  # no asking before; the first chance
        self.good = 0  # successes not yet told


class Remote:
    """One breaker in Redis, seen from here. Makes calls and learns from replies; sends nothing.

    `era` is what was last heard. `out`: Redis was out of reach, and may be tried after `out_until`.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        policy: BreakerPolicy,
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.era = Era("closed", "0")
        self.out = False
        self.out_until = float("-inf")
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._keys = breaker_keys(namespace, name)
        self.channel = self._keys[0].encode()
        self._told = float("-inf")  # when a move was heard of, by the local clock
        self._open_rules = [
            _us(policy.open_for),
            repr(float(policy.open_growth)),
            _us(policy.longest_open),
        ]
        self._trip_rules = [
            policy.window_size or 0,
            _us(policy.window_seconds or 1.0),
            policy.enough_calls,
            repr(float(policy.failure_rate)),
            repr(float(policy.slow_rate)) if policy.slow_call is not None else "0",
        ]
        self._ttl_ms = _ttl_ms(policy)

    def ask(self, token: int) -> Call:
        """For one call, with `token` as the probe permit's if it takes one."""
        rules = self._policy
        args = [token, _us(rules.permit_lease), rules.probes, self._ttl_ms, self.era.gen]
        return "breaker_acquire", self._keys[:2], args

    def verdict(self, era: Era, token: int, word: str) -> Call:
        """Give a probe permit back: success, failure or release."""
        rules = [*self._open_rules, repr(self._draw()), self._ttl_ms]
        args = [era.gen, token, word, self._policy.probes, *rules]
        return "breaker_verdict", self._keys, args

    def report(self, era: Era, failed: bool, slow: bool) -> Call:
        """Add a failed or slow call, if it was, and the good ones not yet told."""
        with self.lock:
            good, era.good = era.good, 0
        size = self._policy.window_size
        if size is not None:
            good = min(good, size)
        calls = [era.gen, good, int(failed), int(slow)]
        rules = [*self._trip_rules, *self._open_rules, repr(self._draw()), self._ttl_ms]
        return "breaker_report", self._keys, [*calls, *rules]

    def look(self) -> Call:
        """Read and change nothing."""
        return self.report(Era("closed", self.era.gen), False, False)

    def command(self, target: str) -> Call:
        """An operator's word; it stands for 30 days."""
        ttl = max(self._ttl_ms, round(30 * _DAY * 1000))
        return "breaker_set", self._keys, [target, ttl]

    def learn(self, reply: Any, asked: float) -> tuple[int, Era, float]:
        """Take a reply in: its first word, what is known now, and the seconds to wait.

        `asked`: when the call was made, by the local clock.
        """
        word, state, gen, wait_us = reply
        state, gen = _text(state), _text(gen)
        wait = wait_us / 1_000_000
        now = self._clock()
        moved = None
        with self.lock:
            self.out, self.out_until = False, float("-inf")
            era = self.era
            if asked < era.asked and int(gen) < int(era.gen):
                return word, Era(state, gen), wait  # overtaken by a newer answer
            if state != era.state or gen != era.gen:
                if state != era.state:
                    moved = era.state
                era = Era(state, gen)
            if asked >= self._told:  # else the move came after this answer
                era.asked = max(era.asked, asked)
                era.fresh = now + FRESH
            era.retry_at = now + wait
            era.quiet = now + (min(wait, FULL) if state == "half-open" else wait)
            self.era = era
        if moved is not None:
            emit_move(self.name, moved, state, wait if state == "open" else None)
        return word, era, wait

    def wake(self, _: object) -> None:
        """The breaker has moved, or may have: what is known is asked for again by the next call."""
        with self.lock:
            self._told = self._clock()
            self.era.asked = self.era.fresh = float("-inf")

    def forked(self) -> None:
        """In a child: nobody tells it of moves yet, so its first call asks. A thread that is not
        here may have held the lock."""
        self.lock = threading.Lock()
        self.wake(None)

    def lost(self, fault: StoreUnavailable) -> None:
        """Redis could not be asked."""
        now = self._clock()
        with self.lock:
            known = now < self.out_until
            self.out = True
            self.out_until = now + OUTAGE
        if not known:
            emit(Event("store-unavailable", key=self.name, outcome="breaker", detail=fault.reason))


def _text(word: str | bytes | int) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


def _ttl_ms(rules: BreakerPolicy) -> int:
    """Long enough that no key ends while it still means something."""
    longest = max(rules.longest_open + rules.permit_lease, rules.window_seconds or 0.0)
    return round(1000 * max(_DAY, 2 * longest))
