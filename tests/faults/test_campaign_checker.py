"""The campaign's checker on histories made by hand: what it finds, and how narrowly it excuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.campaign.checker import check
from tests.faults.campaign.effects import Effect
from tests.faults.campaign.history import Disturbance, Run, Seen, load
from tests.faults.campaign.plan import RULES

KEY = "http|alice|k"


def did(name: str, start: float, end: float | None = None, **facts: Any) -> list[Effect]:
    """One execution's lines."""
    given: dict[str, Any] = {"key": KEY, "variant": "a", "call": f"of-{name}", "who": "w0.0"}
    how = facts.pop("how", "done")
    given |= facts
    lines = [Effect("start", start, execution=name, **given)]
    if end is not None:
        lines.append(Effect("end", end, execution=name, how=how, **given))
    return lines


def got(execution: str, sent: float, ended: float, **facts: Any) -> Seen:
    """One call's answer; its own where `call` is the execution's."""
    given: dict[str, Any] = {
        "call": f"c{sent}-{ended}",
        "worker": "w1",
        "door": "http",
        "key": KEY,
        "variant": "a",
        "kind": "answer",
        "execution": execution,
        "by": f"of-{execution}",
        "of": f"{KEY}|a",
    }
    return Seen(**(given | facts), sent=sent, ended=ended)


def own(execution: str, sent: float, ended: float, worker: str = "w0") -> Seen:
    return got(execution, sent, ended, call=f"of-{execution}", worker=worker)


def refused(word: str, sent: float, ended: float, **facts: Any) -> Seen:
    return got("", sent, ended, kind="refused", word=word, by="", of="", **facts)


def broken(
    effects: Sequence[list[Effect] | Effect],
    calls: Sequence[Seen] = (),
    disturbances: Sequence[Disturbance] = (),
    **facts: Any,
) -> set[str]:
    lines = [line for each in effects for line in (each if isinstance(each, list) else [each])]
    run = Run(1, RULES, list(calls), lines, list(disturbances), **facts)
    return {each.invariant for each in check(run)}


FIRST = did("e1", 1.0, 1.5)
SECOND = did("e2", 2.0, 2.2, who="w1.0")


def pause(since: float, until: float, who: str = "w0") -> Disturbance:
    return Disturbance("process", "pause", since, until, who)


def test_one_execution_and_its_replays_are_in_order() -> None:
    calls = [own("e1", 0.9, 1.6), got("e1", 1.2, 1.6), got("e1", 9.0, 9.1)]
    assert broken([FIRST], calls) == set()


# 1


def test_a_second_execution_of_a_live_owners_key_is_found() -> None:
    assert broken([did("e1", 1.0, 3.0), SECOND]) == {"one-owner"}


def test_a_second_execution_after_the_end_is_found() -> None:
    assert broken([FIRST, did("e2", 5.0, 5.1)], [own("e1", 0.9, 1.6)]) == {"one-owner"}


def test_a_dead_owner_may_be_followed() -> None:
    dead = Disturbance("dead", "kill", 1.2, float("inf"), "w0.0")
    assert broken([did("e1", 1.0), SECOND], (), [dead]) == set()


def test_a_worker_that_dies_after_its_answer_may_not_be_followed() -> None:
    dead = Disturbance("dead", "kill", 1.8, float("inf"), "w0.0")
    found = broken([FIRST, SECOND], [own("e1", 0.9, 1.6)], [dead])
    assert found == {"one-owner"}


def test_another_workers_death_excuses_nothing() -> None:
    dead = Disturbance("dead", "kill", 1.2, float("inf"), "w1.0")
    assert broken([did("e1", 1.0, 3.0), did("e2", 2.0, 2.2, who="w2.0")], (), [dead]) == {
        "one-owner"
    }


def test_the_death_of_an_earlier_incarnation_excuses_nothing() -> None:
    dead = Disturbance("dead", "kill", 0.5, float("inf"), "w0.0")
    later = did("e1", 1.0, 3.0, who="w0.1")
    assert broken([later, SECOND], (), [dead]) == {"one-owner"}


@pytest.mark.parametrize(
    ("away", "found"), [(pause(1.1, 2.6), set()), (pause(1.1, 1.3), {"one-owner"})]
)
def test_an_owner_may_be_followed_that_was_away_for_most_of_a_lease(
    away: Disturbance, found: set[str]
) -> None:
    assert broken([did("e1", 1.0, 3.0), did("e2", 2.5, 2.6, who="w1.0")], (), [away]) == found


