"""What the clients saw and what was done to the workers: the checker's other half."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.faults.campaign.effects import Effect

Kind = Literal["process", "dead", "store", "slow", "loss", "gap"]


@dataclass(frozen=True, slots=True)
class Seen:
    """One call as its client saw it.

    `kind`: answer (a result), refused (`word` says why), left (the client hung up), broken (the
    connection ended), hung (no answer before the client's patience ended). `settling`: made after
    the faults, with everything healed.
    """

    call: str
    worker: str
    door: str
    key: str
    variant: str
    sent: float
    ended: float
    kind: str
    word: str = ""
    execution: str = ""
    by: str = ""  # the call whose execution answered
    of: str = ""  # the key that the answer names, with its variant
    settling: bool = False

    @property
    def replayed(self) -> bool:
        return self.kind == "answer" and self.by != self.call


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What stood in somebody's way, from when to when.

    `process`: the worker (or its loop) didn't run. `dead`: it was gone from `since` on. `store`:
    it couldn't reach the store. `slow`: it could, late. `loss`: the server forgot receipts.
    `gap`: it may have forgotten what was written to them in this time, and nothing older.
    `who`: the worker's incarnation, a worker's name for all its incarnations, "" for all workers.
    """

    kind: Kind
    name: str
    since: float
    until: float
    who: str = ""

    def hits(self, who: str) -> bool:
        return self.who in ("", who, who.partition(".")[0])


@dataclass(frozen=True, slots=True)
class Rules:
    """What the workers were told; seconds."""

    lease: float
    wait: float
    permit_lease: float
    probes: int


@dataclass(slots=True)
class Run:
    """Everything that is known of one run."""

    seed: int
    rules: Rules
    calls: list[Seen] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)  # what each worker still held at the end
    lasting_keys: list[str] = field(default_factory=list)  # without a TTL
    receipts: int = 0
    other_keys: int = 0
    at_work: list[str] = field(default_factory=list)  # receipts not finished at the end
    permits: int = 0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))


def load(path: Path) -> Run:
    facts: dict[str, Any] = json.loads(path.read_text())
    facts["rules"] = Rules(**facts["rules"])
    facts["calls"] = [Seen(**each) for each in facts["calls"]]
    facts["effects"] = [Effect(**each) for each in facts["effects"]]
    facts["disturbances"] = [Disturbance(**each) for each in facts["disturbances"]]
    return Run(**facts)
