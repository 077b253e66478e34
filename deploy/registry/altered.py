"""Record in the store that an adapter's files differ from the registered ones.

The aliases stay: an operator may restore the folder, and then the adapter is loaded again. Until
then the proxy serves its sessions from the champion or the base, as for any adapter that vLLM does
not have loaded. The adapter's canary ends, because it would promote files that nobody judged.
"""

from __future__ import annotations

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.records import AdapterState
from deploy.registry import audit, canaries, transitions, versions
from deploy.registry.canary_rule import Move
from sidecar.store.database import Database, count
from sidecar.store.models import AuditRow

log = structlog.get_logger()

ACTION = "adapter.altered"
RESTORED = "adapter.sound"


def record_altered(database: Database, name: str, *, replica: str, reason: str, now: float) -> None:
    """Write the audit row and the count, and end the adapter's canary. Raises: StoreError.

    One row for each alteration: a control that is started again and finds the same one adds none,
    nor does another replica, which reads the same folder.
    """
    log.error("adapter_altered", adapter=name, replica=replica, reason=reason)
    with database.write() as session:
        told = _newest(session, name)
        version = versions.find(session, name)
        if told is None or (told.action, told.reason) != (ACTION, reason):
            count(session, "adapter", "altered")
            audit.record(
                session,
                now=now,
                actor=audit.CONTROL,
                action=ACTION,
                subject=name,
                before={"digest": version.digest},
                after={"loaded": False, "replica": replica},
                reason=reason,
            )
        canary = canaries.active(session, version.model)
        if canary is None or canary.candidate != name:
            return
        state: AdapterState = "rolled_back" if canary.phase == "ramping" else "rejected"
        move = Move(to="rolled_back", candidate_state=state, reason=f"altered: {reason}")
        transitions.apply(session, canary, move, evidence={}, now=now, ban=False)


def record_restored(database: Database, name: str, *, replica: str, now: float) -> None:
    """Write that the registered files are back, if the audit says last that they were altered.

    Raises: StoreError.
    """
    with database.read() as session:
        told = _newest(session, name)
    if told is None or told.action != ACTION:
        return
    with database.write() as session:
        audit.record(
            session,
            now=now,
            actor=audit.CONTROL,
            action=RESTORED,
            subject=name,
            before={"loaded": False, "replica": replica},
            after={"loaded": True, "replica": replica},
            reason="its files are the registered ones again",
        )


def _newest(session: Session, name: str) -> AuditRow | None:
    """Return what was last told of the adapter's files."""
    of_files = AuditRow.action.in_((ACTION, RESTORED))
    return session.scalar(
        select(AuditRow)
        .where(AuditRow.subject == name, of_files)
        .order_by(AuditRow.seq.desc())
        .limit(1)
    )
