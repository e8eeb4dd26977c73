"""Sagas: all done, or all undone in reverse, or before a person. Every store, both colours."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import pickle
import threading
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest

from retrysafe import Fixed, RetryPolicy, Saga, classify, current_request
from retrysafe.decorators import step as inner_step
from retrysafe.errors import (
    FingerprintMismatch,
    InFlight,
    NotEncodable,
    SagaChanged,
    SagaFailed,
    SagaNotFound,
)
from retrysafe.events import Event, listening
from retrysafe.stores import Store
from retrysafe.stores.redis import RedisStore
from tests.conftest import OwnServer
from tests.support import run, until, wait_until

_names = itertools.count()
Runner = Callable[..., Any]


class Refused(Exception):
    """A definite no."""

    retryable = False


def made(store: Store, **options: Any) -> Saga:
    options = {"undo_backoff": Fixed(0.01), "undo_attempts": 3, **options}
    options.setdefault("retry", RetryPolicy(attempts=3, deadline=5, backoff=Fixed(0.01)))
    return Saga(f"s{next(_names)}", store, **options)


class Bench:
    """A saga of steps that note what happens; `fails[name]` is what a call of that name raises,
    `fails[name] = [error, None]` what each call in turn raises. Undos are named `-name`."""

    def __init__(self, saga: Saga, colour: str) -> None:
        self.saga, self.colour = saga, colour
        self.log: list[str] = []
        self.fails: dict[str, Any] = {}
        self.contexts: dict[str, list[Any]] = {}
        self.data: dict[str, list[Any]] = {}
        self.waits: dict[str, Callable[[], Awaitable[Any]]] = {}

    def _acts(self, what: str, ctx: Any, data: Any) -> None:
        self.log.append(what)
        self.contexts.setdefault(what, []).append(ctx)
        self.data.setdefault(what, []).append(data)
        error = self.fails.get(what)
        if isinstance(error, list):
            error = error.pop(0) if error else None
        if error is not None:
            raise error

    def add(self, name: str, undo: bool = True, **options: Any) -> None:
        def do(ctx: Any, order: Any) -> Any:
            self._acts(name, ctx, order)
            return {"by": name, "order": order}

        def back(ctx: Any, data: Any) -> None:
            self._acts(f"-{name}", ctx, data)

        async def ado(ctx: Any, order: Any) -> Any:
            if name in self.waits:
                await self.waits[name]()
            return do(ctx, order)

        async def aback(ctx: Any, data: Any) -> None:
            if f"-{name}" in self.waits:
                await self.waits[f"-{name}"]()
            back(ctx, data)

        is_async = self.colour == "async"
        undoing = (aback if is_async else back) if undo else None
        self.saga.step(name=name, undo=undoing, **options)(ado if is_async else do)

    def _call(self, name: str, *args: Any, **options: Any) -> Any:
        if self.colour == "sync":
            return getattr(self.saga, f"{name}_sync")(*args, **options)
        return run(getattr(self.saga, name)(*args, **options))

    def run(self, id: str = "1", order: Any = "o") -> Any:
        return self._call("run", id, order)

    def failed(self, id: str = "1", order: Any = "o") -> SagaFailed:
        with pytest.raises(SagaFailed) as caught:
            self._call("run", id, order)
        return caught.value

    def resume(self, id: str = "1") -> Any:
        return self._call("resume", id)

    def settle(self, step: str, id: str = "1", **options: Any) -> Any:
        return self._call("settle", id, step, **options)

    def recover(self) -> Any:
        return self._call("recover")

    def parked(self) -> Any:
        return self._call("parked")

    def unfinished(self) -> Any:
        return self._call("unfinished")


@pytest.fixture(params=["async", "threads", "sync"])
def colour(request: pytest.FixtureRequest) -> str:
    """Async steps; sync steps of an async saga, in threads; a sync saga."""
    return str(request.param)


@pytest.fixture
def bench(store: Store, colour: str) -> Bench:
    return Bench(made(store), colour)


def three(bench: Bench) -> Bench:
    for name in "abc":
        bench.add(name)
    return bench


def test_a_saga_gives_the_results_of_its_steps_and_replays_them(bench: Bench) -> None:
    three(bench)
    results = bench.run()
    assert list(results.items()) == [(n, {"by": n, "order": "o"}) for n in "abc"]
    assert bench.run() == results
    assert bench.log == ["a", "b", "c"]
    assert bench.unfinished() == []


def test_the_same_id_with_other_arguments_is_refused(bench: Bench) -> None:
    three(bench).run()
    with pytest.raises(FingerprintMismatch):
        bench.run(order="another")


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("bad"), Refused("no")])
def test_B156_a_failing_step_undoes_those_before_it_in_reverse_once(
    bench: Bench, error: Exception
) -> None:
    for name in "ab":
        bench.add(name)
    bench.add("c", undo=False)
    bench.add("d", undo=False)
    bench.fails["c"] = error
    failed = bench.failed()
    assert bench.log == ["a", "b", "c", "-b", "-a"]
    assert (failed.step, failed.cause, failed.__cause__) == ("c", error, error)
    assert (failed.done, failed.undone, failed.parked) == ((), ("a", "b"), ())
    assert failed.results["a"] == {"by": "a", "order": "o"}
    assert bench.data["-b"] == [{"by": "b", "order": "o"}]  # what was recorded, for its checks
    again = bench.failed()
    assert (again.undone, again.step, again.errors) == (("a", "b"), "c", failed.errors)
    assert type(error).__name__ in str(again.cause)
    assert len(bench.log) == 5


def test_B156_a_value_that_means_failure_fails_the_step(bench: Bench) -> None:
    bench.add("a")
    bench.add("b", fails=lambda value: value["by"] == "b")
    bench.add("c")
    failed = bench.failed()
    assert bench.log == ["a", "b", "-a"]
    assert (failed.step, failed.undone) == ("b", ("a",))


@dataclasses.dataclass
class Hold:
    number: int
    amount: Decimal


def test_B156_nothing_in_place_of_a_declared_result_is_an_error(store: Store) -> None:
    saga, undone = made(store), []

    def undo(ctx: Any, data: Any) -> None:
        undone.append((ctx.step, data, ctx.maybe))

    @saga.step(undo=undo)
    def first(ctx: Any) -> Hold:
        return Hold(1, Decimal("9.90"))

    @saga.step(undo=undo)
    def second(ctx: Any) -> Hold:
        return None  # type: ignore[return-value]

    with pytest.raises(SagaFailed) as caught:
        saga.run_sync("1")
    assert isinstance(caught.value.cause, NotEncodable)
    assert undone == [("second", None, True), ("first", Hold(1, Decimal("9.90")), False)]


def test_results_and_arguments_are_typed_and_json_where_it_can_be(redis_url: str) -> None:
    import redis

    store = RedisStore(redis_url, "tests")
    saga, seen = made(store), []

    @saga.step
    def first(ctx: Any, order: Hold, notes: list[str]) -> Hold:
        return order

    @saga.step
    def second(ctx: Any, order: Hold, notes: list[str]) -> None:
        seen.append((order, ctx.results, ctx.args))

    order = Hold(7, Decimal("1.50"))
    assert saga.run_sync("1", order, ["x"]) == {"first": order, "second": None}
    assert saga.run_sync("1", order, ["x"])["first"] == order
    assert seen == [(order, {"first": order}, (order, ["x"]))]
    with redis.Redis.from_url(redis_url) as client:
        (key,) = client.keys("tests:saga:*")
        assert b'{"number":7,"amount":"1.50"}' in client.hget(key, "d")


def test_B157_C89_one_undo_that_fails_stops_no_other_and_is_parked(bench: Bench) -> None:
    for name in "abcd":
        bench.add(name)
    boom = Refused("step 4")
    bench.fails = {"d": boom, "-b": RuntimeError("C2")}
    failed = bench.failed()
    assert bench.log == ["a", "b", "c", "d", "-c", "-b", "-b", "-b", "-a"]
    assert (failed.undone, failed.parked, failed.cause) == (("a", "c"), ("b",), boom)
    assert failed.errors["b"] == "RuntimeError: C2"
    (parked,) = bench.parked()
    assert (parked.id, parked.status, parked.parked) == ("1", "parked", ("b",))
    assert bench.recover() == []  # it waits for a person, not for the next round
    assert len(bench.log) == 9
    again = bench.failed()
    assert again.parked == ("b",)


def test_B157_stop_keeps_the_earlier_undos_back(store: Store, colour: str) -> None:
    bench = Bench(made(store, on_undo_failure="stop"), colour)
    for name in "abcd":
        bench.add(name)
    bench.fails = {"d": Refused("step 4"), "-b": RuntimeError("C2")}
    failed = bench.failed()
    assert bench.log == ["a", "b", "c", "d", "-c", "-b", "-b", "-b"]
    assert (failed.done, failed.undone, failed.parked) == (("a",), ("c",), ("b",))
    bench.fails = {}
    with pytest.raises(SagaFailed) as caught:
        bench.resume()
    assert bench.log[8:] == ["-b", "-a"]
    assert (caught.value.undone, caught.value.parked) == (("a", "b", "c"), ())


@pytest.mark.parametrize("stop", [False, True])
def test_B164_serial_undo_reports_every_error(store: Store, colour: str, stop: bool) -> None:
    rules = {"on_undo_failure": "stop" if stop else "continue", "undo_attempts": 1}
    bench = Bench(made(store, **rules), colour)
    for name in "abcd":
        bench.add(name)
    bench.fails = {
        "d": Refused("no"),
        "-c": RuntimeError("C3"),
        "-a": RuntimeError("C1"),
    }
    failed = bench.failed()
    assert bench.log[4:] == (["-c"] if stop else ["-c", "-b", "-a"])
    assert failed.parked == (("c",) if stop else ("a", "c"))
    assert failed.errors["c"] == "RuntimeError: C3"
    assert ("a" in failed.errors) is not stop


def test_C90_a_parked_saga_is_tried_again_by_a_person(bench: Bench) -> None:
    three(bench)
    bench.fails = {"c": Refused("no"), "-a": RuntimeError("down")}
    assert bench.failed().parked == ("a",)
    bench.fails = {}
    with pytest.raises(SagaFailed) as caught:
        bench.resume()
    assert (caught.value.undone, caught.value.parked) == (("a", "b"), ())
    assert bench.parked() == [] and bench.unfinished() == []


@pytest.mark.parametrize("stop", [False, True])
def test_R29_what_a_person_undid_by_hand_is_undone_and_the_rest_goes_on(
    store: Store, colour: str, stop: bool
) -> None:
    how = "stop" if stop else "continue"
    bench = three(Bench(made(store, on_undo_failure=how), colour))
    bench.fails = {"c": Refused("no"), "-b": RuntimeError("down")}
    assert bench.failed().parked == ("b",)
    tried = bench.log.count("-b")
    with pytest.raises(SagaFailed) as caught:
        bench.settle("b")
    assert (caught.value.undone, caught.value.parked) == (("a", "b"), ())
    assert caught.value.step == "c"
    assert "b" not in caught.value.errors
    assert bench.log.count("-b") == tried
    assert bench.log.count("-a") == 1
    assert bench.parked() == [] and bench.unfinished() == []
    with pytest.raises(SagaFailed):  # said twice
        bench.settle("b")
    assert bench.failed().undone == ("a", "b")


def test_of_two_parked_undos_a_person_settles_one_and_the_other_is_tried_again(
    bench: Bench,
) -> None:
    three(bench)
    bench.fails = {"c": Refused("no"), "-b": RuntimeError("x"), "-a": RuntimeError("y")}
    assert bench.failed().parked == ("a", "b")
    with pytest.raises(SagaFailed) as caught:
        bench.settle("a")
    assert (caught.value.undone, caught.value.parked) == (("a",), ("b",))
    del bench.fails["-b"]
    with pytest.raises(SagaFailed) as caught:
        bench.resume()
    assert (caught.value.undone, caught.value.parked) == (("a", "b"), ())


def doubtful(store: Store, colour: str, **rules: Any) -> Bench:
    """A saga whose last step can't be undone and may have happened: parked."""
    again = RetryPolicy(attempts=1, deadline=5, backoff=Fixed(0.01))
    bench = Bench(made(store, retry=again, undo_attempts=1, **rules), colour)
    bench.add("a")
    bench.add("ship", undo=False)
    bench.fails["ship"] = TimeoutError("did it?")
    assert bench.failed().parked == ("ship",)
    return bench


