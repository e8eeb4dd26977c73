"""What wraps a whole channel: ASGI apps inbound, HTTP clients outbound."""

from __future__ import annotations

from retrysafe.middleware.idempotency import IdempotencyMiddleware
from retrysafe.middleware.request_id import RequestIdMiddleware
from retrysafe.middleware.routes import idempotency

__all__ = ["IdempotencyMiddleware", "RequestIdMiddleware", "idempotency"]
