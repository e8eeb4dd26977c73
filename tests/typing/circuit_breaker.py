"""What mypy and pyright must see through `@circuit_breaker`. Checked, never run."""

from __future__ import annotations

from typing import assert_type

from retrysafe import BreakerPolicy, CircuitBreaker, Permit
from retrysafe.decorators import circuit_breaker, idempotent, retry

payments = CircuitBreaker("payments")


@circuit_breaker("stock")
def reserve(order_id: str, pieces: int = 1) -> dict[str, int]:
    return {order_id: pieces}


@circuit_breaker("stock", BreakerPolicy(open_for=5.0))
async def reserve_later(order_id: str, *, pieces: int) -> bytes:
    return order_id.encode() * pieces


@circuit_breaker(breaker=payments)
def pay(order_id: str) -> float:
    return float(order_id)


class Till:
    @circuit_breaker("till")
    def take(self, order_id: str) -> float:
        return float(order_id)

    @circuit_breaker("till")
    async def take_later(self, order_id: str) -> float:
        return float(order_id)


@idempotent(key="order_id")
@retry(attempts=3)
@circuit_breaker("all")
async def all_three(order_id: str, cents: int) -> dict[str, int]:
    return {order_id: cents}


assert_type(reserve("o", 2), dict[str, int])
assert_type(reserve(order_id="o"), dict[str, int])
assert_type(pay("o"), float)
assert_type(Till().take(order_id="o"), float)

permit = payments.acquire()
assert_type(permit, Permit)
assert_type(permit.success(), bool)
assert_type(permit.release_as_success(), bool)


async def awaited() -> None:
    assert_type(await reserve_later("o", pieces=2), bytes)
    assert_type(await Till().take_later("o"), float)
    assert_type(await all_three("o", cents=1), dict[str, int])
    assert_type(await payments.aacquire(), Permit)
    async with payments:
        pass


# What must be an error: an ignore that nothing needs is reported by both checkers.
reserve(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
reserve("o", "2")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
reserve()  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
Till().take(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
