"""A saga whose undo fails until a file says that it may succeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retrysafe import Saga, open_store

saga = Saga("order", open_store(os.environ["SAGA_URL"]), undo_backoff="fixed:1ms", undo_attempts=2)


def put_back(ctx: Any, data: Any) -> None:
    if not Path(os.environ["SAGA_DIR"], "mended").exists():
        raise RuntimeError("the warehouse is closed")


@saga.step(undo=put_back)
async def reserve(ctx: Any, item: str) -> str:
    return item


@saga.step()
async def pay(ctx: Any, item: str) -> str:
    raise PermissionError("declined")
