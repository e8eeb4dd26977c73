"""Events as Prometheus metrics (the extra `prometheus`).

    from retrysafe.prometheus import instrument

    instrument()

- `retrysafe_events_total{kind, outcome}`: how often each thing happened
- `retrysafe_event_seconds{kind}`: how long it took, where that has a meaning: `finished` (the
  work), `waited` and `replayed` (a duplicate's wait), `retry-attempt` (the delay before it)
- `retrysafe_breaker_state{name, state}`: 1 for the state that this process last saw, else 0

No metric names a key, a caller or a request: there are as many series as kinds of events, and one
for each breaker and state.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from retrysafe.breaker_local import STATE_OF_EVENT
from retrysafe.events import Event, subscribe

__all__ = ["instrument"]

_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def instrument(registry: CollectorRegistry = REGISTRY) -> Callable[[], None]:
    """Count events from now on, in `registry`. Returns the function that ends it.

    Raises ValueError where the registry has these metrics already.
    """
    events = Counter(
        "retrysafe_events_total",
        "What retrysafe saw and did.",
        ["kind", "outcome"],
        registry=registry,
    )
    seconds = Histogram(
        "retrysafe_event_seconds",
        "How long it took.",
        ["kind"],
        buckets=_BUCKETS,
        registry=registry,
    )
    states = Gauge(
        "retrysafe_breaker_state",
        "The state of each circuit breaker, as this process last saw it.",
        ["name", "state"],
        registry=registry,
    )

    def observe(event: Event) -> None:
        events.labels(event.kind, event.outcome).inc()
        if event.duration is not None:
            seconds.labels(event.kind).observe(event.duration)
        now = STATE_OF_EVENT.get(event.kind)
        if now is not None:
            for state in STATE_OF_EVENT.values():
                states.labels(event.key, state).set(state == now)

    unsubscribe = subscribe(observe)

    def end() -> None:
        unsubscribe()
        for each in (events, seconds, states):
            registry.unregister(each)

    return end
