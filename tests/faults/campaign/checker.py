"""What must hold of a run, whatever was done to it: a pure function of what was written down.

Each rule says what excuses its breach, as narrowly as it can: an owner that didn't run or couldn't
reach the store for most of a lease may be taken over; what was answered by an owner while the
store was away may never have been recorded; a server that forgot its receipts runs their keys
again. Nothing else is excused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from tests.faults.campaign.history import Kind, Run, Seen

# An owner renews from a third of its lease on, every sixth of it: so much of a lease (a part) may
# be missed without its loss.
MISSED = 0.45
# Longest time (seconds) between a result and the next look of one who waits for it, and slack.
LONGEST_POLL = 2.0
SLACK = 1.5
COMMAND = 1.5  # the store's own limit of one command


@dataclass(frozen=True, slots=True)
class Broken:
    """An invariant that didn't hold: which, of what, and the facts that show it."""

    invariant: str
    what: str
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.invariant}: {self.what}", *(f"    {e}" for e in self.evidence)))


@dataclass(slots=True)
class Execution:
    name: str
    key: str
    variant: str
    call: str
    who: str
    start: float
    end: float | None = None
    how: str = ""


def check(run: Run) -> list[Broken]:
    """Every broken invariant."""
    book = _Book(run)
    rules = (
        _one_owner,
        _same_answer,
        _finished_before_told,
        _scopes,
        _errors_have_causes,
        _waiters_end,
        _waiters_are_woken,
        _one_probe,
        _bounded,
        _nothing_left,
    )
    return [broken for rule in rules for broken in rule(book)]


class _Book:
    """The run, looked up in several ways."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.executions: dict[str, Execution] = {}
        self.by_call: dict[str, Execution] = {}
        self.by_key: dict[str, list[Execution]] = defaultdict(list)
        self.answers: dict[str, list[Seen]] = defaultdict(list)
        self.calls: dict[str, list[Seen]] = defaultdict(list)
        self.missed = MISSED * run.rules.lease
        for effect in run.effects:
            if effect.what == "start":
                made = Execution(
                    effect.execution,
                    effect.key,
                    effect.variant,
                    effect.call,
                    effect.who,
                    effect.at,
                )
                self.executions[made.name] = self.by_call[made.call] = made
                self.by_key[made.key].append(made)
            elif effect.what == "end":
                ended = self.executions[effect.execution]
                ended.end, ended.how = effect.at, effect.how
        for each in self.by_key.values():
            each.sort(key=lambda execution: execution.start)
        for seen in run.calls:
            self.calls[seen.key].append(seen)
            if seen.kind == "answer":
                self.answers[seen.key].append(seen)
        self._lags = [effect for effect in run.effects if effect.what == "lag"]

    def spans(
        self, who: str, since: float, until: float, kinds: Iterable[Kind]
    ) -> Iterator[tuple[float, float]]:
        """What stood in a worker's way in a stretch of time. `who`: an incarnation, or a worker."""
        for each in self.run.disturbances:
            theirs = each.hits(who) or each.who.partition(".")[0] == who
            if each.kind in kinds and theirs and each.since < until and each.until > since:
                yield max(each.since, since), min(each.until, until)
        if "process" not in kinds:
            return
        for lag in self._lags:
            theirs = who in (lag.who, lag.who.partition(".")[0])
            if theirs and lag.since < until and lag.at > since:
                yield max(lag.since, since), min(lag.at, until)

    def disturbed(
        self, who: str, since: float, until: float, kinds: Iterable[Kind] = ("process", "store")
    ) -> float:
        """For how long, overlaps counted once."""
        total, covered = 0.0, since
        for start, end in sorted(self.spans(who, since, until, tuple(kinds))):
            total += max(0.0, end - max(start, covered))
            covered = max(covered, end)
        return total

    def met(self, who: str, since: float, until: float, *kinds: Kind) -> bool:
        return any(True for _ in self.spans(who, since, until, kinds))

    def forgot(self, first: Execution, until: float) -> bool:
        """Whether the server may have forgotten an execution's receipt by then."""
        written = float("inf") if first.end is None else first.end
        return self.forgot_since(first.start, until, written)

    def forgot_since(self, since: float, until: float, written: float = float("inf")) -> bool:
        """`written`: when the receipt was written for the last time."""
        return any(
            each.since <= until
            and each.until >= since
            and (each.kind == "loss" or (each.kind == "gap" and written >= each.since))
            for each in self.run.disturbances
        )

    def died(self, who: str) -> float:
        return min(
            (
                each.since
                for each in self.run.disturbances
                if each.kind == "dead" and each.who == who
            ),
            default=float("inf"),
        )

    def describe(self, execution: Execution) -> str:
        ended = "never ended" if execution.end is None else f"{execution.how} {execution.end:.3f}"
        died = self.died(execution.who)
        after = "" if died == float("inf") else f", its worker died {died:.3f}"
        return (
            f"execution {execution.name} of {execution.key}|{execution.variant} on {execution.who} "
            f"for call {execution.call}: started {execution.start:.3f}, {ended}{after}"
        )

    def around(self, who: str, since: float, until: float) -> list[str]:
        """What is known of a worker around that time."""
        lines = [
            f"{each.kind} {each.name} {each.since:.3f}..{each.until:.3f} of {each.who or 'all'}"
            for each in self.run.disturbances
            if each.since < until + 1 and each.until > since - 1
        ]
        lines += [
            f"lag {each.how} {each.since:.3f}..{each.at:.3f} of {each.who}"
            for each in self._lags
            if each.since < until and each.at > since and each.who == who
        ]
        return lines


