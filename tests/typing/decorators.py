"""What mypy and pyright must see through the decorators. Checked, never run."""

from __future__ import annotations

from typing import assert_type

from retrysafe.decorators import idempotent


@idempotent
def bare(order_id: str) -> int:
    return len(order_id)


@idempotent(key="order_id", ttl=60.0, keep_errors=ValueError)
def charge(order_id: str, cents: int = 0) -> dict[str, int]:
    return {order_id: cents}


@idempotent(key="order_id")
async def pay(order_id: str, *, cents: int) -> bytes:
    return order_id.encode() * cents


class Till:
    @idempotent(key="order_id")
    def take(self, order_id: str) -> float:
        return float(order_id)

    @idempotent(key="order_id")
    async def take_later(self, order_id: str) -> float:
        return float(order_id)


assert_type(bare("o"), int)
assert_type(charge("o", 1), dict[str, int])
assert_type(charge(order_id="o"), dict[str, int])
assert_type(Till().take("o"), float)
assert_type(Till().take(order_id="o"), float)


async def awaited() -> None:
    assert_type(await pay("o", cents=1), bytes)
    assert_type(await Till().take_later("o"), float)


# What must be an error: an ignore that nothing needs is reported by both checkers.
charge(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
charge("o", "1")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
charge()  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
Till().take(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
