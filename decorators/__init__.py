"""Decorators: one function made safe to retry."""

from __future__ import annotations

from retrysafe.decorators.circuit_breaker import circuit_breaker
from retrysafe.decorators.idempotent import idempotent
from retrysafe.decorators.retry import retry
from retrysafe.decorators.step import step

__all__ = ["circuit_breaker", "idempotent", "retry", "step"]
