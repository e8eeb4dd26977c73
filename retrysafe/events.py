"""One stream of facts: what the library saw and did. Adapters (logging, metrics) listen to it.

An event carries digests and durations, never keys, arguments, results or bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger("retrysafe")


@dataclass(frozen=True, slots=True)
class Event:
    """One fact. `key` and `scope` are digests (hex), `duration` is seconds."""

    kind: str
    key: str = ""
    scope: str = ""
    request_id: str = ""
    duration: float | None = None
    outcome: str = ""
    detail: str = ""


Listener = Callable[[Event], None]

_listeners: tuple[Listener, ...] = ()


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` for each event from now on. Returns the function that ends it."""
    global _listeners
    _listeners = (*_listeners, listener)

    def unsubscribe() -> None:
        global _listeners
        _listeners = tuple(each for each in _listeners if each is not listener)

    return unsubscribe


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Listen within a block."""
    end = subscribe(listener)
    try:
        yield
    finally:
        end()


def heard(kind: str) -> bool:
    """Whether anybody would take note of an event of this kind: saves the making of it."""
    return _listeners != _DEFAULT or logger.isEnabledFor(_LEVELS.get(kind, logging.DEBUG))


def emit(event: Event) -> None:
    """Hand an event to every listener. A listener that raises is logged and harms nobody."""
    for listener in _listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("an event listener failed on %s", event.kind)


# What loses or risks something is loud by default; the everyday facts are for debugging.
_LEVELS = {
    "result-unrecorded": logging.ERROR,
    "result-not-kept": logging.ERROR,
    "record-corrupt": logging.ERROR,
    "lease-lost": logging.ERROR,
    "finish-refused": logging.ERROR,
    "saga-parked": logging.ERROR,
    "saga-stuck": logging.ERROR,
    "unprotected": logging.WARNING,
    "receipt-vanished": logging.WARNING,
    "taken-over": logging.WARNING,
    "abandoned": logging.WARNING,
    "in-flight": logging.WARNING,
    "too-many-receipts": logging.WARNING,
    "renewal-failed": logging.WARNING,
    "store-unavailable": logging.WARNING,
    "inbox-lost": logging.WARNING,
    "budget-denied": logging.WARNING,
    "job-given-up": logging.WARNING,
    "breaker-opened": logging.WARNING,
    "saga-undo-failed": logging.WARNING,
    "saga-turned-back": logging.WARNING,
}


def log_event(event: Event) -> None:
    """The adapter to `logging`: one line an event, on the logger `retrysafe`."""
    level = _LEVELS.get(event.kind, logging.DEBUG)
    if logger.isEnabledFor(level):
        facts = {
            name: value
            for name in ("key", "scope", "outcome", "detail", "duration")
            if (value := getattr(event, name))
        }
        extra = {"retrysafe_event": event}
        if event.request_id:
            extra["request_id"] = event.request_id  # type: ignore[assignment]
        text = " ".join(f"{name}={value}" for name, value in facts.items())
        logger.log(level, "%s %s", event.kind, text, extra=extra)


_DEFAULT: tuple[Listener, ...] = (log_event,)
_listeners = _DEFAULT
