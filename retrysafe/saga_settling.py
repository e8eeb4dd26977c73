"""A person's word on a step that is parked: what they found out, or put right by hand."""

from __future__ import annotations

from typing import Any

from retrysafe.saga_data import pack
from retrysafe.saga_flow import SagaRun
from retrysafe.saga_state import StepState

__all__ = ["NOTHING", "settle"]

NOTHING: Any = object()
"""In a result's place: nothing of the step stands."""


def settle(run: SagaRun, name: str, result: Any) -> None:
    """Take the word into the document, before the saga goes on. Raises ValueError, NotEncodable."""
    document = run.document
    record = next((each for each in document.steps if each.name == name), None)
    parked = [each.name for each in document.steps if each.state is StepState.PARKED]
    if record is None or record.state is not StepState.PARKED:
        raise ValueError(f"step {name!r} is not parked; parked: {', '.join(parked) or 'none'}")
    if document.back:
        if result is not NOTHING:
            raise ValueError("the saga is being undone: no result of a step is of use to it")
        record.state = StepState.UNDONE
    elif result is not NOTHING:
        record.data, run.values[name] = pack(run.steps[name].codec, result)
        record.state = StepState.DONE
        document.failed, document.cause = "", None
    elif run.committed():
        raise ValueError(
            "a step before it can't be taken back, so it only goes forward: do it by hand, and "
            "give its result"
        )
    else:
        record.state = StepState.REFUSED
        document.back = True
    record.maybe, record.error = False, ""
