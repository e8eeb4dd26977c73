"""Small helpers of the tests."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from retrysafe.breaker import CircuitBreaker
from retrysafe.errors import BreakerOpen

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], limit: float = 30.0) -> T:
    """Run one async test to its end, in a loop of its own, bounded by `limit` seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(limit):
            return await main

    return asyncio.run(bounded())


@contextmanager
def collector_held() -> Iterator[None]:
    """Hold the garbage collector while a value nested to the recursion limit is decoded.

    A collection at that depth runs the finalizers of whatever earlier tests left behind, with no
    stack left to run them on: they fail, and so does the test that happened to be running.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def until(condition: Callable[[], bool | Awaitable[bool]], limit: float = 10.0) -> None:
    """Wait for a condition, at most `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        met = condition()
        if not isinstance(met, bool):
            met = await met
        if met:
            return
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], bool], limit: float = 10.0) -> None:
    """The same for sync tests."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


def admitted(breaker: CircuitBreaker) -> bool:
    """Whether a breaker lets a call through now; its permit is given back."""
    try:
        breaker.acquire().release()
    except BreakerOpen:
        return False
    return True
