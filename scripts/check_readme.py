"""Run every python block of README.md (or of the files named) as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60.0
"""Seconds that one block may take."""


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The ```python fences of a Markdown text: the line where the code begins, the code."""
    code: list[str] | None = None
    begins = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if code is None:
            if line.strip() == "```python":
                code, begins = [], number + 1
        elif line.strip() == "```":
            yield begins, "\n".join(code) + "\n"
            code = None
        else:
            code.append(line)
    if code is not None:
        raise SystemExit(f"the block that begins at line {begins} has no end")


def passes(document: Path, line: int, code: str) -> bool:
    """Run one block in an empty directory, without settings from outside; say what failed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RETRYSAFE_")}
    environment["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory, "block.py")
        program.write_text("\n" * (line - 1) + code)  # tracebacks give the document's lines
        try:
            done = subprocess.run(
                [sys.executable, str(program)],
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            print(f"{document.name}:{line}: took longer than {LIMIT:g} s")
            return False
    if done.returncode:
        print(f"{document.name}:{line}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    documents = [Path(name) for name in sys.argv[1:]] or [ROOT / "README.md"]
    found = [(each, *block) for each in documents for block in blocks(each.read_text())]
    failed = sum(not passes(*block) for block in found)
    print(f"{len(found)} python blocks run, {failed} failed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