def test_a_step_that_a_person_found_not_done_turns_the_saga_back(store: Store, colour: str) -> None:
    bench = doubtful(store, colour)
    with pytest.raises(SagaFailed) as caught:
        bench.settle("ship")
    assert (caught.value.done, caught.value.undone, caught.value.parked) == ((), ("a",), ())
    assert caught.value.step == "ship"
    assert bench.log == ["a", "ship", "-a"]
    assert bench.unfinished() == []


def test_a_step_that_a_person_found_done_gives_its_result(store: Store, colour: str) -> None:
    bench = doubtful(store, colour)
    assert bench.settle("ship", result={"parcel": 7}) == {
        "a": {"by": "a", "order": "o"},
        "ship": {"parcel": 7},
    }
    assert bench.log == ["a", "ship"]
    assert bench.run()["ship"] == {"parcel": 7}
    assert bench.unfinished() == []


def test_a_word_that_cannot_hold_changes_nothing(store: Store, colour: str) -> None:
    bench = doubtful(store, colour)
    for step, options, said in (
        ("a", {}, "not parked; parked: ship"),
        ("other", {}, "not parked"),
        ("ship", {"result": object()}, "object"),
    ):
        with pytest.raises((ValueError, NotEncodable), match=said):
            bench.settle(step, **options)
        (parked,) = bench.parked()
        assert (parked.id, parked.parked, parked.owned) == ("1", ("ship",), False)
    with pytest.raises(SagaNotFound):
        bench.settle("ship", id="never")
    assert bench.log == ["a", "ship"]
    back = three(Bench(made(store), colour))
    back.fails = {"c": Refused("no"), "-a": RuntimeError("down")}
    back.failed()
    with pytest.raises(ValueError, match="no result"):
        back.settle("a", result={})
    final = Bench(made(store), colour)
    final.add("pay", undo=False, pivot=True)
    final.add("c")
    final.fails["c"] = Refused("no")
    final.failed()
    with pytest.raises(ValueError, match="give its result"):
        final.settle("c")
    assert list(final.settle("c", result=1)) == ["pay", "c"]


