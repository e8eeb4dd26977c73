"""`@circuit_breaker`: the function stays itself and goes through the breaker."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest

from retrysafe.breaker import BreakerPolicy, CircuitBreaker, named
from retrysafe.classify import Outcome
from retrysafe.decorators.circuit_breaker import circuit_breaker
from retrysafe.errors import BreakerOpen
from tests.support import run

ONCE = BreakerPolicy(failure_rate=1.0, min_calls=1, window=1)
_names = itertools.count()


@pytest.fixture
def name() -> str:
    return f"decorated-{next(_names)}"


def test_a_sync_function_is_refused_once_the_endpoint_is_ill(name: str) -> None:
    runs = 0

    @circuit_breaker(name, ONCE)
    def call(number: int, *, by: str = "a") -> str:
        """Calls."""
        nonlocal runs
        runs += 1
        if by == "bad":
            raise ConnectionError(number)
        return f"{number}{by}"

    assert call(1, by="b") == "1b"
    with pytest.raises(ConnectionError, match="2"):
        call(2, by="bad")
    with pytest.raises(BreakerOpen):
        call(3)
    assert runs == 2
    assert call.__name__ == "call"
    assert call.__doc__ == "Calls."
    assert list(inspect.signature(call).parameters) == ["number", "by"]


def test_an_async_function_is_awaited_inside_the_guard(name: str) -> None:
    @circuit_breaker(name, ONCE)
    async def call(bad: bool) -> str:
        await asyncio.sleep(0)
        if bad:
            raise ConnectionError
        return "good"

    async def main() -> None:
        assert await call(False) == "good"
        with pytest.raises(ConnectionError):
            await call(True)
        with pytest.raises(BreakerOpen):
            await call(False)

    assert inspect.iscoroutinefunction(call)
    run(main())


def test_C30_a_plain_function_that_returns_a_coroutine_counts_too(name: str) -> None:
    async def work(bad: bool) -> str:
        if bad:
            raise ConnectionError
        return "good"

    @circuit_breaker(name, ONCE)
    def call(bad: bool) -> Coroutine[Any, Any, str]:
        return work(bad)

    partial = circuit_breaker(name)(functools.partial(work, True))

    async def main() -> None:
        assert await call(False) == "good"
        with pytest.raises(ConnectionError):
            await partial()
        with pytest.raises(BreakerOpen):
            await partial()
        with pytest.raises(BreakerOpen):
            await call(False)

    run(main())


def test_C30_an_object_with_an_async_call_counts(name: str) -> None:
    class Client:
        async def __call__(self) -> None:
            raise ConnectionError

    call = circuit_breaker(name, ONCE)(Client())

    async def main() -> None:
        with pytest.raises(ConnectionError):
            await call()
        with pytest.raises(BreakerOpen):
            await call()

    run(main())


def test_methods_of_every_kind_keep_their_first_argument(name: str) -> None:
    class Client:
        factor = 3

        @circuit_breaker(name, ONCE)
        def times(self, number: int) -> int:
            return self.factor * number

        @classmethod
        @circuit_breaker(name)
        def of(cls, number: int) -> int:
            return cls.factor * number

        @circuit_breaker(name)
        @classmethod
        def other(cls, number: int) -> int:
            return cls.factor * number

        @staticmethod
        @circuit_breaker(name)
        def plain(number: int) -> int:
            return number

        @circuit_breaker(name)
        async def later(self, number: int) -> int:
            return self.factor * number

    client = Client()
    assert client.times(2) == Client.of(2) == client.other(2) == 6
    assert client.plain(2) == 2
    assert run(client.later(2)) == 6


def test_C29_generators_are_refused_when_decorated(name: str) -> None:
    with pytest.raises(TypeError, match="generator"):

        @circuit_breaker(name)
        def numbers() -> Iterator[int]:
            yield 1

    with pytest.raises(TypeError, match="generator"):

        @circuit_breaker(name)
        async def stream() -> AsyncIterator[int]:
            yield 1


def test_C29_a_function_that_answers_with_a_generator_is_never_silent(name: str) -> None:
    @circuit_breaker(name)
    def numbers() -> Iterator[int]:
        return (number for number in range(3))

    with pytest.raises(TypeError, match="generator"):
        numbers()
    assert named(name).state == "closed"


def test_a_result_may_be_a_failure_by_the_callers_rule(name: str) -> None:
    @circuit_breaker(
        name,
        ONCE,
        classify_result=lambda status: Outcome.TRANSIENT if status >= 500 else Outcome.SUCCESS,
    )
    def call(status: int) -> int:
        return status

    assert call(200) == 200
    assert call(503) == 503
    with pytest.raises(BreakerOpen):
        call(200)


def test_C25_a_result_rule_that_raises_is_a_release(name: str) -> None:
    @circuit_breaker(name, ONCE, classify_result=lambda status: 1 / 0)
    def call() -> int:
        return 5

    @circuit_breaker(name, classify_result=lambda status: 1 / 0)
    async def acall() -> int:
        return 5

    assert call() == 5
    assert run(acall()) == 5
    assert named(name).state == "closed"


def test_a_cancelled_call_teaches_nothing(name: str) -> None:
    @circuit_breaker(name, ONCE)
    async def call() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(call())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    assert named(name).state == "closed"


def test_one_name_is_one_breaker_for_many_functions(name: str) -> None:
    @circuit_breaker(name, failure_rate=1.0, min_calls=1, window=1)
    def one() -> None:
        raise ConnectionError

    @circuit_breaker(name)
    def two() -> None:
        return None

    with pytest.raises(ConnectionError):
        one()
    with pytest.raises(BreakerOpen):
        two()
    with pytest.raises(ValueError, match="another policy"):
        circuit_breaker(name, failure_rate=0.1)


def test_a_breaker_of_ones_own_is_used_as_it_is(name: str) -> None:
    own = CircuitBreaker(name, ONCE)

    @circuit_breaker(breaker=own)
    def call() -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        call()
    assert own.state == "open"
    with pytest.raises(TypeError, match="alone"):
        circuit_breaker(name, breaker=own)


def test_a_decorator_without_a_name_says_so() -> None:
    with pytest.raises(TypeError, match="name the breaker"):
        circuit_breaker()
    with pytest.raises(TypeError, match="name the breaker"):
        circuit_breaker(print)  # type: ignore[arg-type]  # used without parentheses
