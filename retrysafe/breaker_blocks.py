"""Which permit belongs to which `with` block, when one breaker serves many tasks and threads.

Each task and thread notes the permits of the blocks it is in, innermost first. A child task sees
its parent's notes and adds its own; neither disturbs the other.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from retrysafe.breaker_permit import Core, Permit

Entry = tuple[Permit, Any]  # a permit, and the entry of the block around it or None
_entered: ContextVar[Entry | None] = ContextVar("retrysafe_breakers", default=None)


def enter(permit: Permit) -> None:
    """Note that a block begins with this permit."""
    rest = _entered.get()
    _entered.set((permit, rest and _live(rest)))


def leave(core: Core) -> Permit | None:
    """Take off the permit of the innermost block of this breaker.

    None: the block was entered in another context. Its permit can't be told from others' then; its
    lease heals it.
    """
    entry = _entered.get()
    if entry is not None and entry[0]._left:
        entry = _live(entry)
    if entry is not None and entry[0]._core is core:
        permit, rest = entry
        permit._left = True
        _entered.set(rest)
        return permit
    return _leave_across(core, entry)


def _live(entry: Entry | None) -> Entry | None:
    """Without blocks that ended in another context (a generator closed elsewhere)."""
    while entry is not None and entry[0]._left:
        entry = entry[1]
    return entry


def _leave_across(core: Core, entry: Entry | None) -> Permit | None:
    """The same when blocks of other breakers are further in, or a stand-in gave the permit."""
    stand_in = getattr(core, "local", core)
    passed: list[Permit] = []
    while entry is not None:
        permit, entry = entry
        if not permit._left and (permit._core is core or permit._core is stand_in):
            permit._left = True
            for each in reversed(passed):
                entry = (each, entry)
            _entered.set(entry)
            return permit
        passed.append(permit)
    return None
