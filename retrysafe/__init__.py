"""Make a call safe to retry: one execution, one recorded answer.

ASGI middleware and HTTP clients live in `retrysafe.middleware`, function decorators in
`retrysafe.decorators`; here is the engine that both are built on.
"""

from __future__ import annotations

from retrysafe import errors
from retrysafe.context import RequestContext, current_request, request_id
from retrysafe.policy import IdempotencyPolicy, Recovered
from retrysafe.receipt import Receipt
from retrysafe.receipts import AsyncReceipts, Call, Receipts
from retrysafe.settings import Settings
from retrysafe.stores import open_store

__all__ = [
    "AsyncReceipts",
    "Call",
    "IdempotencyPolicy",
    "Receipt",
    "Receipts",
    "Recovered",
    "RequestContext",
    "Settings",
    "current_request",
    "errors",
    "open_store",
    "request_id",
]
