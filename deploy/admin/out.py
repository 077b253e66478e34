"""Reply bodies of the admin API: canaries, conditions, budgets and lines of adapters."""

from __future__ import annotations

import math
from typing import Any, Literal, Self, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from sqlalchemy.orm import Session

from deploy.admin.progress import Cost, Running
from deploy.evidence.live import Approval, Check, MetricState
from deploy.evidence.progress import Estimate, Kind, Point
from deploy.examiner import Examiner
from deploy.funnel import Stage
from deploy.outside.telling import HookState
from deploy.records import Phase
from deploy.registry import canaries, switches, tallies, versions
from ingest.judge_noise import NoiseState
from ingest.retention.sweep import RetentionState
from ingest.reward_watch.rules import Finding
from ingest.reward_watch.store import Answer
from ingest.reward_watch.traits import Profile
from sidecar.conditions import Condition
from sidecar.lines import Line, project_of
from sidecar.routing.table import RoutingTable
from sidecar.store.models import Base, ExchangeRow, FeedbackRow, GateComparisonRow, SignalRow


class Out(BaseModel):
    """A part of a reply, made of keywords, or of a record with the same fields by `model_validate`.
    JSON has no infinity: a number without end is damaged."""

    model_config = ConfigDict(from_attributes=True, allow_inf_nan=False)

    @classmethod
    def of_record(cls, record: Any, **more: Any) -> Self:
        """Make one of the fields of a record and of `more`, which has the others."""
        fields = {one: getattr(record, one) for one in cls.model_fields if one not in more}
        return cls(**fields, **more)


def columns(record: type, names: str = "", **others: Any) -> type[Out]:
    """Return the base of a reply that has these columns of a row, or fields of another record.

    names: a space between two; all fields if empty. others: types of fields that the record has of
    another type, or as a property.
    """
    hints = get_type_hints(record) | others
    if issubclass(record, Base):
        hints = {
            name: get_args(hint)[0] for name, hint in hints.items() if get_args(hint)
        }  # Mapped
    fields: dict[str, Any] = {one: (hints[one], ...) for one in names.split() or hints}
    return create_model(f"{record.__name__}Columns", __base__=Out, **fields)


class FeedbackOut(
    columns(  # type: ignore[misc]
        FeedbackRow,
        "feedback_id target_kind target source received_at score success reward cost done label "
        "comment",
    ),
    Out,
):
    """One piece of feedback, or one outcome."""

    counts: bool
    """It is the newest of its source on this target."""


class SignalOut(
    columns(  # type: ignore[misc]
        SignalRow, "kind exchange_id by_id at evidence"
    ),
    Out,
):
    """What the traffic itself tells of an answer."""


class TurnOut(
    columns(  # type: ignore[misc]
        ExchangeRow,
        "exchange_id started_at parent_id turn branch segment placed_by held_out adapter status "
        "outcome selection",
    ),
    Out,
):
    """One exchange of a session."""


class SessionOut(Out):
    """A page of a session's exchanges, the newest stored first, and what was told of it."""

    session_id: str
    exchanges: list[TurnOut]
    damaged: list[str]
    """Exchanges of this page that cannot be shown."""
    next_cursor: str | None
    """Value of `cursor` for the next page; null on the last page."""
    feedback: list[FeedbackOut]
    """Feedback on the session, its exchanges and its traces; the newest 1,000."""
    outcomes: list[FeedbackOut]
    signals: list[SignalOut]


class AliasOut(Out):
    alias: str
    adapter: str | None
    """Adapter name or "base"; null: it points nowhere."""
    generation: int


class GateJudgeOut(
    columns(  # type: ignore[misc]
        Examiner, "model rubric_hash passes own_judge own_rubric warning", warning=str
    ),
    Out,
):
    """The judge of the deployment gate, by the settings of control."""


class JudgeNoiseOut(
    columns(  # type: ignore[misc]
        NoiseState, "at judge_model rubric_hash project passes groups sd slope flips drift drift_at"
    ),
    Out,
):
    """The judge's noise, as the passes over each group show it. Score units; null: unknown."""


class UsersOut(columns(tallies.Users), Out):  # type: ignore[misc]
    """What users got of late: the line's requests among the newest 200 that are stored."""


class EstimateOut(columns(Estimate), Out):  # type: ignore[misc]
    """A mean difference of judged scores, -1..1, with the interval that holds at every look."""


class PointOut(columns(Point, gain=EstimateOut | None), Out):  # type: ignore[misc]
    """A promoted version."""


class RunningOut(columns(Running, difference=EstimateOut | None), Out):  # type: ignore[misc]
    """What the groups of the active canary say so far."""


