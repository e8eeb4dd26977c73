"""The command line: `retrysafe demo`, `retrysafe sagas`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `retrysafe` command."""
    try:
        import click
    except ImportError:
        sys.exit("the command line needs its extra: pip install 'retrysafe[cli]'")

    @click.group()
    def cli() -> None:
        """Make calls safe to retry."""

    @cli.command()
    def demo() -> None:
        """A storm of duplicate payments over two workers, one of them killed; then the count."""
        from retrysafe.cli.demo import run

        sys.exit(run())

    from retrysafe.cli.sagas import sagas

    cli.add_command(sagas)
    cli()
