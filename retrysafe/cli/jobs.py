"""`retrysafe jobs`: what queued jobs have spent of their retries."""

from __future__ import annotations

import click

from retrysafe import survey
from retrysafe.cli.common import answered, expiry, plain, with_store
from retrysafe.stores import Store
from retrysafe.survey import FoundJob


@click.command()
@with_store
@click.option("--given-up", is_flag=True, help="Only those that won't be tried again.")
def jobs(store: Store, given_up: bool) -> None:
    """Retry budgets, one a line: job, step, retries spent, attempt, and until when it is known.

    A job of which nothing was spent is not known to the store.
    """
    found = [each for each in answered(found_in(store)) if is_given_up(each) or not given_up]
    for each in found:
        click.echo(_line(each))
    click.echo(f"{len(found)} in all", err=True)


async def found_in(store: Store) -> list[FoundJob]:
    """A store's job budgets, by job and step."""
    found = [each async for each in survey.jobs(store)]
    return sorted(found, key=lambda each: (each.job_id, each.step))


def is_given_up(each: FoundJob) -> bool:
    """Whether it won't be tried again."""
    return each.state is not None and each.state.given_up


def _line(each: FoundJob) -> str:
    words = [plain(each.job_id), plain(each.step)]
    if each.state is None:
        words.append("corrupt")
    else:
        words += [f"attempt {each.state.attempt}", f"retries spent: {each.state.spent}"]
    if is_given_up(each):
        words.append("given up")
    return "  ".join([*words, expiry(each.expires_in)])
