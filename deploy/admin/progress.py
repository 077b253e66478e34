"""Read from the store whether the model got better, and what learning has cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.evidence.progress import (
    Estimate,
    Kind,
    Link,
    Point,
    counts_as,
    curve,
    difference_words,
    estimate,
    kinds_of,
)
from deploy.records import Canary, version_of
from deploy.registry import canaries, proof_rule, versions
from ingest.judge_watch import NANO
from ingest.judges.spending import PAID, PROMPTS, REPLIES, read_spending
from ingest.sampling.round import DAY as SAMPLED, SERVED, read_sampled_today
from sidecar.records import BASE
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import CanaryRow, CounterRow, ExchangeRow, GateComparisonRow, RunRow
from sidecar.visible import counted

MOST_VERSIONS = 40
"""Promotions that are read, the newest. With more, the origin is the champion before these."""
POINT = 0.01
"""A point of the judge's score, which goes from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """What the groups of the active canary say so far."""

    adapter: str
    champion: str
    difference: Estimate | None
    evidence: float | None
    """E-value of the claim that a promotion still lacks most; None: it waits for no proof."""
    wanted: float | None
    """E-value that proves it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What learning has cost since the store was made, over all lines but for the runs."""

    judge_tokens: int
    judge_usd: float
    """By known prices."""
    candidate_tokens: int
    user_tokens: int
    judge_usd_today: float
    candidate_tokens_today: int
    """Of this day (UTC), with what calls in flight may cost."""
    run_minutes: float
    """Time of this line's training runs on the learner's device."""

    @property
    def candidate_share(self) -> float | None:
        """Candidates' tokens by those that users got; None while there are none."""
        return self.candidate_tokens / self.user_tokens if self.user_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The figure of one line of adapters."""

    origin: str
    """The adapter that gains are over; empty: nothing was promoted."""
    points: tuple[Point, ...]
    champion: str
    kinds: tuple[Kind, ...]
    running: Running | None
    cost: Cost

    @property
    def gain(self) -> Estimate | None:
        """The champion's; None: the origin serves, or it is not known."""
        return gain_of(self.champion, self.points)

    @property
    def sentence(self) -> str:
        return gain_words(self.champion, self.origin, self.gain, len(self.points))

    @property
    def cost_of_a_point(self) -> str:
        """What `POINT` of gain has cost; empty unless the gain's interval is above 0."""
        gain, cost = self.gain, self.cost
        if gain is None or gain.low <= 0.0:
            return ""
        points = gain.mean / POINT
        return (
            f"${cost.judge_usd / points:,.3f} of judging, {cost.run_minutes / points:.1f} minutes "
            f"of training, {counted(round(cost.candidate_tokens / points), 'candidate token')}"
        )


def gain_of(adapter: str, points: Sequence[Point]) -> Estimate | None:
    """Return the gain of a version by its newest promotion. Pure."""
    found = [one.gain for one in points if one.adapter == adapter]
    return found[-1] if found else None


def gain_words(champion: str, origin: str, gain: Estimate | None, promotions: int) -> str:
    """Say whether the champion is better than what served first. Pure."""
    if not promotions:
        return "not known yet: no candidate was promoted"
    first = _named(origin)
    if champion == origin:
        return f"no: {first} serves again, as it did first"
    if gain is None:
        return f"not known: {_named(champion)} was not compared with {first}, nor with a successor"
    by = f"{_named(champion)} {difference_words(gain, first)}"
    if gain.low > 0.0:
        return f"yes: {by}"
    return f"no, it got worse: {by}" if gain.high < 0.0 else f"not proven: {by}"


def _named(adapter: str) -> str:
    return "the base" if adapter == BASE else version_of(adapter)


class ProgressReader:
    """Reads the figure, and keeps what ended canaries said: they never change."""

    def __init__(self) -> None:
        self._ended: dict[str, Link] = {}
        self._kinds: dict[str, tuple[Kind, ...]] = {}

    def read(self, session: Session, model: str, rules: CanarySettings, *, now: float) -> Progress:
        """model: the line of adapters. now: Unix seconds."""
        links = self._links(session, model)
        origin, points = curve(links)
        active = canaries.active_row(session, model)
        champion = versions.champion(session, model)
        return Progress(
            origin=origin,
            points=tuple(points),
            champion=champion,
            kinds=self._kinds_of(session, champion, links),
            running=None if active is None else _running(active, _read(session, active), rules),
            cost=read_cost(session, model, now=now),
        )

    def sentence(self, session: Session, model: str) -> str:
        """Return `Progress.sentence` alone."""
        origin, points = curve(self._links(session, model))
        champion = versions.champion(session, model)
        return gain_words(champion, origin, gain_of(champion, points), len(points))

    def points(self, session: Session, model: str) -> tuple[Point, ...]:
        """Return the gain of each promoted version of a line."""
        return tuple(curve(self._links(session, model))[1])

    def _links(self, session: Session, model: str) -> list[Link]:
        """Return the newest promotions of a line, the oldest first."""
        rows = session.scalars(
            select(CanaryRow)
            .where(CanaryRow.model == model, CanaryRow.state == "promoted")
            .order_by(CanaryRow.created_at.desc())
            .limit(MOST_VERSIONS)
        ).all()
        return [self._link(session, row) for row in reversed(rows)]

    def _kinds_of(self, session: Session, champion: str, links: Sequence[Link]) -> tuple[Kind, ...]:
        """Return what the champion's promotion says by kind of request."""
        ids = [one.canary_id for one in links if one.candidate == champion]
        if not ids:
            return ()
        if ids[-1] not in self._kinds:
            self._kinds[ids[-1]] = read_kinds(session, ids[-1])
        return self._kinds[ids[-1]]

    def _link(self, session: Session, row: CanaryRow) -> Link:
        found = self._ended.get(row.canary_id) or _read(session, row)
        if found.to_champion is not None:
            self._ended[row.canary_id] = found
        return found


