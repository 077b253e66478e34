"""Request and reply bodies of the admin API: deploy's records as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, Generic, Self, TypeVar

from pydantic import BaseModel, Field

from deploy.admin.out import (
    ApprovalOut,
    BudgetOut,
    ConditionOut,
    FeedbackOut,
    GateJudgeOut,
    HookOut,
    JudgeNoiseOut,
    LineOut,
    MetricOut,
    Out,
    RetentionOut,
    RoutingOut,
    SignalOut,
    UsersOut,
    columns,
)
from deploy.engine.reconcile import EngineView
from deploy.records import AdapterVersion, Canary, Phase
from deploy.registry import transitions
from deploy.registry.audit import Subject
from deploy.registry.canary_rule import step_least_s
from sidecar.lines import line_of_adapter, project_of
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import (
    AnswerRow,
    AuditRow,
    ExchangeRow,
    GroupRow,
    RunRow,
    TaskGroupRow,
    TaskMemberRow,
)

# What the status says of vLLM: the adapters of all lines that its replicas have loaded.


class ReplicaOut(Out):
    """One vLLM replica."""

    away: str | None
    """Reason why it is unreachable; null when it is reachable."""
    loaded: list[str]
    refused: dict[str, str]
    """Wanted adapters that it refuses -> reason."""

    @classmethod
    def of(cls, view: EngineView, **more: Any) -> Self:
        return cls(away=view.away, loaded=sorted(view.loaded), refused=dict(view.refused), **more)


class EngineOut(ReplicaOut):
    """All vLLM replicas together."""

    replicas: dict[str, ReplicaOut]
    """Replicas by base URL."""

    @classmethod
    def of_all(cls, view: EngineView) -> Self:
        """`away` is why no replica is reachable; `loaded`, what every reachable one has."""
        replicas = {url: ReplicaOut.of(one) for url, one in view.replicas.items()}
        return cls.of(view, replicas=replicas)


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """One page of a listing, the newest item first."""

    items: list[T]
    next_cursor: str | None = None
    """Value of `cursor` for the next page; null on the last page."""
    damaged: list[str] = Field(default_factory=list)
    """Rows of this page that cannot be shown, each with its columns and what is wrong there."""


class AdapterOut(
    columns(  # type: ignore[misc]
        AdapterVersion,
        "name version state reason digest path parent run_id created_at forgotten_at removed_at",
    ),
    Out,
):
    aliases: list[str]
    banned: str | None
    """Why its files are banned; null: they are not."""
    loaded: bool | None
    """True if every reachable vLLM had it loaded at the last check; null: none is reachable."""

    @classmethod
    def of(
        cls,
        version: AdapterVersion,
        aliases: dict[str, str],
        loaded: frozenset[str] | None,
        banned: Mapping[str, str],
    ) -> AdapterOut:
        """banned: digest -> why."""
        return cls.of_record(
            version,
            aliases=sorted(alias for alias, name in aliases.items() if name == version.name),
            banned=banned.get(version.digest),
            loaded=None if loaded is None else version.name in loaded,
        )


class CanaryOut(Out):
    """A canary. Its ETag is `"g<generation>"`."""

    canary_id: str
    candidate: str
    champion: str
    state: Phase
    paused: bool
    reason: str | None
    step: int
    steps: list[int]
    """Traffic weights of the ramp's steps, in basis points."""
    weight_bp: int
    """Share of sessions routed to the candidate now, in basis points."""
    created_at: float
    step_started_at: float
    next_step_earliest_at: float | None
    """Earliest end of the step, in Unix seconds; null unless ramping with its clock running."""
    ended_at: float | None
    step_waived: bool = False
    """An operator waived what this step must last and see; control ends it at its next look."""
    approval: ApprovalOut | None = None
    """What the approval service says; null: no move waits for it."""
    metrics: list[MetricOut] = Field(default_factory=list)
    """Numbers from outside as they were last checked; the evidence has the newest 20 checks."""
    gate_judges: list[str] = Field(default_factory=list)
    """Judge models and rubric hashes that scored its gate so far."""
    told: list[str] = Field(default_factory=list)
    """What clients told of both arms: outcomes, and feedback."""
    judge_gives_reward: bool | None = None
    """True when the gate's judge also scored what the candidate learned from; null: no gate yet."""
    generation: int
    allowed_actions: list[str]

    @classmethod
    def of(cls, canary: Canary, rules: CanarySettings) -> CanaryOut:
        running = canary.phase == "ramping" and canary.stopped_at is None
        least_s = 0.0 if canary.step_waived else step_least_s(rules)
        earliest = canary.step_started_at + canary.stopped_s + least_s
        return cls.of_record(
            canary,
            state=canary.phase,
            steps=list(canary.steps),
            next_step_earliest_at=earliest if running else None,
            approval=None
            if canary.approval is None
            else ApprovalOut.model_validate(canary.approval),
            metrics=[
                shown
                for name, state in canary.metrics.items()
                if (shown := MetricOut.of(name, state)) is not None
            ],
            gate_judges=list(canary.gate_judges),
            told=list(canary.told),
            allowed_actions=transitions.allowed_actions(canary),
        )


