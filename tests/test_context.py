"""The request's context: where it reaches, and the IDs."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async

from retrysafe import context
from retrysafe.context import (
    ReceiptControl,
    RequestContext,
    carry,
    current_request,
    entered,
    request_id,
)
from retrysafe.logging import RequestIdFilter
from tests.support import run


def test_outside_of_a_request_there_is_none() -> None:
    assert current_request() is None and request_id() is None


def test_a_context_is_current_within_its_block_whatever_ends_it() -> None:
    with entered(RequestContext("outer")) as outer:
        with pytest.raises(ZeroDivisionError), entered(RequestContext("inner")):
            assert request_id() == "inner"
            _ = 1 / 0
        assert current_request() is outer
    assert current_request() is None


def test_enter_and_leave_are_the_same_without_a_block() -> None:
    token = context.enter(RequestContext("a"))
    assert request_id() == "a"
    context.leave(token)
    assert request_id() is None


def test_entering_none_leaves_a_request_behind_until_it_is_left() -> None:
    with entered(RequestContext("leaked")):
        token = context.enter(None)
        assert current_request() is None
        context.leave(token)
        assert request_id() == "leaked"


def test_only_a_context_made_for_the_scope_is_the_scopes_own() -> None:
    made = RequestContext("r")
    assert context.context_of({context.SCOPE_KEY: made}) is made
    with entered(made):
        assert context.context_of({}) is None
        assert context.context_of({context.SCOPE_KEY: "r"}) is None


def test_tasks_and_threads_below_see_the_context() -> None:
    async def main() -> list[str | None]:
        async def child() -> str | None:
            await asyncio.sleep(0)
            return request_id()

        with entered(RequestContext("r")):
            task = asyncio.create_task(child())
            seen = [await asyncio.to_thread(request_id), await sync_to_async(request_id)()]
        return [*seen, await task, request_id()]

    assert run(main()) == ["r", "r", "r", None]


def test_two_tasks_at_once_see_each_its_own_context() -> None:
    async def one(name: str) -> str | None:
        with entered(RequestContext(name)):
            await asyncio.sleep(0)
            return request_id()

    async def main() -> list[str | None]:
        return list(await asyncio.gather(*(one(str(n)) for n in range(50))))

    assert run(main()) == [str(n) for n in range(50)]


def test_carry_takes_the_context_into_executors_and_bare_threads() -> None:
    seen: list[str | None] = []

    def look() -> None:
        seen.append(request_id())

    with ThreadPoolExecutor(4) as pool, entered(RequestContext("r")):
        assert pool.submit(request_id).result() is None
        carried = carry(request_id)
        # One carried function, many threads at once.
        assert list(pool.map(lambda _: carried(), range(100))) == ["r"] * 100
        thread = threading.Thread(target=carry(look))
        thread.start()
        thread.join()
    assert seen == ["r"]
    assert carried() == "r" and request_id() is None


def test_calls_are_counted_by_name_from_any_thread() -> None:
    request = RequestContext("r")
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: request.next_call("charge"), range(400)))
    assert sorted(numbers) == list(range(1, 401))
    assert request.next_call("refund") == 1 and request.next_call("charge") == 401


def test_the_last_word_on_a_result_counts() -> None:
    receipt = ReceiptControl()
    assert receipt.decision is None
    receipt.keep()
    assert receipt.decision is True
    receipt.discard()
    assert receipt.decision is False


def test_a_context_shows_no_scope() -> None:
    assert "token" not in repr(RequestContext("r", scope="token"))


def test_an_id_is_a_uuid_of_version_7_that_sorts_by_time() -> None:
    made = [context.new_request_id() for _ in range(5000)]
    assert made == sorted(made) and len(set(made)) == len(made)
    parsed = UUID(made[0])
    assert (parsed.version, parsed.variant, str(parsed)) == (7, "specified in RFC 4122", made[0])
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", made[0])


def test_ids_keep_their_order_when_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = context._Clock7()
    times = iter([2_000_000_000, 2_000_000_000, 1_000_000_000, 3_000_000_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    made = [clock.next() for _ in range(4)]
    assert made == sorted(made) and len(set(made)) == 4
    assert int(made[0][:8] + made[0][9:13], 16) == 2000


def test_an_id_whose_random_part_is_full_borrows_the_next_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = context._Clock7()
    monkeypatch.setattr(time, "time_ns", lambda: 2_000_000_000)
    first = clock.next()
    clock._tail = (1 << 74) - 1
    second = clock.next()
    assert second > first and UUID(second).version == 7
    assert int(second[:8] + second[9:13], 16) == 2001


def test_ids_of_many_threads_are_distinct() -> None:
    with ThreadPoolExecutor(8) as pool:
        batches = pool.map(lambda _: [context.new_request_id() for _ in range(500)], range(8))
    assert len({each for batch in batches for each in batch}) == 4000


def test_a_forked_child_makes_other_ids_than_its_parent_and_siblings() -> None:
    context.new_request_id()
    seen = [context.new_request_id()]
    for _ in range(3):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, context.new_request_id().encode())
            os._exit(0)
        os.waitpid(child, 0)
        seen.append(os.read(read, 100).decode())
        os.close(read)
        os.close(write)
    tails = {each[15:] for each in seen}
    assert len(tails) == 4


# --- log records -------------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(RequestIdFilter())
        self.setFormatter(logging.Formatter("{request_id:s} {message}", style="{"))
        self.percent = logging.Formatter("%(request_id)s %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        assert self.percent.format(record) == self.lines[-1]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logger = logging.getLogger("third.party")
    logger.addHandler(handler)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)
    logger.propagate = True


def test_B152_every_record_has_the_attribute_in_every_situation(lines: Lines) -> None:
    logger = logging.getLogger("third.party")
    logger.error("start-up")
    with entered(RequestContext("r")):
        logger.error("request")
        thread = threading.Thread(target=logger.error, args=("child thread",))
        thread.start()
        thread.join()
    logger.error("ended")
    logger.error("extra", extra={"request_id": "x"})
    logger.error("nothing", extra={"request_id": None})
    logger.error("no text", extra={"request_id": 7})
    logger.error("exc_info", exc_info=True)
    assert [line.splitlines()[0] for line in lines.lines] == [
        "- start-up",
        "r request",
        "- child thread",
        "- ended",
        "x extra",
        "- nothing",
        "- no text",
        "- exc_info",
    ]


def test_B154_an_exception_logged_after_its_request_has_the_requests_id(lines: Lines) -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            context.stamp_error(error, "r")
            raise RuntimeError("outer") from error
    except RuntimeError:
        logging.getLogger("third.party").exception("failed")
    assert lines.lines[0].startswith("r failed")


def test_an_exception_that_takes_no_attributes_is_left_alone() -> None:
    @dataclass(frozen=True)
    class Frozen(Exception):
        code: int

    error = Frozen(1)
    context.stamp_error(error, "r")
    assert context.request_id_of_error(error) is None


def test_a_stamped_error_still_pickles() -> None:
    error = ValueError("x")
    context.stamp_error(error, "r")
    assert pickle.loads(pickle.dumps(error)).args == ("x",)
