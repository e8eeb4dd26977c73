"""Events as metrics and on spans: what happened is counted once, and names nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from retrysafe import otel, prometheus
from retrysafe.breaker import BreakerPolicy, CircuitBreaker
from retrysafe.decorators import idempotent
from retrysafe.events import Event, emit
from retrysafe.middleware import IdempotencyMiddleware
from retrysafe.stores.memory import MemoryStore
from tests.asgi import post
from tests.support import run

SECRET = "key-4111111111111111"


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    made = CollectorRegistry()
    end = prometheus.instrument(made)
    yield made
    end()


def twice() -> None:
    """A call and its duplicate."""

    @idempotent(key="order", store=MemoryStore("tests"))
    def pay(order: str) -> str:
        return f"paid {order}"

    assert pay(SECRET) == pay(SECRET)


def test_events_are_counted_and_timed(registry: CollectorRegistry) -> None:
    twice()
    value = registry.get_sample_value
    assert value("retrysafe_events_total", {"kind": "acquired", "outcome": ""}) == 1
    assert value("retrysafe_events_total", {"kind": "finished", "outcome": "kept"}) == 1
    assert value("retrysafe_events_total", {"kind": "replayed", "outcome": ""}) == 1
    assert value("retrysafe_event_seconds_count", {"kind": "finished"}) == 1
    assert SECRET not in generate_latest(registry).decode()


def test_a_breakers_state_is_a_gauge(registry: CollectorRegistry) -> None:
    def states() -> dict[str, float]:
        (family,) = [each for each in registry.collect() if each.name == "retrysafe_breaker_state"]
        return {each.labels["state"]: each.value for each in family.samples if each.value}

    breaker = CircuitBreaker("bank", BreakerPolicy(min_calls=1, open_for=60))
    assert states() == {}
    breaker.acquire().failure()
    assert states() == {"open": 1}
    breaker.force_open()
    assert states() == {"forced-open": 1}
    breaker.reset()
    assert states() == {"closed": 1}


def test_what_has_ended_counts_no_more_and_may_begin_again() -> None:
    registry = CollectorRegistry()
    end = prometheus.instrument(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        prometheus.instrument(registry)
    end()
    assert list(registry.collect()) == []
    end = prometheus.instrument(registry)
    emit(Event("replayed"))
    labels = {"kind": "replayed", "outcome": ""}
    assert registry.get_sample_value("retrysafe_events_total", labels) == 1
    end()


def points(reader: InMemoryMetricReader) -> dict[tuple[str, str, str], Any]:
    """The metrics' points by name, kind and outcome."""
    data = reader.get_metrics_data()
    assert data is not None
    found: dict[tuple[str, str, str], Any] = {}
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    about = dict(point.attributes or {})
                    kind, outcome = about["retrysafe.kind"], about.get("retrysafe.outcome", "")
                    found[metric.name, str(kind), str(outcome)] = point
    return found


def test_opentelemetry_counts_and_times_them() -> None:
    reader = InMemoryMetricReader()
    end = otel.instrument(MeterProvider([reader]))
    try:
        twice()
    finally:
        end()
    emit(Event("acquired"))
    found = points(reader)
    assert found["retrysafe.events", "acquired", ""].value == 1
    assert found["retrysafe.events", "replayed", ""].value == 1
    assert found["retrysafe.event.duration", "finished", "kept"].count == 1


def test_a_requests_span_says_what_was_done_for_it() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    target = IdempotencyMiddleware(app, store=MemoryStore("tests"))

    async def main() -> None:
        for name in ("first", "second"):
            with tracer.start_as_current_span(name):
                await post(target, key=SECRET)

    end = otel.instrument(MeterProvider())
    try:
        run(main())
    finally:
        end()
    first, second = exporter.get_finished_spans()
    assert [each.name for each in first.events] == ["retrysafe.acquired", "retrysafe.finished"]
    assert [each.name for each in second.events] == ["retrysafe.replayed"]
    facts = dict(first.events[1].attributes or {})
    assert facts["retrysafe.outcome"] == "kept"
    assert len(str(facts["retrysafe.key"])) == 32
    assert facts["retrysafe.request_id"]
    assert SECRET not in "".join(span.to_json() for span in (first, second))
