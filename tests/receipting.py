"""Receipts in tests: payloads, policies, owners."""

from __future__ import annotations

from typing import Any

from retrysafe import keys
from retrysafe.policy import IdempotencyPolicy
from retrysafe.receipts import AsyncHeld, AsyncReceipts, Call
from retrysafe.settings import Settings

ONE = keys.fingerprint("body", b"one")
TWO = keys.fingerprint("body", b"two")
CALL = Call("k", "s", ONE)


def policy(**fields: Any) -> Any:
    """A policy, the rest of it by default."""
    return IdempotencyPolicy(**fields).resolve(Settings())


async def held(receipts: AsyncReceipts, call: Call = CALL) -> AsyncHeld:
    """Begin, as the one who is to do the work."""
    got = await receipts.begin(call)
    assert isinstance(got, AsyncHeld)
    return got