class KindOut(columns(Kind, difference=EstimateOut), Out):  # type: ignore[misc]
    """How the champion compared with the one before it, on one kind of requests."""


class CostOut(
    columns(  # type: ignore[misc]
        Cost,
        "judge_tokens judge_usd candidate_tokens user_tokens candidate_share judge_usd_today "
        "candidate_tokens_today run_minutes",
        candidate_share=float | None,
    ),
    Out,
):
    """What learning has cost since the store was made: of all lines, the runs of this one."""


class ProgressOut(Out):
    """Whether the model got better, by what the gate and the ramp judged, and what that cost."""

    sentence: str
    """Whether it did, in words."""
    origin: str
    """The adapter that gains are over, the base as a rule; empty: nothing was promoted yet."""
    champion: str
    gain: EstimateOut | None
    """The champion's; null: it is the origin, or not known."""
    points: list[PointOut]
    """Promoted versions, the first promotion first; the newest 40."""
    kinds: list[KindOut]
    """The groups of the champion's promotion by kind of request; empty: all are of one kind, or
    none is stored any more."""
    running: RunningOut | None
    """The active canary; null: there is none."""
    pace: str
    """How long it takes at today's traffic; empty without one."""
    cost: CostOut | None
    """Null for a token of a project: judging is counted for all projects together."""
    cost_of_a_point: str
    """What 0.01 of gain has cost; empty unless the gain's interval is above 0."""


class StageOut(
    columns(  # type: ignore[misc]
        Stage, name=str, ended=dict[str, int], waiting=dict[str, int]
    ),
    Out,
):
    """One stage of the funnel, since the store was made.

    entered + unreported = passed + the sum of ended + the sum of waiting.
    """


class FunnelOut(Out):
    """Counts of records by stage, from request to adapter, since the store was made.

    They come from durable counters: rows that retention deletes stay counted.
    """

    stages: list[StageOut]
    """In the order in which a record comes through them."""
    exchanges: dict[str, int]
    """Number of exchanges by outcome of the selection."""
    groups: dict[str, int]
    """Number of groups by status."""
    groups_by_reason: dict[str, int]
    """Number of groups that were set aside or dropped, by reason."""
    runs: dict[str, int]
    canaries: dict[str, int]
    counters: dict[str, dict[str, int]]
    """Durable counts: stage -> reason -> count."""
    token_check: str
    """`on` when token ids are compared with the texts they belong to; else the reason why not."""


class RetentionOut(columns(RetentionState), Out):  # type: ignore[misc]
    """The size of the store and its oldest content, as ingest last saw it."""


class Problem(BaseModel):
    """An error as RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    allowed_actions: list[str] = Field(default_factory=list)
    """Actions that the present state allows; of a rollback or an alias, what it may name."""


class FindingOut(
    columns(  # type: ignore[misc]
        Finding, check=str, figures=dict[str, float]
    ),
    Out,
):
    """One breach that the reward watch found."""


class ProfileOut(Out):
    """What is known of one adapter's newest answers."""

    adapter: str
    answers: int
    shares: dict[str, float]
    """Kind of answer -> its share, 0..1."""
    mean_tokens: float | None
    """Geometric mean of completion tokens."""
    groups: int
    """Scored groups that tell of length."""
    length_correlation: float | None
    """Correlation of reward and log length within groups."""
    signals_share: float | None
    """Share of answers that the user corrected or asked for again."""
    feedback_mean: float | None

    @classmethod
    def known(cls, adapter: str, profile: Profile) -> ProfileOut:
        tokens, signals, told = profile.log_tokens, profile.signals, profile.feedback
        return cls(
            adapter=adapter,
            answers=profile.answers,
            shares={kind: one.hits / one.n for kind, one in profile.rates.items() if one.n},
            mean_tokens=None if tokens is None else math.expm1(min(tokens.mean, MOST_LOG)),
            groups=profile.groups,
            length_correlation=profile.correlation,
            signals_share=signals.hits / signals.n if signals is not None and signals.n else None,
            feedback_mean=None if told is None else told.mean,
        )


MOST_LOG = 100.0
"""No answer has so many tokens as e to this."""


class WatchOut(Out):
    """What the reward watch says of the champion."""

    champion: str
    held: bool
    """A finding that nobody waived holds the learner."""
    findings: list[FindingOut]
    waived: list[str]
    """Checks whose findings do not hold: an operator's override, or `watch.hold` is false."""
    unknown: dict[str, str]
    """Check -> why it could not be made."""
    adapters: list[ProfileOut]

    @classmethod
    def of(cls, answer: Answer) -> WatchOut:
        holding = {one.check for one in answer.holding}
        return cls(
            champion=answer.verdict.champion,
            held=bool(answer.holding),
            findings=[
                FindingOut.of_record(one, figures=dict(one.figures))
                for one in answer.verdict.findings
            ],
            waived=sorted(answer.verdict.checks - holding),
            unknown={str(check): why for check, why in answer.verdict.unknown.items()},
            adapters=[ProfileOut.known(name, one) for name, one in answer.profiles.items()],
        )


