"""The soak in its short form: rounds of faults leave no task, thread, socket or key behind."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.faults.soak.figures import compare, table
from tests.faults.soak.soak import Soak
from tests.support import run

pytestmark = pytest.mark.slow


@pytest.mark.timeout(180)
def test_nothing_grows_over_rounds_of_faults(tmp_path: Path) -> None:
    rounds = itertools.count()
    soak = Soak(tmp_path, 7, wipe=True)
    report = run(soak.run(warm=2, more=lambda: next(rounds) < 2, steady=1), limit=170)
    assert report.broken == []
    assert report.rounds == 5
    assert report.counts["answer"] > 100
    found = compare(report.before, report.after)
    # In so short a time memory says nothing: caches still fill.
    memory = ("rss", "blocks", "memory")
    assert not [each for each in found if each.grew and each.name not in memory], table(found)
