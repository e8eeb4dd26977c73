"""`retrysafe top`: what runs, waits and fails now, over all processes of a namespace."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from retrysafe import survey
from retrysafe.cli import breakers, jobs
from retrysafe.cli.common import plain, roughly
from retrysafe.errors import StoreUnavailable
from retrysafe.receipt import ReceiptState
from retrysafe.stores import Store
from retrysafe.survey import FoundBreaker, FoundJob, FoundReceipt

_SHOWN = 10
_OPEN = (ReceiptState.RUNNING, ReceiptState.ABANDONED)


@dataclass(slots=True)
class View:
    """What one look found. `more`: not all receipts were looked at."""

    states: Counter[str] = field(default_factory=Counter)
    unfinished: list[FoundReceipt] = field(default_factory=list)
    more: bool = False
    breakers: list[FoundBreaker] = field(default_factory=list)
    jobs: list[FoundJob] = field(default_factory=list)


async def watch(store: Store, every: float | None, most: int) -> None:
    """Show it, again each `every` seconds; None: once. `most`: receipts to look at each time."""
    console = Console()
    if every is None:
        console.print(render(store.namespace, await look(store, most)))
        return
    if not console.is_terminal:
        while True:
            console.print(await _shown(store, most))
            await asyncio.sleep(every)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(await _shown(store, most), refresh=True)
            await asyncio.sleep(every)


async def _shown(store: Store, most: int) -> RenderableType:
    """The look, or why there is none: the next one may do better."""
    try:
        return render(store.namespace, await look(store, most))
    except StoreUnavailable as error:
        return Text(str(error), style="bold red")


async def look(store: Store, most: int) -> View:
    """Go through the store once. Raises StoreUnavailable."""
    view = View()
    async with aclosing(survey.receipts(store)) as found:
        async for each in found:
            if view.states.total() == most:
                view.more = True
                break
            view.states["corrupt" if each.receipt is None else str(each.receipt.state)] += 1
            if each.receipt is not None and each.receipt.state in _OPEN:
                view.unfinished.append(each)
    view.unfinished.sort(key=_fence)
    view.breakers = await breakers.found_in(store)
    view.jobs = [each for each in await jobs.found_in(store) if jobs.is_given_up(each)]
    return view


def render(namespace: str, view: View) -> RenderableType:
    """The look as tables; those that would be empty are left out."""
    total = view.states.total()
    counts = ", ".join(f"{count} {state}" for state, count in sorted(view.states.items()))
    parts: list[RenderableType] = [
        Text(f"{namespace}  {total}{' of more' if view.more else ''} receipts  {counts}")
    ]
    if view.unfinished:
        table = _table("unfinished, oldest first", "digest", "state", "age", "lease", "waiting")
        for each in view.unfinished[:_SHOWN]:
            receipt = each.receipt
            assert receipt is not None
            table.add_row(
                each.digest[:12],
                str(receipt.state),
                roughly(max(0.0, time.time() - receipt.fence / 1e6)),
                roughly(receipt.lease_left or 0.0),
                str(each.waiting),
            )
        parts.append(table)
    if view.breakers:
        table = _table("shared breakers", "name", "state")
        for breaker in view.breakers:
            table.add_row(Text(plain(breaker.name)), breakers.line(breaker))
        parts.append(table)
    if view.jobs:
        table = _table("jobs given up", "job", "step", "retries spent")
        for job in view.jobs[:_SHOWN]:
            spent = 0 if job.state is None else job.state.spent
            table.add_row(Text(plain(job.job_id)), Text(plain(job.step)), str(spent))
        parts.append(table)
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _fence(each: FoundReceipt) -> int:
    assert each.receipt is not None
    return each.receipt.fence
