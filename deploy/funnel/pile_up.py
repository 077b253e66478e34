"""No new group begins because enough wait: where they wait, how many exchanges do, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sqlalchemy.orm import Session

from deploy.funnel.read import Funnel
from ingest.grouping.rules import live_adapters
from ingest.grouping.selection import BACKLOG
from ingest.intake.pending import pending_by_status
from ingest.store.groups import SAMPLED, SAMPLING
from sidecar.plurals import counted

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
        `Settings.most_pending_groups`.
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


def said(pile: PileUp) -> str:
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
        f"(groups.max_pending_groups); {left} not chosen for it yet"
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
