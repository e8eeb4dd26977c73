"""A broker of its own: what a queue keeps has no TTL, and the receipts' server checks for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.servers import Server


@pytest.fixture
def broker_url(own_server: Callable[..., Server]) -> str:
    """The URL of the server that holds the queues; receipts go to `redis_url`."""
    return own_server().url
