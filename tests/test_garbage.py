"""A call leaves no reference cycle behind: what it held is freed when it ends, not when the
collector comes, which some services put off or switch off."""

from __future__ import annotations

import asyncio
import gc
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from retrysafe.decorators import circuit_breaker, idempotent, retry
from retrysafe.middleware import IdempotencyMiddleware, RequestIdMiddleware
from retrysafe.policy import IdempotencyPolicy
from retrysafe.stores import Store
from tests.asgi import post
from tests.middleware.test_idempotency import App
from tests.support import run, until

CALLS = 20
WAYS = (types.CoroutineType, types.GeneratorType, asyncio.Future)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Nothing in the block makes what only the collector can free."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        # Threads that other tests left connect again and again, and leave redis-py's cycles: what
        # is looked for is ours, or on its way here.
        found = Counter(
            type(each).__qualname__
            for each in gc.garbage
            if type(each).__module__.startswith("retrysafe") or isinstance(each, WAYS)
        )
        assert not [name for name, number in found.items() if number >= CALLS], found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


Once = Callable[[Any], Awaitable[None]]


def of_requests(store: Store) -> dict[str, Once]:
    policy = IdempotencyPolicy(max_receipts=10_000)
    app = App()
    target = RequestIdMiddleware(IdempotencyMiddleware(app, store=store, policy=policy))
    failing = IdempotencyMiddleware(App(status=500), store=store)

    async def fresh(n: Any) -> None:
        await post(target, key=f"fresh-{n}")

    async def replayed(n: Any) -> None:
        await post(target, key="again")

    async def joined(n: Any) -> None:
        await asyncio.gather(*(post(target, key=f"joined-{n}") for _ in range(3)))

    async def released(n: Any) -> None:
        await post(failing, key=f"released-{n}")

    async def refused(n: Any) -> None:
        await post(target, key="again", body=b"another")

    return {each.__name__: each for each in (fresh, replayed, joined, released, refused)}


def of_functions(store: Store) -> dict[str, Once]:
    @idempotent(key="n", store=store)
    async def pay(n: str) -> str:
        return n

    @idempotent(key="n", store=store)
    def pay_now(n: str) -> str:
        return n

    @idempotent(key="n", store=store)
    async def fail(n: str) -> str:
        raise ValueError(n)

    @retry(attempts=2, deadline=5.0)
    @circuit_breaker("garbage")
    async def send(n: str) -> str:
        return n

    async def function(n: Any) -> None:
        await pay(f"f-{n}")
        await pay(f"f-{n}")

    async def in_a_thread(n: Any) -> None:
        pay_now(f"t-{n}")
        pay_now(f"t-{n}")

    async def failure(n: Any) -> None:
        with pytest.raises(ValueError, match="e-"):
            await fail(f"e-{n}")

    async def outbound(n: Any) -> None:
        await send(n)

    return {each.__name__: each for each in (function, in_a_thread, failure, outbound)}


@pytest.mark.parametrize(
    "kind",
    [
        *("fresh", "replayed", "joined", "released", "refused"),
        *("function", "in_a_thread", "failure", "outbound"),
    ],
)
def test_a_call_leaves_no_reference_cycle(store: Store, kind: str) -> None:
    async def main() -> None:
        once = {**of_requests(store), **of_functions(store)}[kind]
        for n in range(3):
            await once(f"first-{n}")
        tasks = len(asyncio.all_tasks())
        with no_garbage():
            for n in range(CALLS):
                await once(n)
            await until(lambda: len(asyncio.all_tasks()) <= tasks)

    run(main())
