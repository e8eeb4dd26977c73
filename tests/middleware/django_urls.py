"""The URL configuration of the Django test, filled by it."""

from __future__ import annotations

from typing import Any

urlpatterns: list[Any] = []
