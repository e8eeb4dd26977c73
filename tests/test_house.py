"""How the project is put together: links, wheel, import rules, what an import costs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("middleware", "decorators")
OPTIONAL = (
    *("httpx", "httpx2", "requests", "aiohttp", "fastapi", "pydantic", "click", "rich"),
    "prometheus_client",  # redis-py imports opentelemetry where it is installed
)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, bounded; its output, and a failure that shows it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_files(*folders: str) -> list[Path]:
    """The sources below these folders, each once: links are not followed."""
    found: list[Path] = []
    for folder in folders:
        for directory, _, names in os.walk(ROOT / folder):
            found.extend(Path(directory, name) for name in names if name.endswith(".py"))
    return sorted(found)


def imports(path: Path) -> Iterator[str]:
    """The absolute names that a file imports, wherever in it, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from (f"{node.module}.{each.name}" for each in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_links_to_the_two_folders_are_relative(folder: str) -> None:
    link = ROOT / "retrysafe" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_git_keeps_the_links_as_links(folder: str) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return  # an unpacked archive; the test above has seen the links themselves
    listed = run("git", "ls-files", "--stage", f"retrysafe/{folder}")
    assert listed.startswith("120000 "), f"retrysafe/{folder} is not committed as a link"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy that has the sources alone: no links, no earlier build."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("retrysafe", *FOLDERS):
        shutil.copytree(
            ROOT / name,
            source / name,
            ignore=lambda directory, names: [
                each
                for each in names
                if each == "__pycache__" or Path(directory, each).is_symlink()
            ],
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", target, cwd=source)
    (built,) = target.glob("retrysafe-*.whl")
    return built


def test_the_wheel_has_every_source_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = Counter(name for name in archive.namelist() if ".dist-info/" not in name)
    expected = {str(path.relative_to(ROOT)) for path in python_files("retrysafe")}
    expected |= {"retrysafe/" + str(p.relative_to(ROOT)) for p in python_files(*FOLDERS)}
    expected |= {str(path.relative_to(ROOT)) for path in ROOT.glob("retrysafe/stores/lua/*.lua")}
    expected.add("retrysafe/py.typed")
    assert packed == Counter(expected)


def test_the_wheel_brings_the_command_and_the_pytest_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        entries = archive.read(name).decode()
    assert "retrysafe = retrysafe.cli:main" in entries
    assert "retrysafe = retrysafe.testing_plugin" in entries


def test_importing_everything_public_loads_no_optional_library() -> None:
    program = (
        "import sys, retrysafe, retrysafe.middleware, retrysafe.decorators, retrysafe.stores\n"
        f"print(sorted(set({OPTIONAL!r}) & set(sys.modules)))"
    )
    assert run(sys.executable, "-c", program).strip() == "[]"


def test_the_engine_never_imports_the_two_folders() -> None:
    engine = [path for path in python_files("retrysafe") if "cli" not in path.parts]
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in engine
        for name in imports(path)
        if name.startswith(("retrysafe.middleware", "retrysafe.decorators"))
    ]
    assert not wrong


def test_nothing_imports_the_folders_by_their_top_level_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files("retrysafe", *FOLDERS, "tests", "examples", "benchmarks")
        for name in imports(path)
        if name.split(".")[0] in FOLDERS
    ]
    assert not wrong


def test_the_import_rules_hold() -> None:
    run(Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache")