def test_an_undo_not_due_yet_is_left_to_recovery(store: Store, colour: str) -> None:
    bench = Bench(made(store, undo_backoff=Fixed(0.3), stay=0, undo_attempts=9), colour)
    three(bench)
    bench.fails = {"c": Refused("no"), "-b": [RuntimeError("busy")]}
    failed = bench.failed()
    assert (failed.undone, failed.pending, failed.parked) == (("a",), ("b",), ())
    wait_until(lambda: bench.recover() != [])
    assert bench.log == ["a", "b", "c", "-b", "-a", "-b"]
    assert bench.failed().undone == ("a", "b")


def test_before_its_due_time_run_tells_what_is_pending(store: Store, colour: str) -> None:
    bench = Bench(made(store, undo_backoff=Fixed(60), stay=0), colour)
    three(bench)
    bench.fails = {"c": Refused("no"), "-b": RuntimeError("busy")}
    assert bench.failed().pending == ("b",)
    assert bench.failed().pending == ("b",)
    assert bench.recover() == []
    assert bench.log.count("-b") == 1
    bench.fails = {}
    with pytest.raises(SagaFailed) as caught:
        bench.resume()  # a person doesn't wait for the hour
    assert caught.value.undone == ("a", "b")


def test_B162_recovery_finds_nothing_after_a_saga_has_ended(bench: Bench) -> None:
    three(bench)
    bench.fails["a"] = Refused("no")
    events: list[Event] = []
    with listening(events.append):
        assert bench.failed().undone == ()
        assert [bench.recover() for _ in range(10)] == [[]] * 10
    assert [e.kind for e in events if e.kind == "saga-undone"] == ["saga-undone"]


