"""Events as OpenTelemetry metrics, and on the spans they happen in (the extra `otel`).

    from retrysafe.otel import instrument

    instrument()

- the counter `retrysafe.events` and the histogram `retrysafe.event.duration` (seconds), with the
  attributes `retrysafe.kind` and `retrysafe.outcome`
- on the current span, where one is recorded, an event `retrysafe.<kind>` with what is known of it:
  the digest of the key, the request's ID, the outcome, the detail. Never a key, nor a result

Spans themselves come from the instrumentation of the server and the clients.
"""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import metrics, trace

from retrysafe.events import Event, subscribe

__all__ = ["instrument"]


def instrument(meter_provider: metrics.MeterProvider | None = None) -> Callable[[], None]:
    """Tell of events from now on. Returns the function that ends it.

    meter_provider: in place of the global one.
    """
    meter = metrics.get_meter("retrysafe", meter_provider=meter_provider)
    events = meter.create_counter(
        "retrysafe.events", unit="{event}", description="What retrysafe saw and did."
    )
    seconds = meter.create_histogram(
        "retrysafe.event.duration", unit="s", description="How long it took."
    )

    def observe(event: Event) -> None:
        about = {"retrysafe.kind": event.kind}
        if event.outcome:
            about["retrysafe.outcome"] = event.outcome
        events.add(1, about)
        if event.duration is not None:
            seconds.record(event.duration, about)
        span = trace.get_current_span()
        if span.is_recording():
            span.add_event(f"retrysafe.{event.kind}", _facts(event))

    return subscribe(observe)


def _facts(event: Event) -> dict[str, str | float]:
    names = ("key", "scope", "request_id", "duration", "outcome", "detail")
    return {f"retrysafe.{name}": value for name in names if (value := getattr(event, name))}
