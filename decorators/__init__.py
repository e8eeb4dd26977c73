"""Decorators: one function made safe to retry."""

from __future__ import annotations

from retrysafe.decorators.idempotent import idempotent
from retrysafe.decorators.step import step

__all__ = ["idempotent", "step"]
