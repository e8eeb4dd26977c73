"""Sagas whose processes die at every point there is: all done or all undone in the end."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.apps import saga_shop
from tests.apps.saga_shop import STEPS, Death, built, call
from tests.support import wait_until

pytestmark = pytest.mark.slow

# Children are forked from a clean process that has the shop loaded.
FORKS = mp.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.apps.saga_shop"])

COLOURS = ["sync", "async"]


def child(target: Any, *args: Any) -> Any:
    process = FORKS.Process(target=target, args=args)
    process.start()
    return process


def ended(process: Any, *codes: int) -> None:
    process.join(60)
    assert process.exitcode in codes, process.exitcode


def died(process: Any) -> bool:
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return bool(process.exitcode)


def lines(ledger: Path) -> dict[str, list[tuple[str, str]]]:
    """What took effect, by saga: (what, key) in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in ledger.read_text().splitlines() if ledger.exists() else []:
        id, what, key = line.split()
        found.setdefault(id, []).append((what, key))
    return found


def once(effects: list[tuple[str, str]]) -> list[str]:
    """What took effect for whoever dedupes by key: first deliveries, in order."""
    seen: dict[str, str] = {}
    for what, key in effects:
        assert seen.setdefault(key, what) == what, "one key for two acts"
    assert len(set(seen.values())) == len(seen), "two keys for one act"
    return list(seen.values())


def check(effects: list[tuple[str, str]], status: str, fails: str, repeats: int | None) -> None:
    net = once(effects)
    done = STEPS if status == "done" else STEPS[: STEPS.index(fails)]
    assert [what for what in net if what in STEPS] == list(done)
    undos = [] if status == "done" else [f"-{each}" for each in reversed(done)]
    undone = [what for what in net if what not in STEPS]
    if fails and undone[0] == f"-{fails}":
        del undone[0]  # it died while that step ran: nobody knows, so its undo is called too
    assert undone == undos
    assert status == ("undone" if fails else "done")
    order = [what for what, _ in effects]
    for step in done:
        if f"-{step}" in order:
            assert step not in order[order.index(f"-{step}") :], "a step acted after its undo"
    if repeats is not None:
        assert sum(Counter(order).values()) - len(set(order)) <= repeats


def deaths(url: str, ledger: Path, colour: str, fails: str) -> list[tuple[str, int, str]]:
    """Every point to die at, as an undisturbed run meets them."""
    death = Death()
    saga = built(url, ledger, colour, death)
    try:
        call(saga, colour, "run", f"dry-{fails}", fails)
    except Exception:
        assert fails
    return [
        (kind, number, moment)
        for kind, times in death.seen.items()
        for number in range(1, times + 1)
        for moment in ("before", "after")
    ]


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("fails", ["", "e"])
def test_B163_C87_R29_killed_at_every_point_it_ends_all_done_or_all_undone(
    redis_url: str, tmp_path: Path, colour: str, fails: str
) -> None:
    ledger = tmp_path / "ledger"
    points = deaths(redis_url, tmp_path / "dry", colour, fails)
    assert len(points) >= (2 * (5 + 14) if not fails else 2 * (4 + 4 + 20))
    for point in points:
        id = "-".join(map(str, point))
        assert died(child(saga_shop.run, redis_url, ledger, colour, id, fails, point)), point
    before = lines(ledger)
    ended(child(saga_shop.recover, redis_url, ledger, colour, ()), 0)
    effects = lines(ledger)
    saga = built(redis_url, ledger, colour, Death())
    untouched = 0
    for point in points:
        id = "-".join(map(str, point))
        if id not in effects:
            # It died before it was listed, or before its first write: nothing had acted.
            assert point[0] == "eval" and point[1] <= 2, point
            assert id not in before
            untouched += 1
            continue
        status = call(saga, colour, "look", id).status
        check(effects[id], status, fails, repeats=1)
    assert untouched <= 3
    # Those are begun anew by whoever asks again.
    wait_until(lambda: _begun(saga, colour, fails, "eval-1-after"), 20)
    status = call(saga, colour, "look", "eval-1-after").status
    check(lines(ledger)["eval-1-after"], status, fails, repeats=0)


def _begun(saga: Any, colour: str, fails: str, id: str) -> bool:
    from retrysafe.errors import InFlight, SagaFailed

    try:
        call(saga, colour, "run", id, fails)
    except SagaFailed:
        return True
    except InFlight:
        return False
    return True


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("fails", ["", "d"])
def test_killed_again_and_again_while_it_recovers(
    redis_url: str, tmp_path: Path, colour: str, fails: str
) -> None:
    ledger = tmp_path / "ledger"
    for number in range(3):
        death = ("b", 1, "after")
        assert died(child(saga_shop.run, redis_url, ledger, colour, f"s{number}", fails, death))
    kills = 0
    for kind, numbers in (("eval", range(3, 30, 4)), ("c", (1, 2)), ("-b", (1, 2)), ("-a", (1,))):
        for number in numbers:
            moment = ("before", "after")[number % 2]
            death = (kind, number, moment)
            kills += died(child(saga_shop.recover, redis_url, ledger, colour, death))
    ended(child(saga_shop.recover, redis_url, ledger, colour, ()), 0)
    saga = built(redis_url, ledger, colour, Death())
    assert kills >= 5
    for id, effects in lines(ledger).items():
        check(effects, call(saga, colour, "look", id).status, fails, repeats=None)
    assert len(lines(ledger)) == 3


def test_R29_four_processes_recover_two_hundred_sagas_each_once(
    redis_url: str, tmp_path: Path
) -> None:
    ledger, count = tmp_path / "ledger", 200
    ended(child(saga_shop.many, redis_url, ledger, count), -signal.SIGKILL)
    out = FORKS.Queue()
    workers = [child(saga_shop.recover_many, redis_url, ledger, out) for _ in range(4)]
    taken = [out.get(timeout=90) for _ in workers]
    for worker in workers:
        ended(worker, 0)
    everyone = [each for part in taken for each in part]
    assert sorted(everyone) == sorted((f"many-{n}", "done") for n in range(count))
    effects = lines(ledger)
    assert len(effects) == count
    for each in effects.values():
        assert [what for what, _ in each] == [*STEPS, "f"]


def test_B159_a_process_told_to_end_undoes_first(redis_url: str, tmp_path: Path) -> None:
    ledger, ready = tmp_path / "ledger", FORKS.Event()
    process = child(saga_shop.terminated, redis_url, ledger, ready)
    assert ready.wait(30)
    os.kill(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == 1  # its CancelledError
    assert once(lines(ledger)["term"]) == [*STEPS, *(f"-{each}" for each in reversed(STEPS))]


def test_C92_a_process_that_stood_still_acts_no_more(redis_url: str, tmp_path: Path) -> None:
    ledger, ready = tmp_path / "ledger", FORKS.Event()
    process = child(saga_shop.sleeper, redis_url, ledger, ready)
    assert ready.wait(30)
    saga = built(redis_url, ledger, "sync", Death())

    @saga.step(name="f", undo=saga_shop.nothing)
    def refuses(ctx: Any, fails: str) -> None:
        raise saga_shop.Refused

    wait_until(lambda: saga.recover_sync() != [], 20)
    assert saga.look_sync("late").status == "undone"
    effects = lines(ledger)["late"]
    os.kill(process.pid, signal.SIGCONT)
    process.join(30)
    assert process.exitcode == 1  # its InFlight
    assert lines(ledger)["late"] == effects
    assert saga.look_sync("late").status == "undone"