class GroupOut(
    columns(  # type: ignore[misc]
        GroupRow,
        "group_id exchange_id session_key session_id project adapter status reason detail "
        "judge_attempts learn_attempts created_at scored_at judge_model rubric_hash "
        "disagreement flipped_pairs run_id",
    ),
    Out,
):
    pass


class AnswerOut(
    columns(  # type: ignore[misc]
        AnswerRow,
        "index origin finish_reason temperature untrainable_reason score disagreement "
        "independent_reward reward",
    ),
    Out,
):
    message: dict[str, Any]
    tokens: int
    explanation: str | None
    checks: list[dict[str, Any]]
    """What each verifier found: name, version, score, why, error."""


class GroupDetailOut(GroupOut):
    reward_rule: dict[str, Any] | None
    """How rewards were made; null: they are the judge's scores."""
    propensity: float | None
    """Probability with which its exchange was drawn, 0..1; null: an older group."""
    chosen_because: dict[str, Any] | None
    """`reason`, and the `features` behind the probability; null: an older group."""
    answers: list[AnswerOut]
    request: dict[str, Any] | None
    """What was asked; null: its exchange is not stored any more, or cannot be read."""


class TaskGroupOut(
    columns(  # type: ignore[misc]
        TaskGroupRow,
        "group_id project key_kind key adapter status reason detail created_at scored_at "
        "judge_attempts judge_model rubric_hash run_id learn_attempts",
    ),
    Out,
):
    pass


class TaskMemberOut(
    columns(  # type: ignore[misc]
        TaskMemberRow, "session_id place began_at over_at reward source exchange_ids"
    ),
    Out,
):
    pass


class TaskGroupDetailOut(TaskGroupOut):
    members: list[TaskMemberOut]
    """Its sessions, without what was said; those that were deleted are missing."""


class RunOut(
    columns(  # type: ignore[misc]
        RunRow,
        "run_id status reason started_at heartbeat_at ended_at parent adapter settings counts "
        "metrics held deaths progress",
    ),
    Out,
):
    pass


class RunStepOut(Out):
    """One optimiser step of a run."""

    step: int
    at: float
    """When it was done."""
    figures: dict[str, Any]
    """As the data dictionary has them under "One optimiser step"."""


class RunDetailOut(RunOut):
    steps: list[RunStepOut]
    """The steps that are done, the newest 2,000; of a run that failed, those before it did."""
    damaged: list[str]
    """Steps that cannot be shown."""


class ChoiceOut(Out):
    index: int
    message: dict[str, Any]
    finish_reason: str | None
    tokens: int


class ExchangeOut(
    columns(  # type: ignore[misc]
        ExchangeRow,
        "exchange_id started_at surface adapter arm propensity replica session_key session_id "
        "parent_id turn branch segment placed_by held_out selection status outcome stream "
        "untrainable_reason completion_tokens returned_index sampling timings trace_id project "
        "key_id turn_id retry_count request_bytes reply_bytes fallback_from",
    ),
    Out,
):
    prompt_tokens: int
    group_id: str | None
    feedback: list[FeedbackOut]
    """Feedback on the exchange, its trace and its session."""
    outcomes: list[FeedbackOut]
    signals: list[SignalOut]
    request: dict[str, Any]
    choices: list[ChoiceOut]


class AuditOut(
    columns(  # type: ignore[misc]
        AuditRow, "seq at actor source request_id action subject before after reason"
    ),
    Out,
):
    project: str | None = None
    """Whose line of adapters it is about; null: the default line, or none."""
    candidate: str | None = None
    """The adapter that the canary tries; null: it is about no canary."""

    @classmethod
    def of(cls, row: AuditRow, about: Subject) -> AuditOut:
        return cls.of_record(row, project=about.project, candidate=about.candidate)