def tell(seen: Seen) -> str:
    what = f"answered by {seen.execution}" if seen.kind == "answer" else f"{seen.kind} {seen.word}"
    again = " (replayed)" if seen.replayed else ""
    return (
        f"call {seen.call} of {seen.key}|{seen.variant} at {seen.worker}: sent {seen.sent:.3f}, "
        f"ended {seen.ended:.3f}: {what}{again}"
    )


# 1


def _one_owner(book: _Book) -> Iterator[Broken]:
    for executions in book.by_key.values():
        for first, second in combinations(executions, 2):
            if not _may_follow(book, first, second):
                yield Broken(
                    "one-owner",
                    f"a second execution of {first.key} began though the first owner lived, "
                    "renewed, or had finished",
                    (
                        book.describe(first),
                        book.describe(second),
                        *(tell(each) for each in book.answers[first.key][:8]),
                        *book.around(first.who, first.start, second.start),
                    ),
                )


def _may_follow(book: _Book, first: Execution, second: Execution) -> bool:
    if book.forgot(first, second.start):
        return True
    given_up = first.end is not None and first.how in ("raised", "cancelled")
    if given_up and first.end is not None and first.end <= second.start:
        return True
    last = min(second.start, _recorded_by(book, first))
    if book.died(first.who) <= last:
        return True
    return book.disturbed(first.who, first.start - 0.5, last) >= book.missed


def _recorded_by(book: _Book, execution: Execution) -> float:
    """When its result was surely in the store, had nothing stood in the way."""
    if execution.end is None or execution.how != "done":
        return float("inf")
    own = _own_answer(book, execution)
    if own and not book.met(execution.who, execution.end - 0.1, own.ended, "store"):
        return own.ended
    return execution.end + book.run.rules.lease + COMMAND


def _own_answer(book: _Book, execution: Execution) -> Seen | None:
    for seen in book.answers[execution.key]:
        if seen.execution == execution.name and not seen.replayed:
            return seen
    return None


# 2 and 4


