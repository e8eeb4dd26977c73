"""`retrysafe sagas`: a person finds what is parked, mends the cause, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from retrysafe.errors import SagaFailed
from tests.support import run

ROOT = Path(__file__).resolve().parent.parent
APP = "tests.apps.parked_saga:saga"


def sagas(*words: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from retrysafe.cli import main; main()", "sagas", *words],
        env={**os.environ, "SAGA_URL": url, "SAGA_DIR": str(folder), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_parked_saga_is_listed_shown_and_resumed(redis_url: str, tmp_path: Path) -> None:
    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        return sagas(*words, url=redis_url, folder=tmp_path)

    os.environ.update(SAGA_URL=redis_url, SAGA_DIR=str(tmp_path))
    try:
        from tests.apps.parked_saga import saga

        try:
            run(saga.run("order-17", "book"))
        except SagaFailed as failed:
            assert failed.parked == ("reserve",)
    finally:
        del os.environ["SAGA_URL"], os.environ["SAGA_DIR"]
    listed = asked("list", APP, "--parked")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.split()[:2] == ["order-17", "parked"]
    shown = asked("show", APP, "order-17")
    assert "reserve said: " in shown.stdout
    assert "the warehouse is closed" in shown.stdout
    still = asked("resume", APP, "order-17")
    assert still.returncode == 1, still.stdout + still.stderr
    (tmp_path / "mended").touch()
    mended = asked("resume", APP, "order-17")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert asked("list", APP, "--parked").stdout == ""


def test_a_person_settles_what_was_put_right_by_hand(redis_url: str, tmp_path: Path) -> None:
    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        return sagas(*words, url=redis_url, folder=tmp_path)

    program = (
        "import asyncio; from tests.apps.parked_saga import saga\n"
        "asyncio.run(saga.run('o', 'book'))"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SAGA_URL": redis_url, "SAGA_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    wrong = asked("settle", APP, "o", "pay")
    assert wrong.returncode == 1
    assert "parked: reserve" in wrong.stderr
    settled = asked("settle", APP, "o", "reserve")
    assert settled.returncode == 0, settled.stdout + settled.stderr
    assert asked("list", APP).stdout == ""


def test_what_names_no_saga_is_said_plainly(redis_url: str, tmp_path: Path) -> None:
    for name, word in (
        ("nothing", "module:saga"),
        ("tests.support:run", "no Saga"),
        ("tests.missing:saga", "can't be imported"),
    ):
        done = sagas("list", name, url=redis_url, folder=tmp_path)
        assert done.returncode == 2
        assert word in done.stderr
    unknown = sagas("show", APP, "never", url=redis_url, folder=tmp_path)
    assert unknown.returncode == 1
    assert "no run of this id" in unknown.stderr
