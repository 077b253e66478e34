"""GETs of the admin API for the present state: status, funnel, learner, adapters, canaries."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import structlog
from fastapi import APIRouter, Response
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.admin.auth import OwnProjects
from deploy.admin.context import AdminContext
from deploy.admin.models import (
    AdapterOut,
    CanaryOut,
    EngineOut,
    LearnerOut,
    Page,
    RehearsalsOut,
    StatusOut,
)
from deploy.admin.out import (
    BudgetOut,
    ComparisonOut,
    ConditionOut,
    EvidenceOut,
    FunnelOut,
    GateJudgeOut,
    HookOut,
    JudgeNoiseOut,
    Out,
    ProgressOut,
    RetentionOut,
    RoutingOut,
    StageOut,
    UsersOut,
    WatchOut,
    line_out,
)
from deploy.admin.paging import (
    ADAPTER_STATES,
    DEFAULT_LIMIT,
    Cursor,
    EveryVersion,
    Limit,
    Newest,
    OfProject,
    Project,
    new_router,
    refuse_unknown,
)
from deploy.admin.records import adapter_in, adapter_out, naming, page_of, read_learner, shown
from deploy.funnel import exchanges_by_selection, groups_by_reason, groups_by_status, read_funnel
from deploy.outside.telling import read_states
from deploy.records import Canary
from deploy.registry import (
    bans,
    canaries,
    routing_writer,
    switches as learner_switches,
    tallies,
    versions,
)
from deploy.registry.candidates import best_so_far, pace, sessions_a_day
from ingest.feedback.deriving import STAGE as FEEDBACK
from ingest.feedback.store import STAGE as SIGNAL
from ingest.judge_noise import read_noise_state
from ingest.judge_watch import NANO
from ingest.judges.spending import read_spending
from ingest.retention.sweep import read_state as read_retention
from ingest.reward_watch.store import ask
from ingest.sampling.round import read_sampled_today
from ingest.store.exchanges import opened_answers
from ingest.tasks.rehearsals import rehearsals_status
from ingest.tokens import FLAG as TOKEN_CHECK
from learner.schedule.rule import shown_cron
from sidecar.errors import SettingsError
from sidecar.records import BASE
from sidecar.settings import Learner
from sidecar.store.database import get_flag
from sidecar.store.models import AdapterRow, CanaryRow, GateComparisonRow, RunRow


def budgets(session: Session, context: AdminContext, now: float) -> list[BudgetOut]:
    """Return the budgets that have a limit, with what is used, those of sampling first.

    now: Unix seconds.
    """
    sampled, spending = read_sampled_today(session, now=now), read_spending(session, now=now)
    groups, judge = context.groups, context.judge
    every = (
        ("groups.tokens_per_day", "candidate tokens", sampled, groups.tokens_per_day),
        ("judge.budget", "US dollars", spending.nano_usd_today / NANO, judge.budget),
        ("judge.budget_tokens", "tokens of judges", spending.tokens_today, judge.budget_tokens),
    )
    return [
        BudgetOut(setting=setting, what=what, used=used, limit=limit, period="day")
        for setting, what, used, limit in every
        if limit
    ]


log = structlog.get_logger()
OutT = TypeVar("OutT", bound=Out)
SHOWN_COMPARISONS = 200
"""Newest comparisons of a canary in one reply: a ramp has hundreds, with all answers."""


def read_router(context: AdminContext) -> APIRouter:
    """Return the router of the GETs for the present state."""
    router = new_router()
    _add_overview(router, context)
    _add_adapters(router, context)
    _add_canaries(router, context)
    return router


def _add_overview(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    @router.get("/status")
    def status(own: OwnProjects, project: Project = None) -> StatusOut:
        model = context.line_of(project)
        with database.read() as session:
            aliases = versions.aliases_of(session, model)
            canary = canaries.active(session, model)
            funnel, now = read_funnel(session, model), context.clock()
            found = StatusOut(
                model=context.model,
                project=project,
                lines=[line_out(session, line) for line in context.lines],
                champion=aliases.get("champion", BASE),
                previous=aliases.get("previous", BASE),
                routing=_known(RoutingOut, routing_writer.current(session, model)),
                canary=_canary(canary, context),
                queued=_canary(canaries.queued(session, model), context),
                pace=_pace(session, context, project, canary, now),
                best=best_so_far(
                    session,
                    model,
                    aliases.get("champion", BASE),
                    aliases.get("anchor", BASE),
                    asked=context.rules.promote_on != "quick",
                ),
                better=context.progress.sentence(session, model),
                learner=read_learner(session, model),
                by_hand=context.learner.schedule == "manual",
                cron_times=_cron_times(context.learner, now),
                engine=EngineOut.of_all(context.engine),
                conditions=list(map(ConditionOut.of, context.conditions(session, model, now))),
                adapters=_tally(session, AdapterRow.state, AdapterRow.model == model),
                groups=groups_by_status(funnel.stages),
                exchanges=tallies.exchanges(session),
                users=_known(UsersOut, tallies.users(session, context.whole_line(project))),
                feedback=tallies.of_stage(session, FEEDBACK),
                signals=tallies.of_stage(session, SIGNAL),
                gate_judge=_known(GateJudgeOut, context.examiner),
                judge_noise=_known(JudgeNoiseOut, read_noise_state(session)),
                hooks=[
                    HookOut.of(name, state)
                    for name, state in read_states(session, context.hooks).items()
                ],
                budgets=budgets(session, context, now),
                rehearsals=_known(
                    RehearsalsOut, rehearsals_status(session, context.rehearsals, now=now)
                ),
                retention=_known(RetentionOut, read_retention(session)),
                token_check=_token_check(session),
            )
        return found.only(own) if own else found

    @router.get("/funnel")
    def funnel(project: Project = None) -> FunnelOut:
        model = context.line_of(project)
        with database.read() as session:
            found = read_funnel(session, model)
            return FunnelOut(
                stages=[StageOut.model_validate(stage) for stage in found.stages],
                exchanges=exchanges_by_selection(found.stages),
                groups=groups_by_status(found.stages),
                groups_by_reason=groups_by_reason(found.stages),
                runs=_tally(session, RunRow.status, RunRow.model == model),
                canaries=_tally(session, CanaryRow.state, CanaryRow.model == model),
                counters=found.counters,
                token_check=_token_check(session),
            )

    @router.get("/progress")
    def progress(own: OwnProjects, project: Project = None) -> ProgressOut:
        """Whether the model got better, by version, and what it cost."""
        model = context.line_of(project)
        with database.read() as session:
            now, active = context.clock(), canaries.active(session, model)
            found = context.progress.read(session, model, context.rules, now=now)
            pace = _pace(session, context, project, active, now)
            less = {"cost": None, "cost_of_a_point": ""} if own else {}  # the judges' is of all
            return ProgressOut.of_record(found, pace=pace, **less)

    @router.get("/watch")
    def watch(project: Project = None) -> WatchOut:
        """What the reward watch says of the champion, and what is known of each adapter."""
        model = context.line_of(project)
        with database.read() as session:
            return WatchOut.of(ask(session, model, context.watch))

    @router.get("/learner")
    def learner(response: Response, project: Project = None) -> LearnerOut:
        model = context.line_of(project)
        with database.read() as session:
            response.headers["etag"] = learner_switches.read(session, model).etag
            return read_learner(session, model)


def _add_adapters(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    @router.get("/adapters")
    def adapters(
        limit: EveryVersion = DEFAULT_LIMIT,
        cursor: Cursor = None,
        state: str | None = None,
        project: Project = None,
    ) -> Page[AdapterOut]:
        model = context.line_of(project)
        statement = select(AdapterRow).where(AdapterRow.model == model)
        if state is not None:
            refuse_unknown("state", state, ADAPTER_STATES)
            statement = statement.where(AdapterRow.state == state)
        newest = Newest("adapters", {AdapterRow.version: int}, limit, cursor)
        with database.read() as session:
            aliases = versions.aliases_of(session, model)
            rows = session.scalars(newest.select(statement)).all()
            banned = bans.reasons(session, model)
        loaded = context.loaded()
        return page_of(
            rows,
            newest,
            show=lambda row: AdapterOut.of(versions.to_version(row), aliases, loaded, banned),
            name="adapter {0.name}",
        )

    @router.get("/adapters/{version}")
    def adapter(version: str, project: Project = None) -> AdapterOut:
        model = context.line_of(project)
        with database.read() as session:
            name = adapter_in(session, model, version)
            with naming(f"adapter {name}"):
                return adapter_out(session, model, name, context.loaded())


def _add_canaries(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    @router.get("/canaries")
    def list_canaries(
        limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None, project: Project = None
    ) -> Page[CanaryOut]:
        statement = select(CanaryRow).where(CanaryRow.model == context.line_of(project))
        key = {CanaryRow.created_at: float, CanaryRow.canary_id: str}
        newest = Newest("canaries", key, limit, cursor)
        with database.read() as session:
            rows = session.scalars(newest.select(statement)).all()
        return page_of(
            rows,
            newest,
            show=lambda row: CanaryOut.of(canaries.to_canary(row), context.rules),
            name="canary {0.canary_id}",
        )

    @router.get("/canaries/{canary_id}")
    def read_canary(canary_id: str, response: Response, project: OfProject = None) -> CanaryOut:
        with database.read() as session:
            canary = canaries.to_canary(context.canary_row(session, canary_id, project))
        response.headers["etag"] = canaries.etag(canary)
        with naming(f"canary {canary_id}"):
            return CanaryOut.of(canary, context.rules)

    @router.get("/canaries/{canary_id}/evidence")
    def evidence(canary_id: str, project: OfProject = None) -> EvidenceOut:
        with database.read() as session:
            row = context.canary_row(session, canary_id, project)
            of_canary = GateComparisonRow.canary_id == canary_id
            made = session.scalars(
                select(GateComparisonRow)
                .where(of_canary)
                .order_by(GateComparisonRow.place.desc(), GateComparisonRow.comparison_id)
                .limit(SHOWN_COMPARISONS)
            )
            every = session.scalar(select(func.count()).where(of_canary)) or 0
            with naming(f"the evidence of canary {canary_id}"):
                return EvidenceOut(
                    canary_id=canary_id,
                    state=canaries.to_canary(row).phase,
                    evidence=row.evidence,
                    comparisons_made=every,
                    comparisons=[
                        ComparisonOut.of_record(one, answers=opened_answers(session, one))
                        for one in made
                    ],
                )


def _pace(
    session: Session, context: AdminContext, project: str | None, canary: Canary | None, now: float
) -> str:
    row = None if canary is None else session.get(CanaryRow, canary.canary_id)
    if canary is None or row is None:
        return ""
    a_day = sessions_a_day(session, context.whole_line(project), now)
    return pace(canary, row.evidence, context.rules, a_day)


def _cron_times(learner: Learner, now: float) -> str:
    with suppress(SettingsError):  # `sidecar doctor` tells of a line that cannot be read
        return shown_cron(learner, now)
    return ""


def _canary(canary: Canary | None, context: AdminContext) -> CanaryOut | None:
    if canary is None:
        return None
    return shown(f"canary {canary.canary_id}", lambda: CanaryOut.of(canary, context.rules))


def _known(kind: type[OutT], record: object | None) -> OutT | None:
    return None if record is None else kind.model_validate(record)


def _token_check(session: Session) -> str:
    return get_flag(session, TOKEN_CHECK) or "off: ingest has not run yet"


def _tally(session: Session, column: Any, *where: Any) -> dict[str, int]:
    rows = session.execute(select(column, func.count()).where(*where).group_by(column))
    return {str(value): number for value, number in rows}
