"""`retrysafe breakers`: the shared ones, and an operator's word on them."""

from __future__ import annotations

import click

from retrysafe import survey
from retrysafe.breaker import CircuitBreaker
from retrysafe.cli.common import answered, plain, roughly, with_store
from retrysafe.stores import Store
from retrysafe.survey import FoundBreaker


@click.group()
def breakers() -> None:
    """Shared circuit breakers: what they are, and a word that stands until `reset`."""


@breakers.command("list")
@with_store
def list_(store: Store) -> None:
    """Shared breakers, one a line: name, state, what it counted or when it admits a probe.

    One of which no call has failed yet is not known to the store.
    """
    found = answered(found_in(store))
    width = max((len(plain(each.name)) for each in found), default=0)
    for each in found:
        click.echo(f"{plain(each.name):<{width}}  {line(each)}")
    click.echo(f"{len(found)} in all", err=True)


@breakers.command("open")
@with_store
@click.argument("name")
def open_(store: Store, name: str) -> None:
    """Refuse every call, until `reset` or `close`."""
    answered(_breaker(store, name).aforce_open())
    click.echo(f"{name} refuses every call")


@breakers.command()
@with_store
@click.argument("name")
def close(store: Store, name: str) -> None:
    """Let every call through whatever happens, until `reset` or `open`."""
    answered(_breaker(store, name).adisable())
    click.echo(f"{name} lets every call through")


@breakers.command()
@with_store
@click.argument("name")
def reset(store: Store, name: str) -> None:
    """Let it judge by itself again: closed, with nothing counted."""
    answered(_breaker(store, name).areset())
    click.echo(f"{name} is closed, and judges by itself")


def line(each: FoundBreaker) -> str:
    """A breaker's state in words."""
    if each.state == "open":
        return f"open         a probe in {roughly(each.retry_after)}"
    if each.state == "closed" and each.calls:
        return f"closed       {each.failures} failed, {each.slow} slow of {each.calls} calls"
    return each.state


async def found_in(store: Store) -> list[FoundBreaker]:
    """A store's breakers, by name."""
    return sorted([each async for each in survey.breakers(store)], key=lambda each: each.name)


def _breaker(store: Store, name: str) -> CircuitBreaker:
    try:
        return CircuitBreaker(name, shared=store)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
