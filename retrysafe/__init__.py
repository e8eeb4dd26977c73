"""Make a call safe to retry: one execution, one recorded answer.

ASGI middleware and HTTP clients live in `retrysafe.middleware`, function decorators in
`retrysafe.decorators`; here is the engine that both are built on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from retrysafe import errors

# Bound at once: the module of this name would else stand in the function's place.
from retrysafe.classify import classify

if TYPE_CHECKING:
    from retrysafe.backoff import (
        EqualJitter,
        Exponential,
        Fixed,
        FullJitter,
        Immediate,
        Incremental,
    )
    from retrysafe.breaker import BreakerPolicy, CircuitBreaker
    from retrysafe.breaker_permit import Permit
    from retrysafe.budget import RetryBudget
    from retrysafe.classify import Classification, Outcome
    from retrysafe.context import RequestContext, current_request, request_id
    from retrysafe.deadlines import deadline
    from retrysafe.job_budget import JobBudget
    from retrysafe.jobs import Submission, run_job
    from retrysafe.policy import IdempotencyPolicy, Recovered
    from retrysafe.receipt import Receipt
    from retrysafe.receipts import AsyncReceipts, Call, Receipts
    from retrysafe.reservation import Reservation
    from retrysafe.results import ResultReader, ResultWriter
    from retrysafe.retrying import Attempt, RetryPolicy, attempts_of
    from retrysafe.saga import Saga
    from retrysafe.settings import Settings
    from retrysafe.stores import open_store

__all__ = [
    "AsyncReceipts",
    "Attempt",
    "BreakerPolicy",
    "Call",
    "CircuitBreaker",
    "Classification",
    "EqualJitter",
    "Exponential",
    "Fixed",
    "FullJitter",
    "IdempotencyPolicy",
    "Immediate",
    "Incremental",
    "JobBudget",
    "Outcome",
    "Permit",
    "Receipt",
    "Receipts",
    "Recovered",
    "RequestContext",
    "Reservation",
    "ResultReader",
    "ResultWriter",
    "RetryBudget",
    "RetryPolicy",
    "Saga",
    "Settings",
    "Submission",
    "attempts_of",
    "classify",
    "current_request",
    "deadline",
    "errors",
    "open_store",
    "request_id",
    "run_job",
]

# Each name is imported when it is first asked for: a service pays for what it uses.
_HOMES = {
    name: f"retrysafe.{module}"
    for module, names in {
        "backoff": "EqualJitter Exponential Fixed FullJitter Immediate Incremental",
        "breaker": "BreakerPolicy CircuitBreaker",
        "breaker_permit": "Permit",
        "budget": "RetryBudget",
        "classify": "Classification Outcome",
        "context": "RequestContext current_request request_id",
        "deadlines": "deadline",
        "job_budget": "JobBudget",
        "jobs": "Submission run_job",
        "policy": "IdempotencyPolicy Recovered",
        "receipt": "Receipt",
        "receipts": "AsyncReceipts Call Receipts",
        "reservation": "Reservation",
        "results": "ResultReader ResultWriter",
        "retrying": "Attempt RetryPolicy attempts_of",
        "saga": "Saga",
        "settings": "Settings",
        "stores": "open_store",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
