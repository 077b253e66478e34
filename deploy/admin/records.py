"""GETs of the admin API for records: groups, runs, exchanges, the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from fastapi import APIRouter
from pydantic import ValidationError
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.admin.context import AdminContext
from deploy.admin.models import (
    AdapterOut,
    AnswerOut,
    AuditOut,
    ChoiceOut,
    ExchangeOut,
    GroupDetailOut,
    GroupOut,
    LearnerOut,
    Page,
    RunDetailOut,
    RunOut,
    RunStepOut,
    ScheduleOut,
    TaskGroupDetailOut,
    TaskGroupOut,
    TaskMemberOut,
)
from deploy.admin.out import FeedbackOut, SessionOut, SignalOut, TurnOut
from deploy.admin.paging import (
    DEFAULT_LIMIT,
    GROUP_STATUSES,
    TASK_STATUSES,
    Cursor,
    Limit,
    Newest,
    OfProject,
    Project,
    new_router,
    refuse_unknown,
)
from deploy.admin.wire import read_stored
from deploy.errors import DamagedRecordError, UnknownAdapterError, UnknownRecordError
from deploy.registry import bans, switches as learner_switches, versions
from deploy.registry.audit import subjects_of
from ingest.feedback.store import Annotations, annotations_of, annotations_of_session
from ingest.grouping.features import load_choice
from ingest.store.groups import opened_checks, opened_explanation, read_rule
from ingest.store.sessions import stored_name
from ingest.tasks.grouping import members_of
from learner.schedule.loop import SCHEDULE
from sidecar import conditions
from sidecar.lines import public_model
from sidecar.records import BASE
from sidecar.store.codec import unpack_ids
from sidecar.store.contents import load_contents, opened_reply
from sidecar.store.database import DAMAGE, decompress
from sidecar.store.models import (
    AnswerRow,
    AuditRow,
    ChoiceRow,
    ExchangeRow,
    GroupRow,
    RunRow,
    RunStepRow,
    ScheduleJobRow,
    TaskGroupRow,
)
from sidecar.store.tables import of_line

log = structlog.get_logger()
Row = TypeVar("Row")
OutT = TypeVar("OutT")
MOST_STEPS = 2_000
"""Steps of a run that are shown."""
_NO_EXCHANGE = "no exchange {}; ingest stores it a little later"


def record_router(context: AdminContext) -> APIRouter:
    """Return the router of the GETs for records."""
    router = new_router()
    _add_groups(router, context)
    _add_task_groups(router, context)
    _add_history(router, context)
    _add_sessions(router, context)
    return router


def _add_groups(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    @router.get("/groups")
    def groups(
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
        status: str | None = None,
        reason: str | None = None,
        project: OfProject = None,
    ) -> Page[GroupOut]:
        statement = select(GroupRow)
        if project is not None:
            line = context.whole_line(project)
            of_exchange = ExchangeRow.exchange_id == GroupRow.exchange_id
            # Groups of best-of-N requests and of older versions have no project of their own.
            of_group = func.coalesce(GroupRow.project, ExchangeRow.project)
            statement = statement.outerjoin(ExchangeRow, of_exchange).where(of_line(of_group, line))
        if status is not None:
            refuse_unknown("status", status, GROUP_STATUSES)
            statement = statement.where(GroupRow.status == status)
        if reason is not None:
            statement = statement.where(GroupRow.reason == reason)
        newest = Newest("groups", {GroupRow.seq: int}, limit, cursor)
        with database.read() as session:
            rows = session.scalars(newest.select(statement)).all()
        return page_of(rows, newest, show=GroupOut.of_record, name="group {0.group_id}")

    @router.get("/groups/{group_id}")
    def group(group_id: str, project: OfProject = None) -> GroupDetailOut:
        with database.read() as session:
            row = session.scalar(select(GroupRow).where(GroupRow.group_id == group_id))
            its, asked_by = select(ExchangeRow.project), None
            if project is not None and row is not None:
                its = its.where(ExchangeRow.exchange_id == row.exchange_id)
                asked_by = row.project or session.scalar(its)
            _check_line(context, project, asked_by, f"no group {group_id}")
            if row is None:
                raise UnknownRecordError(f"no group {group_id}")
            answers = session.scalars(
                select(AnswerRow).where(AnswerRow.group_id == group_id).order_by(AnswerRow.index)
            )
            with naming(f"group {group_id}"):
                return GroupDetailOut.of_record(
                    row,
                    reward_rule=read_rule(row),
                    chosen_because=load_choice(row.chosen_because),
                    answers=[_answer(session, one) for one in answers],
                    request=_asked(session, row.exchange_id),
                )


def _add_task_groups(router: APIRouter, context: AdminContext) -> None:
    database, row = context.database, TaskGroupRow

    @router.get("/task-groups")
    def task_groups(
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
        status: str | None = None,
        project: OfProject = None,
    ) -> Page[TaskGroupOut]:
        """Groups of whole sessions."""
        statement = select(row)
        if project is not None:
            line = context.whole_line(project)
            statement = statement.where(of_line(row.project, line))
        if status is not None:
            refuse_unknown("status", status, TASK_STATUSES)
            statement = statement.where(row.status == status)
        newest = Newest("task-groups", {row.seq: int}, limit, cursor)
        with database.read() as session:
            rows = session.scalars(newest.select(statement)).all()
        return page_of(rows, newest, show=TaskGroupOut.of_record, name="task group {0.group_id}")

    @router.get("/task-groups/{task_group_id}")
    def task_group(task_group_id: str, project: OfProject = None) -> TaskGroupDetailOut:
        """One group of whole sessions, with its sessions, without what was said."""
        with database.read() as session:
            found = session.scalar(select(row).where(row.group_id == task_group_id))
            unknown = f"no task group {task_group_id}"
            _check_line(context, project, found.project if found else None, unknown)
            if found is None:
                raise UnknownRecordError(unknown)
            with naming(f"task group {task_group_id}"):
                members = map(TaskMemberOut.of_record, members_of(session, task_group_id))
                return TaskGroupDetailOut.of_record(found, members=[*members])


def _add_history(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    @router.get("/runs")
    def runs(
        limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None, project: Project = None
    ) -> Page[RunOut]:
        statement = select(RunRow).where(RunRow.model == context.line_of(project))
        newest = Newest("runs", {RunRow.started_at: float, RunRow.run_id: str}, limit, cursor)
        with database.read() as session:
            rows = session.scalars(newest.select(statement)).all()
        return page_of(rows, newest, show=RunOut.of_record, name="run {0.run_id}")

    @router.get("/runs/{run_id}")
    def run(run_id: str, project: OfProject = None) -> RunDetailOut:
        """One run, with its steps."""
        steps = select(RunStepRow).where(RunStepRow.run_id == run_id)
        steps = steps.order_by(RunStepRow.step.desc()).limit(MOST_STEPS)
        line = context.line_of(project) if project is not None else None
        with database.read() as session, naming(f"run {run_id}"):
            row = _find_run(session, context.model, run_id, line)
            page = page_of(
                session.scalars(steps).all()[::-1],
                show=lambda row: RunStepOut(step=row.step, at=row.at, figures=row.body),
                name="step {0.step} of run {0.run_id}",
            )
            return RunDetailOut.of_record(row, steps=page.items, damaged=page.damaged)

    @router.get("/exchanges/{exchange_id}")
    def exchange(exchange_id: str, project: OfProject = None) -> ExchangeOut:
        its = select(ExchangeRow.project).where(ExchangeRow.exchange_id == exchange_id)
        with database.read() as session:
            if project is not None:
                _check_line(context, project, session.scalar(its), _NO_EXCHANGE.format(exchange_id))
            with naming(f"exchange {exchange_id}"):
                return _exchange(session, exchange_id)

    @router.get("/audit")
    def audit(limit: Limit = DEFAULT_LIMIT, cursor: Cursor = None) -> Page[AuditOut]:
        newest = Newest("audit", {AuditRow.seq: int}, limit, cursor)
        with database.read() as session:
            rows = session.scalars(newest.select(select(AuditRow))).all()
            subjects = subjects_of(session, rows)
        return page_of(
            rows, newest, show=lambda row: AuditOut.of(row, subjects[row.seq]), name="audit {0.seq}"
        )


def _add_sessions(router: APIRouter, context: AdminContext) -> None:
    database = context.database

    # A client may call its session `a/b`; `:path` takes the slash.
    @router.get("/sessions/{session_id:path}")
    def session_read(
        session_id: str,
        limit: Limit = DEFAULT_LIMIT,
        cursor: Cursor = None,
        project: OfProject = None,
    ) -> SessionOut:
        columns = [getattr(ExchangeRow, name) for name in TurnOut.model_fields]
        with database.read() as session:
            stored = stored_name(session, session_id)
            statement = select(ExchangeRow.seq, *columns).where(ExchangeRow.session_id == stored)
            if project is not None:
                line = context.whole_line(project)
                statement = statement.where(of_line(ExchangeRow.project, line))
            newest = Newest("session", {ExchangeRow.seq: int}, limit, cursor)
            rows = session.execute(newest.select(statement)).all()
            if not rows and (cursor is None or project is not None):
                raise UnknownRecordError(f"no session {session_id}; an exchange names its own")
            page = page_of(
                rows, newest, show=TurnOut.model_validate, name="exchange {0.exchange_id}"
            )
            with naming(f"what was told of session {stored}"):
                return SessionOut(
                    session_id=stored,
                    exchanges=page.items,
                    damaged=page.damaged,
                    next_cursor=page.next_cursor,
                    **_told(annotations_of_session(session, stored)),
                )


def _check_line(
    context: AdminContext, project: str | None, asked_by: str | None, unknown: str
) -> None:
    """Raises: UnknownRecordError for a record of another line than the one that is asked for.

    asked_by: the project of its requests. unknown: what is said of a record that does not exist, so
    that a token of one project cannot tell what others have.
    """
    if project is not None and not context.whole_line(project).has(asked_by or ""):
        raise UnknownRecordError(unknown)


def _told(notes: Annotations) -> dict[str, Any]:
    shown: dict[str, list[FeedbackOut]] = {"feedback": [], "outcome": []}
    for one in notes.feedback:
        shown.setdefault(one.kind, []).append(FeedbackOut.model_validate(one))
    return {
        "feedback": shown["feedback"],
        "outcomes": shown["outcome"],
        "signals": list(map(SignalOut.model_validate, notes.signals)),
    }


def page_of(
    rows: Sequence[Row], newest: Newest | None = None, *, show: Callable[[Row], OutT], name: str
) -> Page[OutT]:
    """Build a page of the rows that `newest` selected; of all rows without it.

    A damaged row is left out of the items and named in `damaged`, by `name`, a format of the row.
    """
    items: list[OutT] = []
    left_out: list[str] = []
    for row in rows if newest is None else rows[: newest.limit]:
        try:
            items.append(show(row))
        except DAMAGE as error:
            left_out.append(str(damaged(name.format(row), error)))
    following = None if newest is None else newest.following(rows)
    return Page(items=items, damaged=left_out, next_cursor=following)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn the error of a damaged row into one that names the row. Raises: DamagedRecordError."""
    try:
        yield
    except DAMAGE as error:
        raise damaged(name, error) from error