def _same_answer(book: _Book) -> Iterator[Broken]:
    for key, answers in book.answers.items():
        told = {seen.execution: book.executions.get(seen.execution) for seen in answers}
        known = sorted((e for e in told.values() if e is not None), key=lambda e: e.start)
        for first, second in combinations(known, 2):
            if book.forgot(first, second.start):
                continue
            of_first = [seen for seen in answers if seen.execution == first.name]
            of_second = [seen for seen in answers if seen.execution == second.name]
            if _forgotten_between(book, of_first, of_second):
                continue
            if _unrecorded(book, first, of_first, second) or _unrecorded(
                book, second, of_second, first
            ):
                continue
            late = max(s.ended for s in of_first) > min(s.ended for s in of_second)
            yield Broken(
                "fenced" if late else "same-answer",
                f"{key} was answered by two executions"
                + (", the older one after the newer" if late else ""),
                (
                    book.describe(first),
                    book.describe(second),
                    *(tell(seen) for seen in sorted(answers, key=lambda s: s.ended)[:14]),
                    *book.around(first.who, first.start, second.start),
                ),
            )


def _forgotten_between(book: _Book, one: list[Seen], other: list[Seen]) -> bool:
    """Whether all answers of one came before the server forgot, and all of the other after."""
    for before, after in ((one, other), (other, one)):
        last, first = max(s.ended for s in before), min(s.ended for s in after)
        for each in book.run.disturbances:
            if each.kind == "loss" and last <= each.until and first >= each.since:
                return True
    return False


def _unrecorded(book: _Book, execution: Execution, answers: list[Seen], other: Execution) -> bool:
    """Whether this execution's only answer is its own caller's, who was told the truth about work
    that could not be recorded: the store was away, or the winner had no answer yet."""
    if any(seen.replayed for seen in answers) or execution.end is None:
        return False
    last = max(seen.ended for seen in answers)
    if book.disturbed(execution.who, execution.start - 0.5, last) < book.missed:
        return False
    away = book.met(execution.who, execution.end - 0.1, last, "store")
    return away or other.end is None or other.end > last - 0.2


# 3


def _finished_before_told(book: _Book) -> Iterator[Broken]:
    for answers in book.answers.values():
        for seen in answers:
            execution = book.executions.get(seen.execution)
            if execution is None:
                yield Broken("finished-before-told", "an answer of no execution", (tell(seen),))
            elif execution.how != "done" or execution.end is None or execution.end > seen.ended:
                yield Broken(
                    "finished-before-told",
                    "an answer names an execution that had not finished",
                    (tell(seen), book.describe(execution)),
                )


# 7


def _scopes(book: _Book) -> Iterator[Broken]:
    for answers in book.answers.values():
        for seen in answers:
            if seen.of != f"{seen.key}|{seen.variant}":
                yield Broken("scopes", f"an answer of {seen.of} to another question", (tell(seen),))


# Errors


def _errors_have_causes(book: _Book) -> Iterator[Broken]:
    for seen in book.run.calls:
        if seen.kind in ("answer", "left", "hung"):
            continue
        if not _has_cause(book, seen):
            yield Broken(
                "errors-have-causes",
                f"a call ended with {seen.kind} {seen.word} for no reason",
                (tell(seen), *book.around(seen.worker, seen.sent, seen.ended)),
            )


def _has_cause(book: _Book, seen: Seen) -> bool:
    if seen.kind == "broken" or seen.word.startswith("server-error"):
        return book.met(seen.worker, 0.0, seen.ended + 0.5, "dead")
    if seen.word == "store-unavailable":
        if book.met(seen.worker, seen.sent - 2.0, seen.ended, "store"):
            return True
        return book.disturbed(seen.worker, seen.sent, seen.ended, ("process",)) > COMMAND / 3
    if seen.word == "failed":
        own = book.by_call.get(seen.call)
        return own is not None and own.how == "raised"
    if seen.word == "fingerprint-mismatch":
        return any(
            each.variant != seen.variant and each.sent <= seen.ended
            for each in book.calls[seen.key]
        )
    if seen.word == "in-flight":
        return seen.ended - seen.sent >= book.run.rules.wait - 0.5
    return False


# 5


def _waiters_end(book: _Book) -> Iterator[Broken]:
    for seen in book.run.calls:
        if seen.kind == "hung":
            yield Broken("waiters-end", "a call had no answer at all", (tell(seen),))
        if seen.kind not in ("answer", "refused") or seen.call in book.by_call:
            continue
        limit = book.run.rules.wait + 1.0
        limit += book.disturbed(seen.worker, seen.sent, seen.ended, ("process",))
        if seen.ended - seen.sent > limit:
            yield Broken(
                "waiters-end",
                f"a waiter ended after {seen.ended - seen.sent:.2f} s, its limit is {limit:.2f} s",
                (tell(seen), *book.around(seen.worker, seen.sent, seen.ended)),
            )


