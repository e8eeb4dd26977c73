"""What the workers really did: one line per fact, in a file beside the store.

The file is open in append mode and each line is one `write`, so that lines of several processes
never mix and a SIGKILL loses none. Times are of the machine's monotonic clock, which is the same
in every process.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Effect:
    """`what`: start, end, lag, probe-start, probe-end, told. `who`: the worker's name."""

    what: str
    at: float
    who: str
    execution: str = ""
    call: str = ""
    key: str = ""
    variant: str = ""
    how: str = ""  # end: done, raised, cancelled; told: an event's kind
    since: float = 0.0  # lag: when it began
    more: dict[str, Any] = field(default_factory=dict)


class Log:
    """One process's pen."""

    def __init__(self, path: Path, who: str) -> None:
        self._who = who
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at": time.monotonic(), "wall": time.time(), "who": self._who}
        line |= {"pid": os.getpid(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read(path: Path) -> list[Effect]:
    """Every fact, in the order of the file."""
    found: list[Effect] = []
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        facts = json.loads(line)
        known = {name: facts.pop(name) for name in Effect.__slots__ if name in facts}
        found.append(Effect(**known, more=facts))
    return found
