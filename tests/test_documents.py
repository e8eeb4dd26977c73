"""What the documents say of the tests is true: each one that they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["SECURITY.md", "docs/guarantees.md", "docs/acl.md", "docs/queues.md"]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_test_and_link_that_a_document_names_exists(name: str) -> None:
    document = ROOT / name
    text = document.read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r"\btest_\w+(?!\w*\.py)", text))
    missing = [each for each in named if f"def {each}(" not in tests]
    files = re.findall(r"tests/[\w/]+\.py", text)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing += [each for each in files if not (ROOT / each).exists()]
    missing += [each for each in links if not (document.parent / each).exists()]
    assert not missing
