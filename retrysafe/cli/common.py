"""What the commands share: the store they look at, and how they say things."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click

from retrysafe.errors import RetrySafeError, SagaFailed, SettingsError
from retrysafe.settings import Settings
from retrysafe.stores import Store, open_store

T = TypeVar("T")

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def with_store(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--url` and `--namespace`, and the store they say as its first argument."""

    @click.option("--url", help="The store, in place of RETRYSAFE_REDIS_URL.")
    @click.option("--namespace", help="In place of RETRYSAFE_NAMESPACE.")
    @functools.wraps(command)
    def opened(url: str | None, namespace: str | None, **rest: Any) -> Any:
        return command(_store(url, namespace), **rest)

    return opened


def _store(url: str | None, namespace: str | None) -> Store:
    try:
        url = url or Settings.from_env().redis_url
        if url is None:
            raise click.UsageError("no store is named: set RETRYSAFE_REDIS_URL, or give --url")
        if url.startswith("memory:"):
            raise click.UsageError("memory:// is seen by its own process alone, not from here")
        return open_store(url, namespace=namespace)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None


def answered(work: Awaitable[T]) -> T:
    """Run it to its end; an error of ours is said in a line, not as a traceback."""

    async def waited() -> T:
        return await work

    try:
        return asyncio.run(waited())
    except SagaFailed:
        raise
    except RetrySafeError as error:
        raise click.ClickException(str(error)) from error


def plain(text: str) -> str:
    """A text from the store as a terminal may be shown it: on one line, and no command to it."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def expiry(seconds: float | None) -> str:
    """When a key goes; None: never."""
    return "never expires" if seconds is None else f"expires in {roughly(seconds)}"


def roughly(seconds: float) -> str:
    """A duration as people say it."""
    for size, unit in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
