"""The funnel: what entered each stage and where it ended, from durable counters.

Every record that entered a stage has passed on, ended there for a reason, or waits:

    entered + unreported == passed + the sum of ended + the sum of waiting

What waits is computed from the other numbers, not counted in the tables: so a stage costs the same
for ten records and for a million, and rows that retention deletes change nothing. Who deletes a
record that still waits counts it in its stage: an exchange as `expired` or `forgotten`, a group by
the status that it had (`deleted_groups`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.best_of import SCORED
from ingest.grouping.selection import BACKLOG, CHOSEN, STAGE as SELECTION, live_adapters
from ingest.intake.choose import pending_by_status
from ingest.intake.consume import REPEATED, STAGE as CONSUME, STORED
from ingest.retention.deletion import DELETED_GROUPS
from ingest.store.exchanges import NEW
from ingest.store.groups import CLAIMED, SAMPLED, SAMPLING
from learner.runs.source import NOT_GROUPS, STAGE as LEARN, TRAINED
from sidecar.capture.outbox import BUS, CAPTURE, FORWARDED, KEPT, REFUSED, REQUESTS
from sidecar.records import IMPORTED
from sidecar.store.models import AdapterRow, CounterRow, GroupRow
from sidecar.visible import counted

Counters = Mapping[str, Mapping[str, int]]
"""Stage -> reason -> count, as in the table `counter`."""
Name = Literal["requests", "bus", "selection", "sampling", "judging", "learning", "serving"]
STAGES: tuple[Name, ...] = (
    "requests",
    "bus",
    "selection",
    "sampling",
    "judging",
    "learning",
    "serving",
)
"""In the order in which a record comes through them."""
DELETED = "deleted"
"""Reason of groups that were deleted while they waited."""
SERVES = "champion"
DECIDED = ("rejected", "rolled_back", "retired")
"""States of an adapter that no user gets (any more)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage, since the store was made."""

    name: Name
    unit: str
    """What is counted: requests, exchanges, groups or adapters."""
    passed_as: str
    """What a record is called that passed."""
    entered: int
    passed: int
    ended: Mapping[str, int]
    """Reason -> records that go no further."""
    waiting: Mapping[str, int]
    """State -> records that are still in the stage."""
    unreported: int
    """Records that left the stage and that nobody counted as they entered it: a process that was
    killed takes its last seconds of counts along."""


def stages_of(
    counters: Counters, *, claimed: int, adapters: Mapping[str, int]
) -> tuple[Stage, ...]:
    """Return all stages, in order.

    claimed: groups that a training run has now. adapters: number of versions by state.
    """
    requests = counters.get(REQUESTS, {})
    capture, bus, consume = (counters.get(name, {}) for name in (CAPTURE, BUS, CONSUME))
    selection, learn = counters.get(SELECTION, {}), counters.get(LEARN, {})
    sampling, judging = counters.get("sampling", {}), counters.get("judging", {})
    kept, stored = capture.get(KEPT, 0), consume.get(STORED, 0)
    chosen = selection.get(CHOSEN, 0)
    sampled, scored = sampling.get(SAMPLED, 0), judging.get(SCORED, 0)
    deleted = counters.get(DELETED_GROUPS, {})
    drops = {
        why: number
        for why, number in learn.items()
        if why not in (TRAINED, *NOT_GROUPS) and not why.startswith("answer_masked_")
    }
    return (
        _stage(
            "requests",
            "requests",
            "captured",
            entered=sum(requests.values()),
            passed=kept,
            ended={
                **_without(capture, KEPT),
                **{why: number for why, number in requests.items() if why.startswith(REFUSED)},
            },
        ),
        _stage(
            "bus",
            "exchanges",
            "stored, each in a session",
            entered=kept + consume.get(IMPORTED, 0),  # imports come by no request
            passed=stored,
            ended={
                **_without(bus, FORWARDED),
                **_without(consume, STORED, REPEATED, IMPORTED),
            },
        ),
        _stage(
            "selection",
            "exchanges",
            "chosen",
            entered=stored,
            passed=chosen,
            ended=_without(selection, CHOSEN, BACKLOG),
            waiting={BACKLOG: selection.get(BACKLOG, 0)},
            rest=NEW,
        ),
        _stage(
            "sampling",
            "groups",
            "complete",
            entered=chosen,
            passed=sampled,
            ended=_with_deleted(_without(sampling, SAMPLED), deleted, SAMPLING),
            rest=SAMPLING,
        ),
        _stage(
            "judging",
            "groups",
            "scored",
            entered=sampled,
            passed=scored,
            ended=_with_deleted(_without(judging, SCORED), deleted, SAMPLED),
            rest=SAMPLED,
        ),
        _stage(
            "learning",
            "groups",
            "in an adapter",
            entered=scored,
            passed=learn.get(TRAINED, 0),
            ended=_with_deleted(drops, deleted, SCORED, CLAIMED),
            waiting={CLAIMED: claimed},
            rest=SCORED,
        ),
        _stage(  # counted from the rows of adapters: they are few, and each is kept
            "serving",
            "adapters",
            "champion now",
            entered=sum(adapters.values()),
            passed=adapters.get(SERVES, 0),
            ended={state: adapters[state] for state in DECIDED if adapters.get(state)},
            waiting=_without(adapters, SERVES, *DECIDED),
        ),
    )


def exchanges_by_selection(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Return the number of exchanges by what selection decided, and `new`: not decided yet."""
    selection = next(stage for stage in stages if stage.name == "selection")
    chosen = {CHOSEN: selection.passed} if selection.passed else {}
    return dict(sorted({**selection.ended, **selection.waiting, **chosen}.items()))