def compared_words(session: Session, adapter: str) -> str:
    """Say in a sentence what a version's newest canary showed, if that has ended."""
    row = canaries.canary_of(session, adapter)
    found = None if row is None else _read(session, row)
    if found is None or found.ended_at is None or found.to_champion is None:
        return "It was not compared with the version that it should replace."
    return f"In its canary it {difference_words(found.to_champion, _named(found.champion))}."


def _read(session: Session, row: CanaryRow) -> Link:
    """Read what a canary's groups say; where none is stored any more, what its evidence says."""
    canary = canaries.to_canary(row)
    one = GateComparisonRow
    order = {name: place for place, name in enumerate((*canary.tries, canary.canary_id))}
    found = session.execute(
        select(
            *(one.canary_id, one.place, one.difference, one.anchor_difference, one.fault),
            one.rubric_hash.is_(None),  # of a comparison by whole tasks
        ).where(one.canary_id.in_(order))
    ).all()
    groups = sorted(found, key=lambda group: (order[group[0]], group[1] or 0))
    champion, anchor = list[float](), list[float]()
    for _, _, difference, to_anchor, fault, _ in groups:
        to_champion = counts_as(difference, fault)
        if to_champion is not None:
            champion.append(to_champion)
        if fault == "candidate" or to_anchor is not None:
            anchor.append(-1.0 if fault == "candidate" or to_anchor is None else to_anchor)
    anchored = canary.anchor != canary.champion and any(group[3] is not None for group in groups)
    kept, gate = canaries.entry(row, "quality"), canaries.entry(row, "gate")
    told = kept.get("to_anchor")
    ends = told.get("candidate") if isinstance(told, dict) else None
    known = not groups and isinstance(ends, list) and len(ends) == 2
    return Link(
        canary_id=row.canary_id,
        candidate=canary.candidate,
        champion=canary.champion,
        anchor=canary.anchor,
        ended_at=canary.ended_at,
        to_champion=estimate(tuple(champion))
        or _told(kept.get("low"), kept.get("high"), kept.get("groups"))
        or _told(gate.get("low"), gate.get("high"), gate.get("scored")),
        to_anchor=estimate(tuple(anchor))
        if anchored
        else _told(ends[0], ends[1], kept.get("groups"))
        if ends is not None and known
        else None,
        of_tasks=any(group[2] is not None and group[5] for group in groups),
    )


def read_kinds(session: Session, canary_id: str) -> tuple[Kind, ...]:
    """Return what the groups of a canary say by kind of request; empty where all are of one kind,
    or none is stored any more."""
    one, asked = GateComparisonRow, ExchangeRow
    found = session.execute(
        select(asked.turn, asked.project, one.difference, one.fault)
        .join(asked, asked.exchange_id == one.exchange_id)
        .where(one.canary_id == canary_id)
        .order_by(one.place)
    )
    turns, projects = list[tuple[str, float]](), list[tuple[str, float]]()
    for turn, project, difference, fault in found:
        if (value := counts_as(difference, fault)) is not None:
            turns.append(("later turns" if turn else "openings", value))
            projects.append((f"project {project}", value))
    return (*kinds_of(turns), *kinds_of(projects))


def _told(low: object, high: object, groups: object) -> Estimate | None:
    """Return an interval that the evidence of a canary kept; None for one that says nothing."""
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    if not -1.0 <= low <= high <= 1.0 or (low, high) == (-1.0, 1.0):
        return None
    number = groups if isinstance(groups, int) else 0
    return Estimate(mean=(low + high) / 2.0, low=low, high=high, groups=number)


def _running(row: CanaryRow, link: Link, rules: CanarySettings) -> Running:
    canary: Canary = canaries.to_canary(row)
    quality: Mapping[str, Any] = canaries.entry(row, "quality")
    lacking = proof_rule.least_proven(quality, canary.proven, rules)
    return Running(
        adapter=link.candidate,
        champion=link.champion,
        difference=link.to_champion,
        evidence=None if lacking is None else lacking[0],
        wanted=None if lacking is None else lacking[1],
    )


def read_cost(session: Session, model: str, *, now: float) -> Cost:
    """Return what learning has cost since the store was made. model: the line whose runs count."""
    stages = (PROMPTS, REPLIES, PAID, SAMPLED, SERVED)
    sums: dict[str, int] = defaultdict(int)
    for stage, number in session.execute(
        select(CounterRow.stage, func.sum(CounterRow.count))
        .where(CounterRow.stage.in_(stages))
        .group_by(CounterRow.stage)
    ):
        sums[stage] = int(number)
    ended = func.coalesce(RunRow.ended_at, RunRow.heartbeat_at)
    seconds = session.scalar(
        select(func.sum(ended - RunRow.started_at)).where(RunRow.model == model)
    )
    return Cost(
        judge_tokens=sums[PROMPTS] + sums[REPLIES],
        judge_usd=sums[PAID] / NANO,
        candidate_tokens=sums[SAMPLED],
        user_tokens=sums[SERVED],
        judge_usd_today=read_spending(session, now=now).nano_usd_today / NANO,
        candidate_tokens_today=read_sampled_today(session, now=now),
        run_minutes=max(0.0, float(seconds or 0.0)) / 60.0,
    )