def damaged(name: str, error: Exception) -> DamagedRecordError:
    """Log a row that cannot be shown. The values themselves are not logged."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, ValidationError):
        why = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
    log.warning("admin_row_unreadable", row=name, why=why)
    return DamagedRecordError(f"{name} is damaged in the store: {why}")


def _asked(session: Session, exchange_id: str) -> dict[str, Any] | None:
    """Return the request of a group, which may be deleted, or damaged, before the group is."""
    try:
        found = load_contents(session, [exchange_id]).found.get(exchange_id)
    except DAMAGE as error:
        damaged(f"exchange {exchange_id}", error)  # logs it
        return None
    return None if found is None else read_stored(found.request)


def _answer(session: Session, row: AnswerRow) -> AnswerOut:
    return AnswerOut.of_record(
        row,
        **_reply(session, row),
        explanation=opened_explanation(session, row) or None,
        checks=[dict(one) for one in opened_checks(session, row)],
    )


def _reply(session: Session, row: AnswerRow | ChoiceRow) -> dict[str, Any]:
    """Return the message of a reply, and the number of its tokens."""
    return {
        "message": read_stored(decompress(opened_reply(session, row, "message_body"))),
        "tokens": len(unpack_ids(opened_reply(session, row, "token_ids"))),
    }


def _exchange(session: Session, exchange_id: str) -> ExchangeOut:
    row = session.scalar(select(ExchangeRow).where(ExchangeRow.exchange_id == exchange_id))
    if row is None:
        raise UnknownRecordError(_NO_EXCHANGE.format(exchange_id))
    choices = session.scalars(
        select(ChoiceRow).where(ChoiceRow.exchange_id == exchange_id).order_by(ChoiceRow.index)
    )
    group = select(GroupRow.group_id).where(GroupRow.exchange_id == exchange_id)
    content = load_contents(session, [exchange_id])[exchange_id]
    return ExchangeOut.of_record(
        row,
        prompt_tokens=len(unpack_ids(content.prompt_ids)),
        group_id=session.scalar(group),
        **_told(annotations_of(session, [exchange_id]).get(exchange_id, Annotations())),
        request=read_stored(content.request),
        choices=[ChoiceOut.of_record(one, **_reply(session, one)) for one in choices],
    )


def _find_run(session: Session, model: str, run_id: str, line: str | None) -> RunRow:
    """Raises: UnknownRecordError."""
    row = session.get(RunRow, run_id)
    if row is None or public_model(row.model) != model or line not in (None, row.model):
        raise UnknownRecordError(f"no run {run_id}; `sidecar runs ls` has them")
    return row


def adapter_in(session: Session, model: str, version: str) -> str:
    """Return the name of a version that is named. Raises: UnknownAdapterError."""
    name = versions.resolve(session, model, version)
    if name == BASE:
        raise UnknownAdapterError("the base model is no adapter version")
    return name


def adapter_out(
    session: Session, model: str, name: str, loaded: frozenset[str] | None
) -> AdapterOut:
    aliases, banned = versions.aliases_of(session, model), bans.reasons(session, model)
    return AdapterOut.of(versions.find(session, name), aliases, loaded, banned)


# What the status and `GET /learner` say of the learner in one line of adapters.


def read_learner(session: Session, model: str) -> LearnerOut:
    """Read the learner's switches and its newest run in a line; None for a run that is damaged.

    model: name of the line.
    """
    switches = learner_switches.read(session, model)
    newest = select(RunRow).where(RunRow.model == model).order_by(RunRow.started_at.desc())
    row = session.scalars(newest.limit(1)).first()
    schedule = conditions.read(session, SCHEDULE, model)
    return LearnerOut(
        paused=switches.paused,
        run_requested=switches.run_requested,
        last_run=None if row is None else shown(f"run {row.run_id}", lambda: RunOut.of_record(row)),
        allowed_actions=learner_switches.allowed_actions(switches),
        next_run_at=session.scalar(
            select(ScheduleJobRow.next_run_time).where(ScheduleJobRow.id == model)
        ),
        schedule=None
        if schedule is None
        else ScheduleOut(
            kind=schedule.code, why=schedule.message, at=schedule.at, again_at=schedule.until
        ),
    )


def shown(name: str, make: Callable[[], OutT]) -> OutT | None:
    """Make the part of a reply that shows one row. Returns: None when that row is damaged, because
    it must not hide the rest of the status."""
    try:
        return make()
    except DAMAGE as error:
        damaged(name, error)  # logs it
        return None