def test_two_overlapping_faults_count_once() -> None:
    away = [pause(1.1, 1.4), pause(1.2, 1.5)]
    assert broken([did("e1", 1.0, 3.0), SECOND], (), away) == {"one-owner"}


def test_a_worker_that_noticed_its_own_absence_may_be_followed() -> None:
    lag = Effect("lag", 1.9, "w0.0", how="loop", since=1.1)
    assert broken([did("e1", 1.0, 3.0), SECOND, lag]) == set()


@pytest.mark.parametrize("how", ["raised", "cancelled"])
def test_given_up_work_is_done_again(how: str) -> None:
    assert broken([did("e1", 1.0, 1.5, how=how), SECOND]) == set()
    assert broken([did("e1", 1.0, 2.1, how=how), SECOND]) == {"one-owner"}


def test_what_the_server_forgot_is_done_again_and_nothing_else_is() -> None:
    forgot = Disturbance("loss", "restart", 1.7, 1.8)
    before = Disturbance("loss", "restart", 0.2, 0.3)
    after = Disturbance("loss", "restart", 4.2, 4.3)
    calls = [own("e1", 0.9, 1.6), got("e2", 3.0, 3.1)]
    assert broken([FIRST, SECOND], calls, [forgot]) == set()
    assert "one-owner" in broken([FIRST, SECOND], calls, [before])
    assert "one-owner" in broken([FIRST, SECOND], calls, [after])


# 2 and 4


def test_replays_that_disagree_are_found() -> None:
    away = pause(1.1, 2.6)
    effects = [did("e1", 1.0, 2.7), SECOND]
    assert broken(effects, [got("e1", 3.0, 3.1), got("e2", 3.0, 3.4)], [away]) == {"same-answer"}
    assert broken(effects, [got("e2", 3.0, 3.1), got("e1", 3.0, 3.4)], [away]) == {"fenced"}


def test_a_fenced_out_owners_own_caller_gets_the_answer_that_stands() -> None:
    effects = [did("e1", 1.0, 2.7), SECOND]
    calls = [own("e1", 0.9, 2.9), got("e2", 3.0, 3.1)]
    assert broken(effects, calls, [pause(1.1, 2.6)]) == {"same-answer"}


def test_the_truth_of_work_that_could_not_be_recorded_is_excused() -> None:
    effects = [FIRST, did("e2", 5.0, 5.2, who="w1.0")]
    calls = [own("e1", 0.9, 3.6), got("e2", 6.0, 6.1)]
    away = Disturbance("store", "down", 1.4, 4.0)
    assert broken(effects, calls, [away]) == set()
    replayed = [*calls, got("e1", 1.2, 3.6)]
    assert broken(effects, replayed, [away]) == {"same-answer"}


def test_a_late_finish_may_stand_where_the_winners_record_was_forgotten() -> None:
    effects = [did("e1", 1.0, 2.7), SECOND]
    forgot = Disturbance("loss", "evict", 2.5, 2.6)
    away = pause(1.1, 2.65)
    assert broken(effects, [got("e2", 2.2, 2.3), got("e1", 3.0, 3.1)], [away, forgot]) == set()
    still = [got("e2", 2.2, 2.3), got("e1", 3.0, 3.1), got("e2", 3.0, 3.4)]
    assert broken(effects, still, [away, forgot]) == {"fenced"}


def test_a_failover_forgets_what_was_written_shortly_before_and_nothing_older() -> None:
    later = did("e2", 5.0, 5.2, who="w1.0")
    calls = [own("e1", 0.9, 1.6), got("e2", 6.0, 6.1)]
    assert broken([FIRST, later], calls, [Disturbance("gap", "fail-over", 1.4, 3.0)]) == set()
    old = Disturbance("gap", "fail-over", 3.0, 4.0)
    assert broken([FIRST, later], calls, [old]) == {"one-owner", "same-answer"}


# 3 and 7


def test_an_answer_of_unfinished_work_is_found() -> None:
    for effects in ([did("e1", 1.0, 3.0)], [did("e1", 1.0)], [did("e1", 1.0, 1.5, how="raised")]):
        assert broken(effects, [got("e1", 1.1, 2.0)]) == {"finished-before-told"}


def test_an_answer_of_nothing_is_found() -> None:
    assert broken([], [got("e9", 1.1, 2.0)]) == {"finished-before-told"}


