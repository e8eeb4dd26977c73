"""The types of decorated functions, as mypy and pyright see them. The functions are never called:
this module is checked (`mypy --strict`), and a line that should fail says so with its ignore."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Coroutine
from decimal import Decimal
from typing import Any, assert_type

from retrysafe.decorators import idempotent, step


@idempotent
def bare(a: int, *, b: str = "") -> list[int]:
    return [a]


@idempotent(key="order_id", ttl=60, keep_errors=(ValueError,))
async def charge(order_id: str, amount: Decimal) -> Decimal:
    return amount


class Shop:
    @idempotent(key="item")
    def buy(self, item: str) -> int:
        return 1

    @idempotent
    async def sell(self, item: str) -> int:
        return 1

    @classmethod
    @idempotent
    def open(cls, name: str) -> Shop:
        return cls()


@step("charge")
async def part(order: str) -> int:
    return 1


async def checked(shop: Shop) -> None:
    assert_type(bare(1, b="x"), list[int])
    assert_type(await charge("o-1", amount=Decimal(1)), Decimal)
    later: Coroutine[Any, Any, Decimal] = charge("o-1", Decimal(1))
    assert_type(await later, Decimal)
    assert_type(shop.buy("x"), int)
    assert_type(await shop.sell(item="x"), int)
    assert_type(Shop.open("x"), Shop)
    assert_type(await part("x"), int)
    with step("n", type=Decimal) as s:
        assert_type(s.result, Decimal)
    charge.forget(order_id="o-1")
    await shop.sell.receipt(item="x")
    bare("1")  # type: ignore[arg-type]
    bare(1, c=1)  # type: ignore[call-arg]
    shop.buy(1)  # type: ignore[arg-type]
    idempotent(ttl="1h")  # type: ignore[call-overload]
    await charge("o-1")  # type: ignore[call-arg]


def test_the_signature_survives_mypy_strict() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
