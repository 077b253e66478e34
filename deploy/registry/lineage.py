"""Lineage of an adapter: parents down to the base, runs, groups, scores, gate and ramp.

It is read from the store alone, so it includes what happened after the folder was published.
Content (prompts, answers) is not copied: ids lead to it while it is kept. Of groups whose content
is deleted it tells the digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.evidence.live import GUARDS
from deploy.records import AdapterVersion
from deploy.registry import audit, canaries, versions
from deploy.registry.canary_rule import judge_name
from sidecar.records import BASE
from sidecar.store.models import (
    AnswerRow,
    GateComparisonRow,
    GroupDigestRow,
    GroupRow,
    JudgeCallRow,
    RunRow,
    TaskGroupRow,
    TaskMemberRow,
)
from sidecar.visible import counted, visible

SHOWN_PROMPTS = 40
"""Held-out prompts of a canary that are rendered; a ramp has hundreds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageGroup:
    """A group that a training run claimed."""

    group_id: str
    exchange_id: str
    adapter: str
    """Adapter that sampled the answers, or "base"."""
    status: str
    reason: str | None
    scores: tuple[float | None, ...]
    rewards: tuple[float | None, ...]
    """What was learned from; empty: the scores."""
    judge_model: str | None
    rubric_hash: str | None
    content: str = "stored"
    """`stored`, or why its content is gone: `expired` (retention), `forgotten`."""
    content_digest: str = ""
    """Digest of prompt and answers whose content is gone; empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageRun:
    """The training run that made a version."""

    run_id: str
    status: str
    started_at: float
    ended_at: float | None
    settings: dict[str, Any]
    counts: dict[str, Any]
    metrics: tuple[dict[str, Any], ...]
    """One object per optimiser step."""
    groups: tuple[LineageGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageCanary:
    """The canary of a version, with its evidence."""

    canary_id: str
    state: str
    reason: str | None
    champion: str
    started_at: float
    ended_at: float | None
    evidence: dict[str, Any]
    gate_exchange_ids: tuple[str, ...]
    gate_differences: tuple[float | None, ...]
    """Score differences, one per exchange id; None: set aside."""
    gate_judges: tuple[str, ...]
    """Judge models and rubric hashes of the comparisons, without duplicates."""
    gate_disagreements: tuple[float | None, ...] = ()
    """How far the judge's passes differ, one per exchange id; None: a single pass, or no scores."""
    judge_gives_reward: bool | None = None
    """True when the gate's judge also scores what the adapter learned from; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageStep:
    """One version of the lineage, with its training run and its canary."""

    adapter: AdapterVersion
    run: LineageRun | None
    canary: LineageCanary | None
    origin: str | None
    """Why it was registered: an import says from which folder. None: not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """A version and its parents, the youngest first; empty for the base itself."""

    model: str
    name: str
    steps: tuple[LineageStep, ...]


def trace_lineage(session: Session, model: str, reference: str) -> Lineage:
    """Trace the lineage of a version, an alias or a full name. Raises: UnknownAdapterError."""
    name = versions.resolve(session, model, reference)
    steps = tuple(
        LineageStep(
            adapter=version,
            run=_run(session, version),
            canary=_canary(session, version.name),
            origin=audit.first_reason(session, "adapter.registered", version.name),
        )
        for version in versions.ancestors(session, name)
    )
    return Lineage(model=model, name=name, steps=steps)


def render_lineage(lineage: Lineage) -> str:
    """Render a lineage as text for a person, the youngest version first."""
    lines = [f"{lineage.name} of {lineage.model}"]
    for step in lineage.steps:
        lines += ["", *_render_adapter(step.adapter)]
        none = f"  no training run recorded{f'; {step.origin}' if step.origin else ''}"
        lines += _render_run(step.run) if step.run is not None else [none]
        lines += _render_canary(step.canary) if step.canary is not None else ["  no canary yet"]
    # Reasons hold text of people and judges: no character of it may end a line or move the cursor.
    return "\n".join(visible(line) for line in [*lines, "", f"base: {lineage.model}"])


def _run(session: Session, version: AdapterVersion) -> LineageRun | None:
    row = session.get(RunRow, version.run_id) if version.run_id is not None else None
    if row is None:
        return None
    groups = session.scalars(
        select(GroupRow).where(GroupRow.run_id == row.run_id).order_by(GroupRow.seq)
    ).all()
    scores, rewards = _scores(session, [group.group_id for group in groups])
    deleted = session.scalars(
        select(GroupDigestRow)
        .where(GroupDigestRow.run_id == row.run_id)
        .order_by(GroupDigestRow.group_seq)
    ).all()
    return LineageRun(
        run_id=row.run_id,
        status=row.status,
        started_at=row.started_at,
        ended_at=row.ended_at,
        settings=row.settings,
        counts=row.counts,
        metrics=tuple(row.metrics),
        groups=tuple(_deleted_group(group) for group in deleted)
        + tuple(
            _group(
                group,
                group.exchange_id,
                scores[group.group_id],
                rewards[group.group_id] if group.reward_rule is not None else (),
            )
            for group in groups
        )
        + _of_sessions(session, row.run_id),
    )


