"""Reply bodies of the admin API: canaries, conditions, budgets and lines of adapters."""

from __future__ import annotations

import math
from typing import Any, Literal, Self, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from sqlalchemy.orm import Session

from deploy.evidence.live import Answer as ApprovalAnswer, MetricState, Mode, Outcome, Stage
from deploy.outside.telling import HookState
from deploy.records import Phase
from deploy.registry import canaries, switches, versions
from ingest.reward_watch.store import Answer
from ingest.reward_watch.traits import Profile
from sidecar.conditions import Condition
from sidecar.lines import Line, project_of
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


def columns(row: type[Base], names: str) -> type[Out]:
    """Return the base of a reply that has these columns of a row. names: a space between two."""
    hints = get_type_hints(row)  # Mapped[...]
    fields: dict[str, Any] = {one: (get_args(hints[one])[0], ...) for one in names.split()}
    return create_model(f"{row.__name__}Columns", __base__=Out, **fields)


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


class GateJudgeOut(Out):
    """The judge of the deployment gate, by the settings of control."""

    model: str
    """Empty: there is none, and the gate waits."""
    rubric_hash: str
    passes: int
    own_judge: bool
    """True when another judge gives the reward."""
    own_rubric: bool
    """True when the reward of every project is given by another rubric."""
    warning: str
    """Says that the reward marks its own exam; empty when it does not."""


class JudgeNoiseOut(Out):
    """The judge's noise, as the passes over each group show it. Score units; null: unknown."""

    at: float  # when score last wrote this, unix seconds
    judge_model: str
    rubric_hash: str
    project: str  # whose rubric it is; empty: judge.rubric
    passes: int
    groups: int
    """Groups that the figures come from: the newest."""
    sd: float | None
    """Standard deviation of the noise of an answer's score, the mean over `passes`."""
    slope: float | None
    """What the last position shown gets above the first."""
    flips: float | None
    """Share of the pairs of answers that two passes put in opposite order."""
    drift: str
    """How the judge differs from what it was; empty: it does not."""
    drift_at: float | None


class UsersOut(Out):
    """What users got of late: the line's requests among the newest 200 that are stored."""

    requests: int
    failed: int
    since: float | None
    first_byte_s: float | None
    """Median; null: not known."""
    first_byte_slow_s: float | None
    """90th percentile."""


class EstimateOut(Out):
    """A mean difference of judged scores, -1..1, with the interval that holds at every look."""

    mean: float
    low: float
    high: float
    groups: int
    """Comparisons that it rests on."""


class PointOut(Out):
    """A promoted version."""

    adapter: str
    promoted_at: float
    gain: EstimateOut | None
    """Over the origin; null: it was not compared with it, nor with a version that was."""
    links: int
    """Comparisons that the gain is the sum of."""


class RunningOut(Out):
    """What the groups of the active canary say so far."""

    adapter: str
    champion: str
    difference: EstimateOut | None
    """To the champion; null: nothing is judged yet."""
    evidence: float | None
    """E-value of what a promotion lacks most; null: it waits for no proof."""
    wanted: float | None
    """E-value that proves it."""


class KindOut(Out):
    """How the champion compared with the one before it, on one kind of requests."""

    name: str
    """`openings` of sessions, `later turns`, or `project NAME`."""
    difference: EstimateOut


class CostOut(Out):
    """What learning has cost since the store was made: of all lines, the runs of this one."""

    judge_tokens: int
    judge_usd: float
    """By known prices."""
    candidate_tokens: int
    user_tokens: int
    candidate_share: float | None
    """Candidates' tokens by those that users got; null while there are none."""
    judge_usd_today: float
    candidate_tokens_today: int
    run_minutes: float
    """Time of the training runs."""


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
    cost: CostOut
    cost_of_a_point: str
    """What 0.01 of gain has cost; empty unless the gain's interval is above 0."""


class StageOut(Out):
    """One stage of the funnel, since the store was made.

    entered + unreported = passed + the sum of ended + the sum of waiting.
    """

    name: str
    unit: str
    """What is counted: requests, exchanges, groups or adapters."""
    passed_as: str
    """What a record is called that passed."""
    entered: int
    passed: int
    """Records that went on to the next stage."""
    ended: dict[str, int]
    """Records that go no further, by reason."""
    waiting: dict[str, int]
    """Records still in the stage, by state."""
    unreported: int
    """Records that left the stage without having been counted as they entered it: a process that
    is killed takes its last seconds of counts along."""


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


class RetentionOut(Out):
    """The size of the store and its oldest content, as ingest last saw it."""

    at: float
    """When that was, unix seconds."""
    used_bytes: int
    free_bytes: int
    """Bytes of SQLite's file that the next records use; 0 with PostgreSQL."""
    max_bytes: int
    """`retention.max_bytes`; 0: no limit."""
    oldest_at: float | None
    """When the oldest exchange was stored, unix seconds; null: there is none."""


class Problem(BaseModel):
    """An error as RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    allowed_actions: list[str] = Field(default_factory=list)
    """Actions that the present state allows; of a rollback or an alias, what it may name."""


class FindingOut(Out):
    """One breach that the reward watch found."""

    check: str
    reference: str
    """The adapter that the champion is compared with; "": none."""
    text: str
    figures: dict[str, float]


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


class RoutingOut(Out):
    champion: str
    canary: str | None
    canary_weight_bp: int
    generation: int


# What a canary's decisions rest on, as the admin API shows it.


class MetricOut(Out):
    """A number from outside that a canary is held to."""

    name: str
    mode: Mode
    outcome: Outcome
    """How the newest check ended. `error`: the provider gave no answer; `no_data`: it has none."""
    value: float | None
    min: float | None
    max: float | None
    at: float
    why: str
    failures: int
    """Failing checks in a row; at `fails_at` a guardrail rolls back and a signal holds."""
    fails_at: int
    errors: int
    """Errors in a row; at `errs_at` the ramp stands."""
    errs_at: int

    @classmethod
    def of(cls, name: str, state: MetricState) -> MetricOut | None:
        """None before the first check."""
        last = state.last
        if last is None:
            return None
        of_last = {one: getattr(last, one) for one in ("outcome", "value", "at", "why")}
        return cls.of_record(state, name=name, **of_last)


class ApprovalOut(Out):
    """A move that waits for the approval service, or did."""

    before: Stage
    since: float
    answer: ApprovalAnswer
    """`asked`: none yet; `error`: it could not be asked, or its answer was none."""
    reason: str
    at: float
    """When it last answered or failed to; 0: not yet."""
    asked: int
    """Calls so far."""


class HookOut(Out):
    """A web hook."""

    name: str
    tries: int
    """Tries of the next event that failed; 0: it works, or nothing has happened."""
    next_at: float | None
    """When it is tried again; null: at the next event."""
    delivered: int
    dead: int
    """Events that were given up: too many tries, or too old."""
    told_at: float | None
    error: str

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
        return cls(
            kind=one.kind,
            project=project_of(one.line),
            state=one.state,
            code=one.code,
            message=one.message,
            to_do=one.to_do,
            since=one.since or None,
            until=one.until,
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