def test_B162_a_saga_without_steps_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="no steps"):
        made(store).run_sync("1")
    with pytest.raises(ValueError, match="no steps"):
        run(made(store).run("1"))


def test_C91_an_unknown_outcome_is_tried_again_and_then_undone_as_maybe(bench: Bench) -> None:
    three(bench)
    bench.fails["b"] = TimeoutError("no answer")
    failed = bench.failed()
    assert bench.log == ["a", "b", "b", "b", "-b", "-a"]
    (ctx,) = bench.contexts["-b"]
    assert ctx.maybe and bench.data["-b"] == [None]
    assert not bench.contexts["-a"][0].maybe
    assert failed.undone == ("a", "b")
    keys = {each.idempotency_key for each in bench.contexts["b"]}
    assert len(keys) == 1 and ctx.key not in keys
    assert [each.attempt for each in bench.contexts["b"]] == [1, 2, 3]


def test_C91_a_definite_refusal_is_not_undone(bench: Bench) -> None:
    three(bench)
    bench.fails["b"] = Refused("402")
    assert bench.failed().undone == ("a",)
    assert bench.log == ["a", "b", "-a"]


@pytest.mark.parametrize("how", [{"undo": False}, {"tolerant": False}, {"undo": False, "pivot": 1}])
def test_C91_what_may_have_happened_and_cant_be_undone_only_goes_forward(
    bench: Bench, how: dict[str, Any]
) -> None:
    bench.add("a")
    bench.add("b", **({**how, "pivot": True} if how.get("pivot") else how))
    bench.fails["b"] = [TimeoutError("no answer")] * 5
    assert list(bench.run()) == ["a", "b"]
    assert bench.log == ["a"] + ["b"] * 6