def _waiters_are_woken(book: _Book) -> Iterator[Broken]:
    """A result that stands reaches those who wait for it."""
    for key, calls in book.calls.items():
        for seen in calls:
            if seen.call in book.by_call or seen.kind not in ("answer", "refused"):
                continue
            if seen.kind == "refused" and seen.word != "in-flight":
                continue
            stood = _stood_since(book, key, seen)
            if stood is None:
                continue
            since = max(stood, seen.sent)
            limit = LONGEST_POLL + SLACK
            limit += book.disturbed(seen.worker, since, seen.ended)
            if book.met(seen.worker, seen.sent - COMMAND, seen.ended, "store", "slow"):
                limit += COMMAND
            if seen.ended - since > limit:
                yield Broken(
                    "waiters-end",
                    f"a waiter was not woken: the result stood for {seen.ended - since:.2f} s",
                    (tell(seen), *(tell(each) for each in calls if each.kind == "answer")),
                )


def _stood_since(book: _Book, key: str, seen: Seen) -> float | None:
    """When another call had the answer that this one waited for."""
    others = [
        each.ended
        for each in book.answers[key]
        if each.call != seen.call
        and each.variant == seen.variant
        and (seen.kind != "answer" or each.execution == seen.execution)
        and not book.forgot_since(each.ended, seen.ended)
        and not _own_unrecorded(book, each)
    ]
    return min(others, default=None)


def _own_unrecorded(book: _Book, seen: Seen) -> bool:
    execution = book.executions.get(seen.execution)
    if execution is None or seen.replayed or execution.end is None:
        return False
    return book.disturbed(execution.who, execution.start - 0.5, seen.ended) > 0


# The breaker


def _one_probe(book: _Book) -> Iterator[Broken]:
    rules = book.run.rules
    ends = {e.execution: e.at for e in book.run.effects if e.what == "probe-end"}
    starts = sorted(
        (e for e in book.run.effects if e.what == "probe-start"), key=lambda effect: effect.at
    )
    held: list[tuple[float, str, str]] = []  # of those under way: start, who, name
    for start in starts:
        under_way = []
        for at, who, name in held:
            over = min(ends.get(name, float("inf")), book.died(who))
            lost = book.disturbed(who, at - 2.5, start.at)
            if over <= start.at or book.forgot_since(at, start.at):
                continue
            if start.at - at + lost >= 0.9 * rules.permit_lease:
                continue
            under_way.append((at, who, name))
        if len(under_way) >= rules.probes:
            yield Broken(
                "one-probe",
                f"{len(under_way) + 1} probes at once, {rules.probes} are allowed",
                (
                    f"probe {start.execution} on {start.who} began {start.at:.3f}",
                    *(f"probe {name} on {who} runs since {at:.3f}" for at, who, name in under_way),
                    *book.around(start.who, start.at - 1, start.at),
                ),
            )
        held = [*under_way, (start.at, start.who, start.execution)]


# 6 and 8


def _bounded(book: _Book) -> Iterator[Broken]:
    run = book.run
    if run.lasting_keys:
        yield Broken("bounded", "keys without a TTL", tuple(run.lasting_keys))
    if run.receipts > len(book.calls):
        yield Broken("bounded", f"{run.receipts} receipts of {len(book.calls)} keys")
    if run.other_keys > 3:
        yield Broken("bounded", f"{run.other_keys} keys of one breaker, which has three")


def _nothing_left(book: _Book) -> Iterator[Broken]:
    run = book.run
    if run.leftovers:
        yield Broken("nothing-left", "held by a worker that has no call", tuple(run.leftovers))
    if run.at_work:
        yield Broken("nothing-left", "receipts with a live owner", tuple(run.at_work))
    if run.permits:
        yield Broken("nothing-left", f"{run.permits} probe permits nobody holds")