def _of_sessions(session: Session, run_id: str) -> tuple[LineageGroup, ...]:
    """Return a run's groups of whole sessions, each named by its first exchange; their scores are
    the sessions' rewards."""
    row, member = TaskGroupRow, TaskMemberRow
    groups = session.scalars(select(row).where(row.run_id == run_id).order_by(row.seq)).all()
    members: dict[str, list[TaskMemberRow]] = {group.group_id: [] for group in groups}
    found = select(member).where(member.group_id.in_(members)).order_by(member.place)
    for one in session.scalars(found):
        members[one.group_id or ""].append(one)
    return tuple(
        _group(
            group,
            next((str(x) for one in of for x in one.exchange_ids or ()), ""),
            [one.reward for one in of],
        )
        for group in groups
        for of in (members[group.group_id],)
    )


def _deleted_group(row: GroupDigestRow) -> LineageGroup:
    return replace(
        _group(row, row.exchange_id, row.scores, row.rewards or ()),
        content="forgotten" if row.forgotten else "expired",
        content_digest=row.content_digest,
    )


def _group(
    row: GroupRow | TaskGroupRow | GroupDigestRow,
    exchange_id: str,
    scores: Iterable[float | None],
    rewards: Iterable[float | None] = (),
) -> LineageGroup:
    return LineageGroup(
        group_id=row.group_id,
        exchange_id=exchange_id,
        adapter=row.adapter,
        status=row.status,
        reason=row.reason,
        scores=tuple(scores),
        rewards=tuple(rewards),
        judge_model=row.judge_model,
        rubric_hash=row.rubric_hash,
    )


def _scores(
    session: Session, group_ids: list[str]
) -> tuple[dict[str, list[float | None]], dict[str, list[float | None]]]:
    """Read scores and rewards by group, in the order of the answers."""
    scores: dict[str, list[float | None]] = {group_id: [] for group_id in group_ids}
    rewards: dict[str, list[float | None]] = {group_id: [] for group_id in group_ids}
    statement = (
        select(AnswerRow.group_id, AnswerRow.score, AnswerRow.reward)
        .where(AnswerRow.group_id.in_(group_ids))
        .order_by(AnswerRow.group_id, AnswerRow.index)
    )
    for group_id, score, reward in session.execute(statement):
        scores[group_id].append(score)
        rewards[group_id].append(reward)
    return scores, rewards


def _canary(session: Session, name: str) -> LineageCanary | None:
    row = canaries.canary_of(session, name)
    if row is None:
        return None
    compared = session.scalars(
        select(GateComparisonRow)
        .where(GateComparisonRow.canary_id == row.canary_id)
        .order_by(GateComparisonRow.comparison_id)
    ).all()
    gives = canaries.to_canary(row).judge_gives_reward
    return LineageCanary(
        canary_id=row.canary_id,
        state=row.state,
        reason=row.reason,
        champion=row.champion,
        started_at=row.created_at,
        ended_at=row.ended_at,
        evidence=row.evidence,
        gate_exchange_ids=tuple(one.exchange_id for one in compared),
        gate_differences=tuple(one.difference for one in compared),
        gate_judges=_judges(session, compared),
        gate_disagreements=tuple(one.disagreement for one in compared),
        judge_gives_reward=gives,
    )


def _judges(session: Session, compared: Sequence[GateComparisonRow]) -> tuple[str, ...]:
    """Return who judged these comparisons. Those of older versions name nobody: their calls do,
    while they are kept."""
    named = {(one.judge_model, one.rubric_hash) for one in compared if one.judge_model}
    if unnamed := [one.comparison_id for one in compared if not one.judge_model]:
        calls = select(JudgeCallRow.judge_model, JudgeCallRow.rubric_hash)
        named |= {
            (model, digest)
            for model, digest in session.execute(
                calls.where(JudgeCallRow.group_id.in_(unnamed)).distinct()
            )
        }
    return tuple(sorted(judge_name(str(model), str(digest or "")) for model, digest in named))


def _render_adapter(adapter: AdapterVersion) -> list[str]:
    parent = adapter.parent if adapter.parent != BASE else "the base model"
    lines = [
        f"v{adapter.version} {adapter.name} [{adapter.state}]",
        f"  from {parent}; sha256 {adapter.digest}",
        f"  folder {adapter.path}",
    ]
    if adapter.removed_at is not None:
        lines.append("  that folder was removed, because nothing had used it for long")
    if adapter.forgotten_at is not None:
        lines.append(
            "  it, or an adapter that it continues, learned from content that is forgotten"
        )
    return lines