def test_after_the_point_of_no_return_it_only_goes_forward(bench: Bench) -> None:
    bench.add("a")
    bench.add("pay", undo=False, pivot=True)
    bench.add("c")
    bench.fails["c"] = Refused("no")
    failed = bench.failed()
    assert bench.log == ["a", "pay", "c"]
    assert (failed.done, failed.parked, failed.undone) == (("a", "pay"), ("c",), ())
    bench.fails = {}
    assert list(bench.resume()) == ["a", "pay", "c"]
    assert bench.run() == bench.run()


def test_a_failure_after_the_pivot_is_scheduled_then_parked(store: Store, colour: str) -> None:
    rules = RetryPolicy(attempts=2, deadline=5, backoff=Fixed(0.01))
    bench = Bench(made(store, retry=rules, undo_attempts=2), colour)
    bench.add("pay", undo=False)
    bench.add("ship", undo=False)
    bench.fails["ship"] = ConnectionRefusedError("down")
    failed = bench.failed()
    assert (failed.done, failed.parked) == (("pay",), ("ship",))
    assert bench.log == ["pay"] + ["ship"] * 4


def test_C93_R27_a_step_without_undo_comes_last_or_is_a_pivot(store: Store) -> None:
    bench = Bench(made(store), "sync")
    bench.add("a", undo=False)
    bench.add("b", undo=False)
    with pytest.raises(ValueError, match="pivot=True"):
        bench.add("c")
    bench = Bench(made(store), "sync")
    bench.add("a", undo=False, pivot=True)
    bench.add("b")


def test_a_saga_that_cant_be_right_is_refused_when_it_is_built(store: Store) -> None:
    saga = made(store)

    def fine(ctx: Any) -> None: ...

    def generator(ctx: Any) -> Any:
        yield 1

    saga.step(fine)
    for wrong, error in [
        (lambda: saga.step(fine), ValueError),
        (lambda: saga.step(generator), TypeError),
        (lambda: saga.step(name="x", undo=generator)(fine), TypeError),
        (lambda: saga.step(name="x", undo=lambda ctx: None)(fine), TypeError),
        (lambda: saga.step(3), TypeError),  # type: ignore[call-overload]
        (lambda: saga.step(lambda ctx: 1), TypeError),
        (lambda: saga.step(name="x", pivot=1)(fine), TypeError),  # type: ignore[call-overload]
        (lambda: saga.step(name="x", retry=3)(fine), TypeError),  # type: ignore[call-overload]
        (lambda: saga.step(name="x", reserves="seat")(fine), ValueError),
        (lambda: Saga("no spaces", store), ValueError),
        (lambda: Saga("x", store, undo_attempts=0), ValueError),
        (lambda: Saga("x", store, undo_backoff="x"), ValueError),
        (lambda: Saga("x", store, on_undo_failure="later"), ValueError),
        (lambda: Saga("x", store, lease=0), ValueError),
        (lambda: saga.run_sync(""), ValueError),
        (lambda: saga.run_sync("1", 2), TypeError),
    ]:
        with pytest.raises(error):
            wrong()

    def typed(ctx: Any) -> threading.Lock: ...

    with pytest.raises(NotEncodable):
        saga.step(typed)
    saga.run_sync("1")
    with pytest.raises(RuntimeError, match="in use"):
        saga.step(name="late")(fine)


