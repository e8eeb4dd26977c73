"""What keeps the tests' child processes from outliving them."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SCRIPT = 'read -r _; kill -9 "$1"; test -z "$2" || rm -rf "$2"'


class Guard:
    """Waits until the tests' process is gone, however it went; then kills `process` (a negative
    number: the group) and removes `directory`."""

    def __init__(self, process: int, directory: Path | None = None) -> None:
        # The pipe's other end closes when this process ends, even by SIGKILL.
        self._shell = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "guard", str(process), str(directory or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def off(self) -> None:
        """The process is looked after, or gone."""
        self._shell.kill()
        self._shell.communicate()