@pytest.mark.parametrize("of", ["http|bob|k|a", f"{KEY}|b", "async|alice|k|a"])
def test_an_answer_to_another_question_is_found(of: str) -> None:
    assert broken([FIRST], [got("e1", 1.1, 2.0, of=of)]) == {"scopes"}


# Errors


def test_errors_need_causes() -> None:
    down = Disturbance("store", "down", 1.0, 2.0)
    dead = Disturbance("dead", "kill", 1.0, float("inf"), "w1.0")
    unavailable = refused("store-unavailable", 1.5, 3.0)
    lost = got("", 1.5, 1.7, kind="broken")
    mismatch = refused("fingerprint-mismatch", 1.5, 1.6)
    other = refused("fingerprint-mismatch", 1.2, 1.7, variant="b")
    failed = refused("failed", 0.9, 1.6, call="of-e1")
    for calls, excuse in (
        ([unavailable], [down]),
        ([lost], [dead]),
        ([failed], []),
    ):
        effects = [did("e1", 1.0, 1.5, how="raised")]
        assert broken(effects, calls, excuse) == set()
    for call in (unavailable, lost, mismatch, failed, refused("record-corrupt", 1.0, 1.1)):
        assert broken([FIRST], [call]) == {"errors-have-causes"}
    assert broken([FIRST], [mismatch, other]) == set()


# 5


def test_a_waiter_past_its_wait_is_found() -> None:
    assert broken([], [refused("in-flight", 1.0, 6.2)]) == set()
    assert broken([], [refused("in-flight", 1.0, 7.4)]) == {"waiters-end"}
    assert broken([], [refused("in-flight", 1.0, 7.4)], [pause(2.0, 4.0, "w1")]) == set()
    assert broken([], [got("", 1.0, 26.0, kind="hung")]) == {"waiters-end"}


def test_in_flight_before_the_wait_is_over_is_found() -> None:
    assert broken([], [refused("in-flight", 1.0, 3.0)]) == {"errors-have-causes"}


def test_a_waiter_that_nobody_woke_is_found() -> None:
    calls = [own("e1", 0.9, 1.6), got("e1", 1.1, 5.9)]
    assert broken([FIRST], calls) == {"waiters-end"}
    calls = [own("e1", 0.9, 1.6), refused("in-flight", 1.1, 6.2)]
    assert broken([FIRST], calls) == {"waiters-end"}
    assert broken([FIRST], [own("e1", 0.9, 1.6), got("e1", 1.1, 4.0)]) == set()


# The breaker


def probe(name: str, start: float, end: float, who: str = "w0.0") -> list[Effect]:
    return [
        Effect("probe-start", start, who, execution=name),
        Effect("probe-end", end, who, execution=name),
    ]


def test_two_probes_at_once_are_found() -> None:
    first = probe("p1", 1.0, 1.3)
    assert broken([first, probe("p2", 1.3, 1.5, "w1.0")]) == set()
    assert broken([first, probe("p2", 1.2, 1.5, "w1.0")]) == {"one-probe"}


def test_a_probe_whose_lease_is_over_may_be_followed() -> None:
    assert broken([probe("p1", 1.0, 3.3), probe("p2", 2.1, 2.5, "w1.0")]) == set()


# 6 and 8


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({"lasting_keys": ["k"]}, "bounded"),
        ({"receipts": 2}, "bounded"),
        ({"other_keys": 4}, "bounded"),
        ({"leftovers": ["w0.0 waiting: 1"]}, "nothing-left"),
        ({"at_work": ["k"]}, "nothing-left"),
        ({"permits": 1}, "nothing-left"),
    ],
)
def test_what_is_left_behind_is_found(facts: dict[str, Any], found: str) -> None:
    assert broken([FIRST], [own("e1", 0.9, 1.6)], **facts) == {found}


def test_evidence_names_what_was_seen() -> None:
    run = Run(1, RULES, [own("e1", 0.9, 1.6)], [*FIRST, *SECOND])
    text = "\n".join(str(each) for each in check(run))
    assert "one-owner" in text
    for part in ("e1", "e2", "of-e1", "w0.0", "w1.0"):
        assert part in text


def test_a_saved_run_is_judged_as_before(tmp_path: Path) -> None:
    run = Run(1, RULES, [own("e1", 0.9, 1.6)], [*FIRST, *SECOND], [pause(1.0, 1.1)])
    run.save(tmp_path / "run.json")
    assert check(load(tmp_path / "run.json")) == check(run)
    assert dataclasses.asdict(load(tmp_path / "run.json")) == dataclasses.asdict(run)