def test_an_async_saga_has_no_sync_form(store: Store) -> None:
    bench = Bench(made(store), "async")
    bench.add("a")
    for call in (bench.saga.run_sync, bench.saga.resume_sync):
        with pytest.raises(TypeError, match="async"):
            call("1", *([] if call == bench.saga.resume_sync else ["o"]))


def test_S2_nothing_scarce_is_held_while_a_saga_waits(store: Store) -> None:
    patient = RetryPolicy(attempts=3, deadline=600, backoff=Fixed(1))
    endless = RetryPolicy(attempts=3, deadline=None, backoff=Fixed(1))
    for later in (patient, endless):
        bench = Bench(made(store), "sync")
        bench.add("seat", reserves="seat", hold=300)
        with pytest.raises(ValueError, match="'seat'"):
            bench.add("pay", retry=later)
        bench.add("quick", retry=RetryPolicy(attempts=3, deadline=60, backoff=Fixed(1)))
        with pytest.raises(ValueError, match="'seat'"):
            bench.add("more", retry=RetryPolicy(attempts=3, deadline=250, backoff=Fixed(1)))


def test_arguments_that_cant_be_stored_are_refused_before_anything_runs(bench: Bench) -> None:
    three(bench)
    with pytest.raises(NotEncodable):
        bench.run(order=object())
    assert bench.log == []


def test_resume_of_what_was_never_run(bench: Bench) -> None:
    three(bench)
    with pytest.raises(SagaNotFound):
        bench.resume("nothing")


def test_C95_a_saga_of_other_steps_is_not_gone_on_with(store: Store) -> None:
    name = f"changed{next(_names)}"
    old = Bench(Saga(name, store, undo_backoff=Fixed(60), stay=0), "sync")
    for step in "abc":
        old.add(step)
    old.fails = {"c": Refused("no"), "-b": RuntimeError("busy")}
    assert old.failed().pending == ("b",)
    new = Bench(Saga(name, store), "sync")
    new.add("a")
    with pytest.raises(SagaChanged):
        new.resume()
    (info,) = new.unfinished()  # and it is not lost
    assert info.pending == ("b",) and not info.owned


def test_work_in_a_step_has_the_steps_key(store: Store) -> None:
    saga, keys, calls = made(store), [], []

    @inner_step("part")
    def part() -> int:
        calls.append(1)
        return len(calls)

    def undo(ctx: Any, data: Any) -> None:
        keys.append((ctx.key, current_request().key))  # type: ignore[union-attr]

    @saga.step(undo=undo)
    def first(ctx: Any) -> int:
        work = current_request()
        assert work is not None
        keys.append((ctx.key, work.key))
        part()
        if len(keys) == 1:
            raise ConnectionResetError("cut")
        return part()

    @saga.step
    def second(ctx: Any) -> None:
        raise Refused

    with pytest.raises(SagaFailed):
        saga.run_sync("1")
    assert [a == b for a, b in keys] == [True] * 3
    assert keys[0] == keys[1] != keys[2]
    assert calls == [1]  # the step within was recorded, and not run again


def test_a_failed_saga_can_be_pickled(bench: Bench) -> None:
    three(bench)

    class Local(Exception):
        retryable = False

    bench.fails["b"] = Local("here only")
    failed = bench.failed()
    copy = pickle.loads(pickle.dumps(failed))
    assert (copy.undone, copy.step, str(copy.id)) == (("a",), "b", "1")
    assert "here only" in str(copy.cause)


def test_two_runs_of_one_id_are_one(store: Store) -> None:
    saga, entered, go = made(store), threading.Event(), threading.Event()

    @saga.step
    def slow(ctx: Any) -> int:
        entered.set()
        assert go.wait(10)
        return 1

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(saga.run_sync("1")))
    thread.start()
    assert entered.wait(10)
    with pytest.raises(InFlight):
        saga.run_sync("1")
    with pytest.raises(InFlight):
        saga.resume_sync("1")
    assert saga.recover_sync() == []
    assert saga.look_sync("1").owned
    go.set()
    thread.join(10)
    assert results == [{"slow": 1}] == [saga.run_sync("1")]


