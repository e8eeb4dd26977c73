"""The demo is the main job on real input: it must run, and count right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_demo_runs_every_payment_once_and_ends_by_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from retrysafe.cli.demo import run; sys.exit(run())"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("calls", "executions", "replays", "waits", "takeover", "money moved"):
        assert row in done.stdout
    assert "every payment ran once" in done.stdout


def test_a_payment_that_ran_twice_fails_the_demo(tmp_path: Path) -> None:
    from retrysafe.cli.demo import PAYMENTS, Tally, _report

    ledger = tmp_path / "ledger"
    names = [*(f"payment-{n}" for n in range(PAYMENTS)), "victim"]
    lines = [f"started {name} w 1000\nmoved {name} w 1000\n" for name in names]
    ledger.write_text("".join(lines))
    assert _report(Tally(), 1.0, ledger, 1.0) == 0
    ledger.write_text("".join([*lines, lines[0]]))
    assert _report(Tally(), 1.0, ledger, 1.0) == 1
    ledger.write_text("".join(lines[1:]))
    assert _report(Tally(), 1.0, ledger, 1.0) == 1
