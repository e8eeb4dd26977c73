"""Make a call safe to retry: one execution, one recorded answer.

ASGI middleware and HTTP clients live in `retrysafe.middleware`, function decorators in
`retrysafe.decorators`; here is the engine that both are built on.
"""

from __future__ import annotations

from retrysafe import errors
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
from retrysafe.classify import Classification, Outcome, classify
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