def test_C92_a_step_that_lost_its_saga_acts_no_more(store: Store) -> None:
    """A process stands still past its lease; another takes over, goes back and ends the saga; then
    the first one wakes up."""
    lease = 0.3
    name = f"late{next(_names)}"
    acts: list[str] = []
    asleep, go = threading.Event(), threading.Event()

    def built(late: bool) -> Saga:
        saga = Saga(name, store, lease=lease, retry=RetryPolicy(attempts=1))

        def undo(ctx: Any, data: Any) -> None:
            acts.append("undo")

        @saga.step(undo=undo)
        def act(ctx: Any) -> int:
            if late:
                asleep.set()
                assert go.wait(20)
                ctx.check()  # at the point of act
                acts.append("LATE")
                return 1
            raise TimeoutError

        @saga.step
        def after(ctx: Any) -> None:
            acts.append("AFTER")

        return saga

    first, second = built(True), built(False)
    from retrysafe import saga_drivers

    original = saga_drivers._Driver._renew
    saga_drivers._Driver._renew = _no_renewal  # type: ignore[method-assign]  # its threads sleep
    errors: list[BaseException] = []

    def late_run() -> None:
        try:
            first.run_sync("1")
        except BaseException as error:
            errors.append(error)

    try:
        thread = threading.Thread(target=late_run)
        thread.start()
        assert asleep.wait(10)
    finally:
        saga_drivers._Driver._renew = original  # type: ignore[method-assign]
    wait_until(lambda: second.recover_sync() != [])
    assert second.look_sync("1").status == "undone"
    go.set()
    thread.join(20)
    assert [type(e) for e in errors] == [InFlight]
    assert acts == ["undo"]
    assert second.look_sync("1").status == "undone"


def _no_renewal(driver: Any, owned: Any) -> None:
    driver._renewing[id(owned)] = threading.Event()


def test_a_long_step_keeps_its_saga(store: Store) -> None:
    async def main() -> None:
        saga = made(store, lease=0.2)

        @saga.step
        async def slow(ctx: Any) -> int:
            ended = asyncio.get_running_loop().time() + 0.9
            while asyncio.get_running_loop().time() < ended:
                assert await saga.recover() == []
                await asyncio.sleep(0.05)
            await ctx.acheck()
            return 1

        assert await saga.run("1") == {"slow": 1}

    run(main())


def test_a_program_error_is_judged_as_what_it_may_have_done() -> None:
    # The flow reads these two words of the classification.
    assert classify(KeyError("x")).reason == "error in the program"
    assert not classify(RuntimeError("x")).recognised


def test_a_store_that_stands_still_after_an_act_loses_nothing(own_server: OwnServer) -> None:
    """What a step did is recorded when the store is back, and the step isn't called again."""
    server, acts = own_server(), []
    saga = made(RedisStore(server.url, "tests"), lease=20)

    @saga.step
    def a(ctx: Any) -> int:
        acts.append("a")
        server.pause()
        threading.Timer(2.5, server.resume).start()  # longer than a command waits
        return 1

    @saga.step
    def b(ctx: Any) -> None:
        acts.append("b")

    assert saga.run_sync("1") == {"a": 1, "b": None}
    assert acts == ["a", "b"]


# Cancellation


def cancellable(store: Store, **options: Any) -> tuple[Bench, asyncio.Event, asyncio.Event]:
    bench = three(Bench(made(store, **options), "async"))
    reached, undoing = asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        reached.set()
        await asyncio.sleep(60)

    async def slow_undo() -> None:
        undoing.set()
        await asyncio.sleep(0.2)

    bench.waits["c"] = hangs
    bench.waits["-b"] = slow_undo
    return bench, reached, undoing


@pytest.mark.parametrize("cancels", [1, 3])
def test_B159_C88_a_cancelled_saga_undoes_and_then_passes_it_on(store: Store, cancels: int) -> None:
    async def main() -> None:
        bench, reached, undoing = cancellable(store)
        task = asyncio.ensure_future(bench.saga.run("1", "o"))
        await reached.wait()
        task.cancel()
        await undoing.wait()
        for _ in range(cancels - 1):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.log == ["a", "b", "-c", "-b", "-a"]
        assert bench.contexts["-c"][0].maybe
        assert (await bench.saga.look("1")).status == "undone"
        assert await bench.saga.unfinished() == []

    run(main())


