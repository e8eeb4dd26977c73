"""The script of job budgets, mirrored for the memory store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from retrysafe.stores.keyspace import Keyspace, mirrors


@dataclass
class _Held:
    spent: int = 0
    attempt: int = 1
    given_up: bool = False
    requeued_by: str = ""
    tokens: set[str] = field(default_factory=set)


@mirrors("job_act")
def _act(space: Keyspace, key: str, args: Sequence[Any]) -> list[int]:
    op, attempt, token, limit, ttl = args
    found: _Held | None = space.get(key)
    held = _Held() if found is None else found
    answer, changed = 0, False
    if op == "look":
        answer = int(found is not None)
    elif held.given_up:
        answer = int(op == "give_up")
    elif op == "give_up":
        held.attempt = max(held.attempt, attempt)
        if attempt in (0, held.attempt):
            held.given_up, changed, answer = True, True, 1
    elif op == "spend":
        held.attempt = max(held.attempt, attempt)  # a message knows what a lost record doesn't
        if not attempt:
            if token in held.tokens:
                answer = 1
            elif held.spent < limit:
                held.tokens.add(token)
                held.spent, changed, answer = held.spent + 1, True, 1
            else:
                held.given_up, changed, answer = True, True, 2
        elif attempt == held.attempt:
            changed = True
            if attempt > limit:
                held.given_up, answer = True, 2
            else:
                held.spent, answer = max(held.spent, attempt), 1
    elif attempt == held.attempt:
        changed = True
        if attempt > limit:
            held.given_up, answer = True, 2
        else:
            held.spent, held.attempt = max(held.spent, attempt), attempt + 1
            held.requeued_by, answer = token, 1
    elif attempt == held.attempt - 1 and held.requeued_by == token:
        answer = 1
    if changed:
        space.set(key, held, ttl)
    return [answer, held.spent, held.attempt, int(held.given_up)]
