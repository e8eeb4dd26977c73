"""`retrysafe jobs`: what queued jobs have spent of their retries."""

from __future__ import annotations

import click

from retrysafe import survey
from retrysafe.cli.common import answered, expiry, with_store
from retrysafe.stores import Store
from retrysafe.survey import FoundJob


@click.command()
@with_store
@click.option("--given-up", is_flag=True, help="Only those that won't be tried again.")
def jobs(store: Store, given_up: bool) -> None:
    """Retry budgets, one a line: job, step, retries spent, attempt, and until when it is known.

    A job of which nothing was spent is not known to the store.
    """
    found = [each for each in answered(found_in(store)) if each.state.given_up or not given_up]
    for each in found:
        click.echo(_line(each))
    click.echo(f"{len(found)} in all", err=True)


async def found_in(store: Store) -> list[FoundJob]:
    """A store's job budgets, by job and step."""
    found = [each async for each in survey.jobs(store)]
    return sorted(found, key=lambda each: (each.job_id, each.step))


def _line(each: FoundJob) -> str:
    state = each.state
    words = [each.job_id, each.step, f"attempt {state.attempt}", f"retries spent: {state.spent}"]
    if state.given_up:
        words.append("given up")
    return "  ".join([*words, expiry(each.expires_in)])