class RoutingOut(
    columns(  # type: ignore[misc]
        RoutingTable, "champion canary canary_weight_bp generation"
    ),
    Out,
):
    pass


# What a canary's decisions rest on, as the admin API shows it.


class MetricOut(
    columns(  # type: ignore[misc]
        MetricState,
        "name mode outcome value min max at why failures fails_at errors errs_at",
        name=str,
        **{one: get_type_hints(Check)[one] for one in ("outcome", "value", "at", "why")},
    ),
    Out,
):
    """A number from outside that a canary is held to."""

    # `outcome`, `value`, `at` and `why` are of the newest check.

    @classmethod
    def of(cls, name: str, state: MetricState) -> MetricOut | None:
        """None before the first check."""
        last = state.last
        if last is None:
            return None
        of_last = {one: getattr(last, one) for one in ("outcome", "value", "at", "why")}
        return cls.of_record(state, name=name, **of_last)


class ApprovalOut(columns(Approval), Out):  # type: ignore[misc]
    """A move that waits for the approval service, or did."""


class HookOut(
    columns(  # type: ignore[misc]
        HookState, "name tries next_at delivered dead told_at error", name=str, next_at=float | None
    ),
    Out,
):
    """A web hook."""

    @classmethod
    def of(cls, name: str, state: HookState) -> HookOut:
        return cls.of_record(state, name=name, next_at=state.next_at or None)


class ComparisonOut(
    columns(  # type: ignore[misc]
        GateComparisonRow,
        "comparison_id exchange_id status difference judge_model rubric_hash disagreement "
        "flipped_pairs place anchor_difference fault",
    ),
    Out,
):
    """One comparison of a canary."""

    answers: list[dict[str, Any]]


class EvidenceOut(Out):
    canary_id: str
    state: Phase
    evidence: dict[str, Any]
    comparisons_made: int
    """All of them; `comparisons` has the newest 200."""
    comparisons: list[ComparisonOut]


# Reply bodies of the status: the conditions, and the budgets.


class ConditionOut(Out):
    """The state of one part of the system: what needs a person first."""

    kind: str
    """What it is about: `judge`, `bus`, `verifier policy`."""
    project: str | None
    """Whose line of adapters it is about; null: the default line's, or all."""
    state: Literal["ok", "look", "act"]
    """`look`: it goes on, and a person should know; `act`: something is stopped or lost."""
    code: str
    message: str
    to_do: str
    since: float | None
    until: float | None
    """When it ends, or is tried again, by itself; null: not known."""
    at: float | None
    """When the process that observes it last wrote it; null: control found it just now."""
    data: dict[str, Any]
    """Figures and names."""

    @classmethod
    def of(cls, one: Condition) -> ConditionOut:
        return cls.of_record(
            one,
            project=project_of(one.line),
            since=one.since or None,
            at=one.at or None,
            data=dict(one.data),
        )


class BudgetOut(Out):
    """A budget that has a limit, in this day (UTC)."""

    setting: str
    what: str
    """What is counted: `candidate tokens`, `US dollars` or `tokens of judges`."""
    used: float
    """Amount spent; a judge's budget counts what calls in flight may cost too."""
    limit: float
    period: Literal["day"]


# What the status says of each line of adapters.


class LineOut(Out):
    """One line of adapters, in short; `GET /status?project=` has all of it."""

    name: str
    """What the names of its adapters begin with."""
    project: str | None
    """Whose line it is; null: the default line, which all other projects share."""
    champion: str
    canary: str | None
    """The candidate on canary; null: none is."""
    canary_phase: str | None
    canary_weight_bp: int
    canary_paused: bool = False
    learner_paused: bool


def line_out(session: Session, line: Line) -> LineOut:
    """Sum up a line of adapters."""
    canary = canaries.active(session, line.name)
    return LineOut(
        name=line.name,
        project=line.project,
        champion=versions.champion(session, line.name),
        canary=None if canary is None else canary.candidate,
        canary_phase=None if canary is None else canary.phase,
        canary_weight_bp=0 if canary is None else canary.weight_bp,
        canary_paused=canary is not None and canary.paused,
        learner_paused=switches.read(session, line.name).paused,
    )
