"""What mypy and pyright must see through `@retry` (C71). Checked, never run."""

from __future__ import annotations

from typing import assert_type

from retrysafe.backoff import Fixed
from retrysafe.decorators.retry import retry
from retrysafe.retrying import RetryPolicy


@retry
def bare(order_id: str) -> int:
    return len(order_id)


@retry(attempts=3, backoff=Fixed(1.0))
def charge(order_id: str, cents: int = 0) -> dict[str, int]:
    return {order_id: cents}


@retry(RetryPolicy(attempts=3))
async def pay(order_id: str, *, cents: int) -> bytes:
    return order_id.encode() * cents


class Till:
    @retry(attempts=2)
    def take(self, order_id: str) -> float:
        return float(order_id)

    @retry
    async def take_later(self, order_id: str) -> float:
        return float(order_id)


assert_type(bare("o"), int)
assert_type(charge("o", 1), dict[str, int])
assert_type(Till().take(order_id="o"), float)
assert_type(RetryPolicy().call(bare, "o"), int)
assert_type(RetryPolicy().call(charge, order_id="o"), dict[str, int])


async def awaited() -> None:
    assert_type(await pay("o", cents=1), bytes)
    assert_type(await Till().take_later("o"), float)
    assert_type(await RetryPolicy().acall(pay, "o", cents=1), bytes)
    async for attempt in RetryPolicy():
        with attempt:
            assert_type(attempt.remaining(), float | None)


for each in RetryPolicy():
    with each:
        assert_type(each.number, int)

# What must be an error: an ignore that nothing needs is reported by both checkers.
bare(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
charge()  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
Till().take(1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
RetryPolicy().call(bare, 1)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
