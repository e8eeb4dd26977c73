"""The commands of `retrysafe`, put together."""

from __future__ import annotations

import sys

import click

from retrysafe.cli.breakers import breakers
from retrysafe.cli.common import answered, with_store
from retrysafe.cli.jobs import jobs
from retrysafe.cli.receipts import receipts
from retrysafe.cli.sagas import sagas
from retrysafe.settings import Settings
from retrysafe.stores import Store


@click.group()
def cli() -> None:
    """Make calls safe to retry: see what is recorded, and what waits for a person."""


@cli.command()
def demo() -> None:
    """A storm of duplicate payments over two workers, one of them killed; then the count."""
    from retrysafe.cli.demo import run

    sys.exit(run())


@cli.command()
@with_store
def doctor(store: Store) -> None:
    """Check the settings and the store; exit status 1 where a promise can't be kept."""
    sys.exit(answered(_examined(store)))


async def _examined(store: Store) -> int:
    from retrysafe.cli.doctor import FAIL, examine

    failed = 0
    async for finding in examine(store, Settings.from_env()):
        click.echo(f"{finding.level:<4}  {finding.text}")
        failed += finding.level == FAIL
    return 1 if failed else 0


@cli.command()
@with_store
@click.option("--every", default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Look once.")
@click.option(
    "--most",
    type=click.IntRange(1),
    default=10_000,
    show_default=True,
    help="Receipts to go through at most.",
)
def top(store: Store, every: float, once: bool, most: int) -> None:
    """What runs, waits and fails now, over all processes; ^C ends it."""
    try:
        from retrysafe.cli.top import watch
    except ImportError as error:
        raise click.ClickException(f"{error.name} is missing: 'retrysafe[cli]' has it") from None
    try:
        answered(watch(store, None if once else max(0.1, every), most))
    except KeyboardInterrupt:
        return


for each in (receipts, breakers, jobs, sagas):
    cli.add_command(each)