def test_B159_a_timeout_around_a_saga_undoes_and_is_raised(store: Store) -> None:
    async def main() -> None:
        bench, reached, _ = cancellable(store)
        now = asyncio.get_running_loop().time
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                at_the_last = asyncio.ensure_future(reached.wait())
                at_the_last.add_done_callback(lambda _: limit.reschedule(now()))
                await bench.saga.run("1", "o")
        assert bench.log == ["a", "b", "-c", "-b", "-a"]

    run(main())


def test_B159_past_the_grace_time_the_caller_is_let_go_and_recovery_ends_it(store: Store) -> None:
    async def main() -> None:
        bench, reached, undoing = cancellable(store, grace=0.1, lease=0.3)
        hang = asyncio.Event()

        async def hanging_undo() -> None:
            undoing.set()
            await hang.wait()

        bench.waits["-b"] = hanging_undo
        task = asyncio.ensure_future(bench.saga.run("1", "o"))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bench.saga.look("1")).status == "undoing"
        hang.set()
        await until(lambda: _recovered(bench))
        assert bench.log[-2:] == ["-b", "-a"]
        assert (await bench.saga.look("1")).status == "undone"

    run(main())


async def _recovered(bench: Bench) -> bool:
    return await bench.saga.recover() != []


def test_C88_a_cancelled_saga_past_its_pivot_is_left_to_go_forward(store: Store) -> None:
    async def main() -> None:
        bench = Bench(made(store), "async")
        reached = asyncio.Event()
        bench.add("a")
        bench.add("pay", undo=False)
        bench.add("ship", undo=False)

        async def hangs() -> None:
            reached.set()
            await asyncio.sleep(60)

        bench.waits["ship"] = hangs
        task = asyncio.ensure_future(bench.saga.run("1", "o"))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.log == ["a", "pay"]
        bench.waits = {}
        (info,) = await bench.saga.recover()
        assert info.status == "done"
        assert bench.log == ["a", "pay", "ship"]

    run(main())


def test_a_loop_that_ends_cancels_the_step_and_not_the_undo(store: Store) -> None:
    bench, reached, _ = cancellable(store)

    async def main() -> None:
        task = asyncio.ensure_future(bench.saga.run("1", "o"))
        await reached.wait()
        assert not task.done()  # asyncio.run cancels every task that is left, the saga's own too

    asyncio.run(main())
    assert bench.log == ["a", "b", "-c", "-b", "-a"]
    assert bench.saga.look_sync("1").status == "undone"


def test_a_sync_step_of_a_cancelled_saga_ends_before_it_is_undone(store: Store) -> None:
    async def main() -> None:
        saga, log = made(store), []
        inside, go = threading.Event(), threading.Event()

        def undo(ctx: Any, data: Any) -> None:
            log.append(("undo", data, ctx.maybe))

        @saga.step(undo=undo)
        def act(ctx: Any) -> int:
            inside.set()
            assert go.wait(10)
            log.append("acted")
            return 7

        @saga.step(undo=undo)
        def never(ctx: Any) -> None:
            log.append("never")

        task = asyncio.ensure_future(saga.run("1"))
        await until(inside.is_set)
        task.cancel()
        await asyncio.sleep(0.05)
        assert log == []
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["acted", ("undo", 7, False)]

    run(main())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_sync_saga_undoes_and_passes_it_on(store: Store, interrupt: Any) -> None:
    bench = three(Bench(made(store), "sync"))
    bench.fails["c"] = interrupt()
    with pytest.raises(interrupt):
        bench.run()
    assert bench.log == ["a", "b", "c", "-c", "-b", "-a"]
    assert bench.saga.look_sync("1").status == "undone"


def test_a_second_interrupt_leaves_the_rest_to_recovery(store: Store) -> None:
    bench = three(Bench(made(store), "sync"))
    bench.fails = {"c": KeyboardInterrupt(), "-b": [KeyboardInterrupt()]}
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert bench.log == ["a", "b", "c", "-c", "-b"]
    (info,) = bench.recover()
    assert info.status == "undone"
    assert bench.log[5:] == ["-b", "-a"]
