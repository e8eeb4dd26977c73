"""What the outbound clients share: which headers go out, and whether an attempt may be repeated.

Every logical call has one `Idempotency-Key`, the same on all of its attempts: the caller's own, or
one derived from the keyed work (or outer attempt) it is made in, or a new one. The latter two only
where they are of use: never on safe methods, outside keyed work not on idempotent ones. A caller
who wants none, since the other side knows no keys, sends it empty: it is taken off, and then a
POST is repeated only where it surely had no effect.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

from retrysafe.breaker import CircuitBreaker
from retrysafe.breaker_permit import Permit
from retrysafe.breaker_states import Verdict
from retrysafe.classify import Classification, as_classification, classify
from retrysafe.context import current_request, request_id
from retrysafe.deadlines import remaining
from retrysafe.outcomes import Outcome
from retrysafe.retrying import RetryPolicy
from retrysafe.settings import Settings

__all__ = ["BreakerChoice", "Exchange", "Outbound", "is_one_shot"]

R = TypeVar("R")

BreakerChoice = CircuitBreaker | Callable[[str], CircuitBreaker] | bool | None

SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
IDEMPOTENT = SAFE | {"PUT", "DELETE"}
_HOSTS = 1024  # breakers of one client that are remembered, the latest used
_NO_REPLAY = (
    "not retried: the request body can't be replayed; send bytes, a seekable file, "
    "or an iterable that can be iterated anew"
)


class Outbound:
    """The settings of one client: its policy, and where its breakers come from.

    breaker: True makes one for each host, in this process; a `CircuitBreaker` guards all calls; a
    function gets `host:port` and returns the breaker to use. Raises TypeError for anything else.
    """

    def __init__(self, policy: RetryPolicy | None, breaker: BreakerChoice) -> None:
        if policy is not None and not isinstance(policy, RetryPolicy):
            raise TypeError(f"policy takes a RetryPolicy, not {policy!r}")
        if not (breaker is None or isinstance(breaker, bool | CircuitBreaker) or callable(breaker)):
            raise TypeError(
                f"breaker takes True, a CircuitBreaker, or a function of the host, not {breaker!r}"
            )
        settings = Settings.from_env()
        self.policy = policy or RetryPolicy()
        self.key_header = settings.key_header
        self.request_id_header = settings.request_id_header
        self._breaker = breaker
        self._by_host: OrderedDict[str, CircuitBreaker] = OrderedDict()
        self._lock = Lock()

    def breaker(self, host: str) -> CircuitBreaker | None:
        """The breaker for calls to `host` (with its port); None: none."""
        chosen = self._breaker
        if chosen is None or chosen is False:
            return None
        if isinstance(chosen, CircuitBreaker):
            return chosen
        if chosen is not True:
            return chosen(host)
        with self._lock:
            found = self._by_host.get(host)
            if found is None:
                found = self._by_host[host] = CircuitBreaker(host)
                if len(self._by_host) > _HOSTS:
                    self._by_host.popitem(last=False)
            self._by_host.move_to_end(host)
        return found


class Exchange:
    """One logical call of a client: headers made once, attempts judged one by one.

    headers: the request's own, any mutable mapping that knows no case; they are completed when the
    first attempt begins. replay: whether the body can be sent again; where it can, the function
    also makes it ready. (Not asked where nothing was sent: then no byte of it was read.)
    """

    def __init__(
        self,
        outbound: Outbound,
        method: str,
        host: str,
        path: str,
        headers: Any,
        replay: Callable[[], bool],
    ) -> None:
        self._outbound = outbound
        self._policy = outbound.policy
        self._method = method.upper()
        self._host = host
        self._headers = headers
        self._replay = replay
        self._repeatable: bool | None = None
        # Without the query, which may be secret: the name is seen in events.
        self.call = self._policy.begin(f"{self._method} {host}{path}")

    def _prepare(self) -> None:
        """Complete the headers; from within the first attempt, which knows what is around it."""
        if self._repeatable is not None:
            return
        headers, key, rid = (
            self._headers,
            self._outbound.key_header,
            self._outbound.request_id_header,
        )
        around = request_id()
        if around is not None and rid not in headers:
            headers[rid] = around
        if key in headers:
            if not headers[key]:
                del headers[key]
        elif self._method not in (SAFE if self._in_keyed_work() else IDEMPOTENT):
            headers[key] = self.call.key
        self._repeatable = self._method in IDEMPOTENT or key in headers

    def _in_keyed_work(self) -> bool:
        work = current_request()
        return work is not None and work.key is not None

    def send(self, once: Callable[[], R], discard: Callable[[R], object]) -> R:
        """Send by `once`, and again where that is safe and may help. The last answer is returned
        whatever its status; `discard` closes those before it. Raises the last attempt's error."""
        call, breaker = self.call, self._outbound.breaker(self._host)
        while True:
            call.enter()
            permit: Permit | None = None
            try:
                self._prepare()
                try:
                    permit = breaker.acquire() if breaker else None
                    answer = once()
                except BaseException as error:
                    if permit is not None and breaker is not None:
                        _settle(permit, breaker.judge(error))
                    delay = self._failed(error) if isinstance(error, Exception) else None
                    if delay is None:
                        raise
                else:
                    if permit is not None and breaker is not None:
                        _settle(permit, breaker.judge_result(answer, classify))
                    delay = self._answered(answer)
                    if delay is None:
                        return answer
                    discard(answer)
            finally:
                call.leave()
            call.sleep(delay)

    async def asend(
        self, once: Callable[[], Awaitable[R]], discard: Callable[[R], Awaitable[object]]
    ) -> R:
        """The same for async clients; the waits leave the event loop free."""
        call, breaker = self.call, self._outbound.breaker(self._host)
        while True:
            call.enter()
            permit: Permit | None = None
            try:
                self._prepare()
                try:
                    permit = await breaker.aacquire() if breaker else None
                    answer = await once()
                except BaseException as error:
                    if permit is not None and breaker is not None:
                        await _asettle(permit, breaker.judge(error))
                    delay = self._failed(error) if isinstance(error, Exception) else None
                    if delay is None:
                        raise
                else:
                    if permit is not None and breaker is not None:
                        await _asettle(permit, breaker.judge_result(answer, classify))
                    delay = self._answered(answer)
                    if delay is None:
                        return answer
                    await discard(answer)
            finally:
                call.leave()
            await call.asleep(delay)

    def timeout(self) -> float | None:
        """Seconds until the `deadline()` around this call is over; None: there is none, or it is
        over already (then the attempt was begun with no time left, and nothing cuts it short)."""
        return remaining() or None

    def _failed(self, error: Exception) -> float | None:
        if not self._can_replay(error):
            error.add_note(f"retrysafe: {_NO_REPLAY}")
            return None
        return self.call.failed(error, self._repeatable)

    def _answered(self, answer: Any) -> float | None:
        verdict = self._verdict(answer)
        if verdict is not None and verdict.outcome is Outcome.SUCCESS:
            self.call.succeeded()
            return None
        if not self._can_replay(answer):
            _note(answer, _NO_REPLAY)
            return None
        return self.call.failed(answer, self._repeatable)

    def _can_replay(self, subject: Any) -> bool:
        """True also where it doesn't matter, since there will be no other attempt."""
        verdict = self._verdict(subject)
        if verdict is None or not verdict.sent:
            return True
        if not self._policy.decide(verdict, bool(self._repeatable)):
            return True
        if self._policy.attempts is not None and self.call.number >= self._policy.attempts:
            return True
        return self._replay()

    def _verdict(self, subject: Any) -> Classification | None:
        # A classifier that fails ends the retries, and is told of, in `Call.failed`.
        with suppress(Exception):
            return as_classification((self._policy.classify or classify)(subject))
        return None


def is_one_shot(body: object) -> bool:
    """Whether an iterable can be read once only: it is its own iterator."""
    return hasattr(body, "__next__") or hasattr(body, "__anext__")


def _note(answer: Any, text: str) -> None:
    """Say on an answer why it is the last one: `answer.retrysafe_note`."""
    with suppress(AttributeError, TypeError):
        answer.retrysafe_note = text


_SETTLE = {
    Verdict.SUCCESS: "success",
    Verdict.FAILURE: "failure",
    Verdict.RELEASE: "release",
    Verdict.ANSWERED: "release_as_success",
}


def _settle(permit: Permit, verdict: Verdict) -> None:
    getattr(permit, _SETTLE[verdict])()


async def _asettle(permit: Permit, verdict: Verdict) -> None:
    await getattr(permit, f"a{_SETTLE[verdict]}")()