class ScheduleOut(Out):
    kind: str
    why: str  # a run started, or none starts now; told at least every minute
    at: float
    again_at: float | None = None  # when the hold after the last run ends; null: none holds


class LearnerOut(Out):
    """The learner's switches and newest run. Its ETag changes with every switch."""

    paused: bool
    run_requested: bool
    last_run: RunOut | None
    allowed_actions: list[str]
    next_run_at: float | None = None  # null where the schedule has no times
    schedule: ScheduleOut | None = None  # null until the learner has decided


class RehearsedOut(Out):
    """Attempts at one recorded task, the newest."""

    task: str
    project: str
    adapter: str
    at: float
    attempts: int
    results: dict[str, int]
    """`ended`: they count; others by the reason."""
    outcomes: list[float]
    spread: float | None
    tokens: int
    detail: str | None


class RehearsalsOut(Out):
    """Rehearsals of today (UTC)."""

    attempts_today: int
    tokens_left: int
    last: RehearsedOut | None


class StatusOut(Out):
    """The serving adapters, the active canary and the learner of one line of adapters.

    A token of a project gets its own lines, and nothing that is of the whole installation.
    """

    model: str
    project: str | None = None
    """Whose line of adapters it is; null: the default line."""
    lines: list[LineOut] = Field(default_factory=list)
    """All lines, the default one first."""
    champion: str
    previous: str
    routing: RoutingOut | None
    canary: CanaryOut | None
    queued: CanaryOut | None = None
    """The canary that begins when this one has ended; null: none waits."""
    pace: str = ""
    """How long the active canary takes at today's traffic; empty without one."""
    best: str = ""
    """How far the champion is from the best so far, the anchor; empty while the base is both."""
    better: str = ""
    """Whether the model got better, in words; `GET /progress` has the figures."""
    learner: LearnerOut
    by_hand: bool = False
    """The learner runs when it is asked to: `learner.schedule` is `manual`."""
    cron_times: str = ""
    """The next three times of `learner.cron`, in its zone; empty under another schedule."""
    engine: EngineOut
    users: UsersOut | None = None
    """What users got of late."""
    conditions: list[ConditionOut] = Field(default_factory=list)
    """The state of every part, what needs a person first."""
    adapters: dict[str, int]
    """Number of versions by state."""
    groups: dict[str, int]
    """Number of groups by status."""
    exchanges: int | None
    """Null for a token of a project."""
    feedback: dict[str, int]
    """Feedback and outcomes: what became of them, as the counter of this stage."""
    signals: dict[str, int]
    """Implicit signals by kind."""
    retention: RetentionOut | None = None
    gate_judge: GateJudgeOut | None = None
    judge_noise: JudgeNoiseOut | None = None
    """How far the judge's scores can be trusted; null when no score process has run."""
    hooks: list[HookOut] = Field(default_factory=list)
    """Empty when the settings name none."""
    rehearsals: RehearsalsOut | None = None
    """Null when nothing is rehearsed."""
    budgets: list[BudgetOut] = Field(default_factory=list)
    """The budgets of sampling and of judges, by the settings of control."""
    token_check: str
    """`on` when token ids are compared with the texts they belong to; else the reason why not."""

    def only(self, projects: Collection[str]) -> Self:
        """Return what is of these projects: the fields in `_OF_A_LINE`, and parts of a few others.

        A field that neither names stays empty, so a new one is not shown by mistake.
        """
        own = [one for one in self.engine.loaded if project_of(line_of_adapter(one)) in projects]
        away = self.engine.away and NO_VLLM
        return type(self)(
            **{name: getattr(self, name) for name in _OF_A_LINE},
            lines=[one for one in self.lines if one.project in projects],
            conditions=[one for one in self.conditions if one.project in projects],
            engine=EngineOut(away=away, loaded=own, refused={}, replicas={}),
            **{"groups": {}, "exchanges": None, "feedback": {}, "signals": {}, "token_check": ""},
        )


NO_VLLM: Final = "no vLLM answers"
"""Why vLLM is away, for callers who may not read its addresses."""
_OF_A_LINE: Final = (
    "model", "project", "champion", "previous", "routing", "canary", "queued", "pace", "best",
    "better", "learner", "by_hand", "cron_times", "users", "adapters",
)  # fmt: skip
"""Fields of `StatusOut` that are of one line of adapters, or tell nothing of others' traffic."""
