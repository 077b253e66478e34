"""Ask the reward watch before a run takes groups, and record that it holds the learner.

A held run is one row, `held`: it takes no lease and no group, so the groups wait until they are
stale. While the same checks hold the same champion, the newest such row is brought up to date
instead of a new one, and the alarm is not raised again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from ingest.reward_watch.asking import Answer, ask
from learner.errors import HeldError
from sidecar.lines import learner_of
from sidecar.settings import Settings
from sidecar.store.database import Database, count
from sidecar.store.models import AuditRow, RunRow

log = structlog.get_logger()

HELD = "held"
STAGE = "watch"
"""Counter rows: (stage, "held_" and the check) -> times that a check began to hold the learner."""


def check_hold(database: Database, settings: Settings, run_id: str, *, now: float) -> None:
    """Return when a run may begin.

    now: Unix seconds. Raises: HeldError when the reward watch holds the learner; the run's row says
        why. StoreError.
    """
    model = settings.line.name
    with database.read() as session:
        answer = ask(session, model, settings.watch)
    if answer.damaged:
        with database.write(alone=False) as session:
            count(session, STAGE, "profile_damaged", len(answer.damaged))
    if answer.verdict.findings and not answer.holding:
        log.warning("reward_watch_waived", run_id=run_id, found=answer.verdict.reason)
    if not answer.holding:
        return
    with database.write() as session:
        began = _record(session, settings, run_id, answer, now=now)
    (log.error if began else log.info)(
        "run_held", run_id=run_id, champion=answer.verdict.champion, reason=answer.reason
    )
    raise HeldError(answer.reason)


def _record(
    session: Session, settings: Settings, run_id: str, answer: Answer, *, now: float
) -> bool:
    """Write or renew the row of a held run. Returns: True when the learner was not held so."""
    model = settings.line.name
    row = _newest(session, model)
    findings = [asdict(one) for one in answer.holding]
    if (
        row is not None
        and row.parent == answer.verdict.champion
        and _checks(row) == {one.check for one in answer.holding}
    ):
        asked = (row.held or {}).get("checks")
        times = asked if isinstance(asked, int) else 1
        row.held = {"findings": findings, "checks": times + 1}
        row.reason, row.heartbeat_at, row.ended_at = answer.reason, now, now
        return False
    session.add(
        RunRow(
            run_id=run_id,
            model=model,
            status=HELD,
            reason=answer.reason,
            started_at=now,
            heartbeat_at=now,
            ended_at=now,
            parent=answer.verdict.champion,
            settings=settings.watch.model_dump(mode="json"),
            counts={},
            metrics=[],
            held={"findings": findings, "checks": 1},
        )
    )
    session.add(
        AuditRow(
            at=now,
            actor="learner",
            action="learner.held",
            subject=learner_of(model),
            before={},
            after={"run_id": run_id, "checks": sorted({str(one.check) for one in answer.holding})},
            reason=answer.reason,
        )
    )
    for one in answer.holding:
        count(session, STAGE, f"held_{one.check}")
    return True


def _newest(session: Session, model: str) -> RunRow | None:
    """Return the newest run, if it was held."""
    statement = (
        select(RunRow).where(RunRow.model == model).order_by(RunRow.started_at.desc()).limit(1)
    )
    row = session.scalars(statement).first()
    return row if row is not None and row.status == HELD else None


def _checks(row: RunRow) -> set[Any]:  # Any: JSON
    findings = row.held.get("findings") if isinstance(row.held, dict) else None
    found = findings if isinstance(findings, list) else []
    return {one.get("check") for one in found if isinstance(one, dict)}
