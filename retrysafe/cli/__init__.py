"""The command line: `retrysafe`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `retrysafe` command."""
    try:
        import click  # noqa: F401  # tells whether the extra is installed
    except ImportError:
        sys.exit("the command line needs its extra: pip install 'retrysafe[cli]'")
    from retrysafe.cli.commands import cli

    cli(prog_name="retrysafe")
