"""Choose groups to be scored again, at the moment when they are scored."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.grouping.held_out import share_of
from ingest.noise.passes import encode_passes
from ingest.ruler.ruler import Judgement
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import count, insert_into
from sidecar.store.models import RescoringRow

STAGE = "rescoring"
"""Counter rows: (stage, outcome) -> groups."""
MOST_WAITING = 1_000
"""Groups that may wait to be scored again; while so many do, no other is chosen."""


def is_chosen(group_id: str, share: float) -> bool:
    """Return True for a group that is to be scored again, decided by a hash of its id.

    share: of all groups, 0..1. A higher share only adds groups.
    """
    return share_of(f"rescoring\x00{group_id}") < share


class Choosing:
    """Notes a share of the groups that get scores."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings

    def note(
        self, session: Session, group_id: str, judgement: Judgement, rubric_hash: str, now: float
    ) -> None:
        """Choose the group or not, in the transaction that stores its scores."""
        judges = {call.judge_model for call in judgement.calls}
        if not is_chosen(group_id, self._settings.rescore_share) or len(judges) != 1:
            return
        if count_waiting(session) >= MOST_WAITING:
            count(session, STAGE, "backlog_full")
            return
        added = session.scalar(
            insert_into(session, RescoringRow)
            .values(
                group_id=group_id,
                chosen_at=now,
                due_at=now + self._settings.rescore_after_s,
                attempts=0,
                judge_model=judges.pop(),
                rubric_hash=rubric_hash,
                passes=len(judgement.passes),
                first=encode_passes(judgement.passes),
            )
            .on_conflict_do_nothing()
            .returning(RescoringRow.group_id)
        )
        if added is not None:
            count(session, STAGE, "chosen")


def count_waiting(session: Session) -> int:
    """Count the groups that wait to be scored again, up to `MOST_WAITING`."""
    waiting = select(RescoringRow.group_id).where(RescoringRow.window_number.is_(None))
    some = waiting.limit(MOST_WAITING).subquery()
    return session.scalar(select(func.count()).select_from(some)) or 0
