"""`retrysafe receipts`: what was begun, what is known of it, and how to forget it."""

from __future__ import annotations

import re
import time
from contextlib import aclosing

import click

from retrysafe import commands, keys, survey
from retrysafe.cli.common import answered, expiry, plain, roughly, with_store
from retrysafe.commands import Answer
from retrysafe.receipt import ReceiptState
from retrysafe.stores import Store
from retrysafe.stores.doors import async_door
from retrysafe.survey import FoundReceipt

_NAME = re.compile("[0-9a-f]{12,32}")
_CORRUPT = "corrupt"


@click.group()
def receipts() -> None:
    """Receipts of keyed calls.

    One is named by the first 12 hex digits of its digest, which logs and events have too, or by
    its key (--key) and whose it is (--scope): a function's scope is its module and name, a
    request's is `user:<identity>`, `auth:<digest>`, `own:<text>`, or nothing for the anonymous.
    """


@receipts.command("list")
@with_store
@click.option(
    "--state", type=click.Choice([*map(str, ReceiptState), _CORRUPT]), help="Only those so."
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=50,
    show_default=True,
    help="How many at most; 0: all.",
)
def list_(store: Store, state: str | None, limit: int) -> None:
    """Receipts, one a line, in no order: digest, state, age, what is left of it, request ID."""
    shown, more = answered(_list(store, state, limit))
    said = f"{shown} {'of them' if more else 'in all'}"
    click.echo(f"{said}; --limit 0 shows all" if more else said, err=True)


async def _list(store: Store, state: str | None, limit: int) -> tuple[int, bool]:
    shown = 0
    async with aclosing(survey.receipts(store)) as found:
        async for each in found:
            if state is not None and _state(each) != state:
                continue
            if shown == limit > 0:
                return shown, True
            click.echo(_line(each))
            shown += 1
    return shown, False


@receipts.command()
@with_store
@click.argument("digest", required=False)
@click.option("--key", help="The caller's key.")
@click.option("--scope", default="", help="Whose it is.")
def show(store: Store, digest: str | None, key: str | None, scope: str) -> None:
    """All that is known of one receipt, but for its result, which may be a secret."""
    each = answered(_one(store, _named(store, digest, key, scope)))
    click.echo(f"digest      {each.digest}")
    click.echo(f"state       {_state(each)}")
    if each.receipt is not None:
        click.echo(f"started     {each.receipt.started.isoformat(timespec='milliseconds')}")
        click.echo(f"request ID  {plain(each.receipt.request_id) or '-'}")
        click.echo(f"fence       {each.receipt.fence}")
        if each.receipt.lease_left is not None:
            click.echo(f"lease left  {roughly(each.receipt.lease_left)}")
            click.echo(f"waiting     {each.waiting} processes")
    click.echo(f"expiry      {expiry(each.expires_in)}")
    click.echo(f"size        {each.size} bytes")


@receipts.command()
@with_store
@click.argument("digest", required=False)
@click.option("--key", help="The caller's key.")
@click.option("--scope", default="", help="Whose it is.")
@click.option("--yes", is_flag=True, help="Don't ask.")
def forget(store: Store, digest: str | None, key: str | None, scope: str, yes: bool) -> None:
    """Delete one receipt: the next call of its key runs as if it were the first."""
    each = answered(_one(store, _named(store, digest, key, scope)))
    click.echo(_line(each))
    if not yes:
        click.confirm("What it did may be done once more. Forget it?", abort=True)
    if not answered(_forget(store, each.digest)):
        raise click.ClickException("it is gone already")
    click.echo(f"{each.digest[:12]} is forgotten")


def _named(store: Store, digest: str | None, key: str | None, scope: str) -> str:
    """The digest, or how it begins, that the arguments say."""
    if (digest is None) == (key is None):
        raise click.UsageError("name one receipt: by the digits of its digest, or by --key")
    if key is not None:
        return keys.digest(store.namespace, scope, key).hex()
    assert digest is not None
    if not _NAME.fullmatch(digest):
        raise click.UsageError(f"{digest!r} is no digest: it has 12 to 32 of the digits 0-9a-f")
    return digest


async def _one(store: Store, digest: str) -> FoundReceipt:
    found = [each async for each in survey.receipts(store, digest)]
    if not found:
        raise click.ClickException(f"there is no receipt {digest[:12]} in {store.namespace!r}")
    if len(found) > 1:
        listed = ", ".join(each.digest for each in found)
        raise click.ClickException(f"{digest} begins several: {listed}")
    return found[0]


async def _forget(store: Store, digest: str) -> bool:
    reply = await async_door(store).execute(commands.Forget(bytes.fromhex(digest)))
    return reply.answer is Answer.OK


def _state(each: FoundReceipt) -> str:
    return _CORRUPT if each.receipt is None else str(each.receipt.state)


def _line(each: FoundReceipt) -> str:
    receipt, age, id, left = each.receipt, "", "", expiry(each.expires_in)
    if receipt is not None:
        age = roughly(max(0.0, time.time() - receipt.fence / 1e6))
        id = plain(receipt.request_id)
        if receipt.state is ReceiptState.RUNNING and receipt.lease_left is not None:
            left = f"lease ends in {roughly(receipt.lease_left)}"
    return f"{each.digest[:12]}  {_state(each):<9}  {age:>8}  {left:<22}  {id}".rstrip()
