"""`retrysafe sagas`: what is unfinished, and what waits for a person."""

from __future__ import annotations

import sys
from collections.abc import Awaitable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from retrysafe.cli.common import answered
from retrysafe.errors import SagaFailed
from retrysafe.saga import Saga, SagaInfo


class _SagaName(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    name = "module:saga"

    def convert(self, value: Any, param: Any, ctx: Any) -> Saga:
        module, _, attribute = str(value).partition(":")
        if not module or not attribute:
            self.fail(f"{value!r} is not of the form module:saga, as in shop.orders:saga")
        sys.path.insert(0, str(Path.cwd()))
        try:
            found = import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            self.fail(f"{value!r} can't be imported: {error}")
        if not isinstance(found, Saga):
            self.fail(f"{value!r} is no Saga but a {type(found).__name__}")
        return found


SAGA = _SagaName()


@click.group()
def sagas() -> None:
    """Sagas that are unfinished, and those that wait for a person (parked)."""


@sagas.command("list")
@click.argument("saga", type=SAGA)
@click.option("--parked", is_flag=True, help="Only those that wait for a person.")
def list_(saga: Saga, parked: bool) -> None:
    """Unfinished sagas, one a line: ID, status, the step that failed, when it goes on."""
    found = answered(saga.parked() if parked else saga.unfinished())
    for each in found:
        click.echo(_line(each))
    click.echo(f"{len(found)} {'parked' if parked else 'unfinished'}", err=True)


@sagas.command()
@click.argument("saga", type=SAGA)
@click.argument("id")
def show(saga: Saga, id: str) -> None:
    """Where one saga is, and what its failing steps said last."""
    each = answered(saga.look(id))
    click.echo(_line(each))
    for name in ("done", "undone", "parked", "pending"):
        if steps := getattr(each, name):
            click.echo(f"  {name}: {', '.join(steps)}")
    for step, said in each.errors:
        click.echo(f"  {step} said: {said}")
    if each.problem:
        click.echo(f"  problem: {each.problem}")


@sagas.command()
@click.argument("saga", type=SAGA)
@click.argument("id")
def resume(saga: Saga, id: str) -> None:
    """Go on with one saga now; a parked undo or step is tried again."""
    _go_on(id, saga.resume(id))


@sagas.command()
@click.argument("saga", type=SAGA)
@click.argument("id")
@click.argument("step")
def settle(saga: Saga, id: str, step: str) -> None:
    """Say that nothing of a parked step stands: it never happened, or was undone by hand.

    The saga goes on: what was before the step is undone. (That a step was done by hand, with a
    result, is said in code: `await saga.settle(id, step, result=…)`.)
    """
    try:
        _go_on(id, saga.settle(id, step))
    except ValueError as error:
        raise click.ClickException(str(error)) from None


def _go_on(id: str, work: Awaitable[object]) -> None:
    try:
        answered(work)
    except SagaFailed as failed:
        click.echo(str(failed))
        sys.exit(0 if not failed.parked and not getattr(failed, "pending", ()) else 1)
    click.echo(f"{id}: all steps are done")


def _line(each: SagaInfo) -> str:
    words = [each.id, each.status]
    if each.failed:
        words.append(f"failed at {each.failed}")
    if each.owned:
        words.append("a process runs it now")
    elif each.due > 0:
        words.append(f"goes on in {each.due:.0f} s")
    return "  ".join(words)
