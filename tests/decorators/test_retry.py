"""`@retry` on every kind of function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import fastapi
import fastapi.testclient
import pytest

from retrysafe.backoff import Fixed
from retrysafe.decorators.circuit_breaker import circuit_breaker
from retrysafe.decorators.idempotent import idempotent
from retrysafe.decorators.retry import retry
from retrysafe.retrying import RetryPolicy, attempts_of, current_attempt
from retrysafe.stores import Store
from retrysafe.testing_clock import Instant, instant
from tests.support import run

THRICE = RetryPolicy(attempts=3, backoff=Fixed(1))


@pytest.fixture(autouse=True)
def time() -> Iterator[Instant]:
    with instant() as timing:
        yield timing


class Flaky:
    """Fails so many times, then answers 1."""

    def __init__(self, failures: int = 2) -> None:
        self.failures = failures
        self.runs = 0

    def __call__(self) -> int:
        self.runs += 1
        if self.runs <= self.failures:
            raise OSError("down")
        return 1


def test_every_way_to_write_it_retries(time: Instant) -> None:
    for decorate in (
        retry,
        retry(),
        retry(THRICE),
        retry(policy=THRICE),
        retry(attempts=3, backoff=Fixed(2)),
        retry(RetryPolicy(attempts=1), attempts=3),
    ):
        work = Flaky()

        @decorate
        def call(work: Flaky = work) -> int:
            return work()

        assert call() == 1
        assert work.runs == 3


@pytest.mark.parametrize("wrong", [5, "3", {"attempts": 3}])
def test_what_is_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="attempts=3"):
        retry(wrong)
    with pytest.raises(TypeError, match="fields alone"):
        retry(len, attempts=3)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        retry(tries=3)  # type: ignore[call-overload]


class Methods:
    def __init__(self) -> None:
        self.work = Flaky()

    @retry(THRICE)
    def plain(self) -> int:
        return self.work()

    @retry(THRICE)
    async def later(self) -> int:
        return self.work()

    shared: Flaky

    @retry(THRICE)
    @classmethod
    def of_class(cls) -> int:
        return cls.shared()

    @classmethod
    @retry(THRICE)
    def of_class_outside(cls) -> int:
        return cls.shared()

    @retry
    @classmethod
    def of_class_bare(cls) -> int:
        return cls.shared()

    @retry(THRICE)
    @staticmethod
    def static(work: Flaky) -> int:
        return work()

    @retry(THRICE)
    @classmethod
    async def of_class_later(cls) -> int:
        return cls.shared()


def test_methods_of_every_kind_are_retried() -> None:
    assert Methods().plain() == 1
    assert run(Methods().later()) == 1
    for call in (Methods.of_class, Methods.of_class_outside, Methods.of_class_bare):
        Methods.shared = Flaky()
        assert call() == 1
    Methods.shared = Flaky()
    assert run(Methods.of_class_later()) == 1
    assert Methods.static(Flaky()) == 1


def test_B126_every_form_of_async_function_is_retried() -> None:
    async def plain(work: Flaky) -> int:
        return work()

    class Callable_:
        async def __call__(self, work: Flaky) -> int:
            return work()

    forms: list[Callable[[Flaky], Any]] = [
        plain,
        functools.partial(plain),
        Callable_(),
        lambda work: plain(work),
        circuit_breaker("B126")(plain),
        retry(attempts=1)(plain),
    ]
    for form in forms:
        work = Flaky()
        assert run(retry(THRICE, nested=True)(form)(work)) == 1
        assert work.runs == 3


def test_C56_B109_B128_a_generator_is_refused_when_decorated() -> None:
    def plain() -> Iterator[int]:
        yield 1

    async def later() -> AsyncIterator[int]:
        yield 1

    class Callable_:
        def __call__(self) -> Iterator[int]:
            yield 1

    for each in (plain, later, Callable_(), staticmethod(plain), functools.partial(plain)):
        with pytest.raises(TypeError, match="generator"):
            retry(each)


def test_B109_a_function_that_returns_a_generator_is_refused_when_called() -> None:
    with pytest.raises(TypeError, match="generator"):
        retry(lambda: (n for n in (1, 2)))()

    async def items() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="generator"):
        retry(lambda: items())()


@retry
def documented(a: int, *, b: str = "x") -> str:
    """Its words."""
    return f"{a}{b}"


@retry
async def documented_later(a: int) -> int:
    """Its words."""
    return a


def test_C72_B130_a_decorated_function_looks_like_itself() -> None:
    assert inspect.iscoroutinefunction(documented_later)
    assert asyncio.iscoroutinefunction(documented_later)
    assert not inspect.iscoroutinefunction(documented)
    assert (documented.__name__, documented.__doc__) == ("documented", "Its words.")
    assert str(inspect.signature(documented)) == "(a: 'int', *, b: 'str' = 'x') -> 'str'"
    assert typing.get_type_hints(documented) == {"a": int, "b": str, "return": str}
    assert documented.__wrapped__(1) == "1x"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(documented)) is documented


def test_B130_a_decorated_endpoint_works_in_fastapi() -> None:
    app = fastapi.FastAPI()

    def name() -> str:
        return "injected"

    runs: list[bool] = []

    async def endpoint(name: str = fastapi.Depends(name)) -> str:
        runs.append(asyncio.get_running_loop().is_running())
        if len(runs) < 3:
            raise ConnectionError
        return name

    app.get("/")(retry(THRICE)(endpoint))
    with fastapi.testclient.TestClient(app) as client:
        assert client.get("/").json() == "injected"
    assert runs == [True] * 3


def test_arguments_pass_whatever_their_names() -> None:
    @retry
    def echo(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert echo(1, fn=2, self=3, policy=4) == ((1,), {"fn": 2, "self": 3, "policy": 4})


def test_the_error_keeps_its_traceback_and_history() -> None:
    @retry(THRICE)
    def fails() -> None:
        raise ConnectionError("mine")

    with pytest.raises(ConnectionError) as caught:
        fails()
    assert caught.traceback[-1].name == "fails"
    assert len(attempts_of(caught.value)) == 3


def test_a_recursive_function_retries_at_the_outermost_call() -> None:
    numbers: list[int] = []

    @retry(THRICE)
    def down(depth: int) -> None:
        attempt = current_attempt()
        assert attempt is not None
        if depth:
            down(depth - 1)
        else:
            numbers.append(attempt.number)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        down(3)
    assert len(numbers) == 3


def test_B118_a_retry_inside_recorded_work_is_one_execution(store: Store) -> None:
    work = Flaky()

    @idempotent(store=store, key="order_id", wait=0)
    @retry(THRICE)
    def pay(order_id: str) -> int:
        return work()

    assert (pay("o-1"), pay("o-1"), work.runs) == (1, 1, 3)


def test_B118_a_retry_around_recorded_work_finds_its_receipt_given_up(store: Store) -> None:
    work = Flaky()

    @retry(THRICE)
    @idempotent(store=store, key="order_id", wait=0)
    def pay(order_id: str) -> int:
        return work()

    assert (pay("o-1"), pay("o-1"), work.runs) == (1, 1, 3)


def test_B118_the_same_holds_for_async_functions(store: Store) -> None:
    work = Flaky()

    @retry(THRICE)
    @idempotent(store=store, key="order_id", wait=0)
    async def pay(order_id: str) -> int:
        return work()

    async def main() -> tuple[int, int]:
        return await pay("o-1"), await pay("o-1")

    assert (run(main()), work.runs) == ((1, 1), 3)


def test_a_retry_around_a_breaker_meets_its_refusal() -> None:
    work = Flaky(failures=99)

    @retry(attempts=9)
    @circuit_breaker("refuses", failure_rate=1.0, min_calls=2, window=2)
    def call() -> int:
        return work()

    with pytest.raises(Exception, match="is open"):
        call()
    assert work.runs == 2