def groups_by_status(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Return the number of groups that were ever made, by status, without zeros.

    Groups that were deleted after they had ended keep their status; others are `deleted`.
    """
    by_name = {stage.name: stage for stage in stages}
    sampling, judging, learning = (by_name[n] for n in ("sampling", "judging", "learning"))
    found = {
        **sampling.waiting,
        **judging.waiting,
        "set_aside": sum(_without(sampling.ended, DELETED).values())
        + sum(_without(judging.ended, DELETED).values()),
        **learning.waiting,
        TRAINED: learning.passed,
        "dropped": sum(_without(learning.ended, DELETED).values()),
        DELETED: sum(stage.ended.get(DELETED, 0) for stage in (sampling, judging, learning)),
    }
    return {status: number for status, number in found.items() if number}


def groups_by_reason(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Return the number of groups that were set aside or dropped, by reason."""
    found: dict[str, int] = {}
    for stage in stages:
        if stage.unit == "groups":
            for reason, number in stage.ended.items():
                found[reason] = found.get(reason, 0) + number
    return found


def _stage(
    name: Name,
    unit: str,
    passed_as: str,
    *,
    entered: int,
    passed: int,
    ended: Mapping[str, int],
    waiting: Mapping[str, int] | None = None,
    rest: str = "waiting",
) -> Stage:
    """rest: state of the records that neither passed, ended nor are in another waiting state."""
    known = {state: number for state, number in (waiting or {}).items() if number}
    left = entered - passed - sum(ended.values()) - sum(known.values())
    return Stage(
        name=name,
        unit=unit,
        passed_as=passed_as,
        entered=entered,
        passed=passed,
        ended=ended,
        waiting={**known, **({rest: left} if left > 0 else {})},
        unreported=max(0, -left),
    )


def _with_deleted(
    ended: Mapping[str, int], deleted: Mapping[str, int], *statuses: str
) -> Mapping[str, int]:
    """Add the groups that were deleted while they waited in these statuses."""
    number = sum(deleted.get(status, 0) for status in statuses)
    return {**ended, DELETED: number} if number else ended


def _without(counts: Mapping[str, int], *reasons: str) -> dict[str, int]:
    return {why: number for why, number in counts.items() if why not in reasons and number}


# Read the funnel from the store: the counters, and what two short queries tell.

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    stages: tuple[Stage, ...]
    counters: Counters
    """Everything in the table `counter`."""

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def read_funnel(session: Session, *lines: str) -> Funnel:
    """Read the funnel. Its cost does not grow with the records.

    lines: names of the lines of adapters whose versions count in the last stage. The records of the
        stages before it are counted for all lines together.
    """
    counters = read_counters(session)
    claimed = session.scalar(
        select(func.count()).select_from(GroupRow).where(GroupRow.status == CLAIMED)
    )
    adapters = session.execute(
        select(AdapterRow.state, func.count())
        .where(AdapterRow.model.in_(lines))
        .group_by(AdapterRow.state)
    )
    return Funnel(
        stages=stages_of(
            counters,
            claimed=claimed or 0,
            adapters={str(state): number for state, number in adapters},
        ),
        counters=counters,
    )


def read_counters(session: Session) -> dict[str, dict[str, int]]:
    """Read every durable counter: stage -> reason -> count."""
    counters: dict[str, dict[str, int]] = {}
    for row in session.scalars(select(CounterRow).order_by(CounterRow.stage, CounterRow.reason)):
        counters.setdefault(row.stage, {})[row.reason] = row.count
    return counters


# No new group begins because enough wait: where they wait, how many exchanges do, what to do.

Where = Literal["sampling", "judging", "learning"]
WAITS_FOR = {"sampling": "candidates", "judging": "the judge", "learning": "the learner"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PileUp:
    """All places for groups are taken, and suitable exchanges wait for one."""

    most: int
    """Groups that may wait."""
    sampling: int
    judging: int
    learning: int
    """Groups that wait for the learner or are in a run."""
    exchanges: int
    """Suitable exchanges that are not chosen for it."""

    @property
    def where(self) -> Where:
        """What most of the groups wait for."""
        found: dict[Where, int] = {
            "learning": self.learning,
            "judging": self.judging,
            "sampling": self.sampling,
        }
        return max(found, key=lambda name: found[name])


def read_pile_up(
    session: Session, lines: Iterable[str], funnel: Funnel, *, most: int
) -> PileUp | None:
    """Return the pile-up; None while there is room, or no exchange waits for it.

    lines: names of all lines of adapters, which share the room. most:
        `learner.max_groups`.
    """
    exchanges = funnel.stage("selection").waiting.get(BACKLOG, 0)
    if exchanges <= 0:
        return None
    live = frozenset[str]().union(*(live_adapters(session, line) for line in lines))
    counts = pending_by_status(session, live, most=most)
    total = sum(counts.values())
    if total < most:
        return None
    sampling, judging = counts.get(SAMPLING, 0), counts.get(SAMPLED, 0)
    return PileUp(
        most=most,
        sampling=sampling,
        judging=judging,
        learning=total - sampling - judging,
        exchanges=exchanges,
    )


def pile_words(pile: PileUp) -> str:
    """Say what is seen, without a full stop. Pure."""
    parts = [
        f"{number:,} for {WAITS_FOR[name]}"
        for name, number in (
            ("sampling", pile.sampling),
            ("judging", pile.judging),
            ("learning", pile.learning),
        )
        if number
    ]
    left = counted(pile.exchanges, "suitable exchange is", "suitable exchanges are")
    return (
        f"no new group begins, because {pile.most:,} wait ({', '.join(parts)}), as many as may "
        f"(learner.max_groups); {left} not chosen for it yet"
    )


def to_do(where: str) -> str:
    """Say what to do, by what most groups wait for. Pure."""
    if where == "learning":
        return (
            "nothing, if this many groups a run are enough: the next run makes room. A larger "
            "learner.max_groups makes runs and this limit larger; a smaller groups.rate spreads "
            "the groups over the time between two runs"
        )
    if where == "judging":
        return "see what the judge says of itself; a faster one, or a larger judge.concurrency"
    return (
        "see whether users leave vLLM room for candidates (`Sampling` in `sidecar status`); "
        "groups.sampling_upstreams names vLLMs of their own for them"
    )