def _render_run(run: LineageRun) -> list[str]:
    settings = ", ".join(f"{key}={value}" for key, value in sorted(run.settings.items()))
    counts = ", ".join(f"{key} {value}" for key, value in sorted(run.counts.items()))
    lines = [
        f"  run {run.run_id} [{run.status}]: {counted(len(run.metrics), 'optimiser step')}; "
        f"groups: {counts}",
        f"    settings {settings}",
    ]
    for group in run.groups:
        scores = " ".join(_number(score, ".2f", "-") for score in group.scores)
        rewards = " ".join(_number(reward, ".2f", "-") for reward in group.rewards)
        outcome = group.status if group.reason is None else f"{group.status}: {group.reason}"
        lines.append(
            f"    group {group.group_id} [{outcome}] exchange {group.exchange_id}, answers of "
            f"{group.adapter}, scores {scores} by {group.judge_model} "
            f"rubric {str(group.rubric_hash or '')[:12]}"
            + (f", rewards {rewards} with verifiers" if rewards else "")
            + (
                ""
                if group.content == "stored"
                else f"; content {group.content}, sha256 {group.content_digest or 'not known'}"
            )
        )
    return lines


def _render_canary(canary: LineageCanary) -> list[str]:
    lines = [
        f"  canary {canary.canary_id} [{canary.state}] against {canary.champion}: {canary.reason}"
    ]
    evidence = canary.evidence
    lines += _render_evidence("probe", evidence, lambda probe: f"probe {probe['reason']}")
    lines += _render_evidence("gate", evidence, _render_gate)
    if evidence.get("gate"):
        lines += [f"    gate judged by {judge}" for judge in canary.gate_judges]
        if canary.judge_gives_reward:
            lines.append("    that judge also gave the reward that it was trained on")
    compared = list(zip(canary.gate_exchange_ids, canary.gate_differences, strict=True))
    for exchange_id, difference in compared[:SHOWN_PROMPTS]:
        shown = _number(difference, "+.3f", "set aside")
        lines.append(f"    held-out prompt {exchange_id}: {shown}")
    if len(compared) > SHOWN_PROMPTS:
        lines.append(f"    and {counted(len(compared) - SHOWN_PROMPTS, 'more held-out prompt')}")
    lines += _render_evidence("quality", evidence, _render_quality)
    lines += _render_evidence("guards", evidence, _render_guards)
    for key in evidence:
        if key.startswith("step_"):
            lines += _render_evidence(key, evidence, partial(_render_step, key.replace("_", " ")))
    return lines


def _render_evidence(
    key: str,
    evidence: Mapping[str, Any],  # Any: JSON
    render: Callable[[dict[str, Any]], str],
) -> list[str]:
    """Render an entry of the evidence as a line; none without it. A damaged entry says so."""
    found = evidence.get(key)
    if not found:
        return []
    try:
        return [f"    {render(found)}"]
    except (KeyError, TypeError, ValueError, AttributeError):
        return [f"    {key.replace('_', ' ')}: damaged in the store"]


def _render_gate(gate: dict[str, Any]) -> str:
    low, high = gate["low"], gate["high"]
    interval = "" if low is None else f"; 95% interval {low:+.3f} to {high:+.3f}"
    return f"{gate['reason']}{interval}"


_PROVEN = {
    "no_worse": "no worse than the champion",
    "anchored": "no worse than the anchor",
    "better": "better than the champion",
    "over_anchor": "better than the anchor",
    "champion_over_anchor": "the champion is better than the anchor",
}


def _render_quality(quality: dict[str, Any]) -> str:
    proven = ", ".join(_PROVEN[claim] for claim in quality["proven"]) or "nothing"
    return (
        f"{counted(quality['groups'], 'judged group proves', 'judged groups prove')}: {proven}; "
        "difference to the champion "
        f"{quality['low']:+.3f} to {quality['high']:+.3f} at all looks; "
        f"{quality['lost']} lost by the candidate, {quality['unknown']} not scored"
    )


def _render_guards(guards: dict[str, Any]) -> str:
    met = guards["sessions"]
    bad = ", ".join(
        f"{kind} {guards[kind]['canary']}:{guards[kind]['champion']}"
        for kind in GUARDS
        if kind in guards  # a canary of an older release had fewer
    )
    turns = (bad, *canaries.client_guard_texts(guards))
    return (
        f"{counted(met['canary'], 'session')} of the canary, {met['champion']} of the champion; "
        f"with a bad turn, canary to champion: {'; '.join(turns)}"
    )


def _render_step(name: str, step: dict[str, Any]) -> str:
    return (
        f"{name} at {step['weight_bp'] / 100:g}%: canary {_counts(step['candidate'])}; "
        f"champion {_counts(step['champion'])}"
    )


def _number(stored: float | None, form: str, none: str) -> str:
    """Render a number. none: what stands for no number."""
    return none if stored is None else format(stored, form)


def _counts(arm: dict[str, int]) -> str:
    replies = counted(arm["replies"], "reply", "replies")
    return f"{replies}, {arm['errors']} failed, {arm['short']} cut short or empty"
