"""Count the conversations of a ramp whose turns met both arms, from the `exchange` table.

The proxy keeps a conversation at one arm by its session key. Ingest finds the conversation again by
its content: where a turn and the one that it continues (`parent_id`) were assigned differently
while the weight was the same, the key changed between them. The first turn of a sub-agent does not
count (`called`), nor a turn that another adapter than the assigned one answered.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from deploy.records import Canary
from sidecar.lines import Line, public_model
from sidecar.store.models import ExchangeRow
from sidecar.store.models.capture import COUNTED

NEWEST = 2_000
"""Newest exchanges of each arm that are read: the share is of what happens now."""
_ROW = ExchangeRow


class _Turn(NamedTuple):
    arm: str
    propensity: float
    seq: int
    fallback_from: str

    @property
    def weight_bp(self) -> int | None:
        """The canary's weight when it was assigned; None where the row is damaged."""
        if not isinstance(self.propensity, int | float):
            return None
        weight = self.propensity if self.arm == "canary" else 1.0 - self.propensity
        return round(10_000 * weight)


_TURN = tuple(getattr(_ROW, name) for name in _Turn._fields)


def count_conversations(session: Session, canary: Canary, line: Line) -> tuple[int, int]:
    """Return the number of conversations among the newest exchanges of the ramp, and of those of
    them whose turns met both arms."""
    conversations, both = set[str](), set[str]()
    for arm, adapter in (("canary", canary.candidate), ("champion", canary.champion)):
        statement = (
            select(_ROW.session_id, _ROW.project, _ROW.parent_id, _ROW.placed_by, *_TURN)
            .where(
                _ROW.public_model == public_model(canary.model),
                _ROW.adapter == adapter,
                _ROW.arm == arm,
                text(COUNTED),
                _ROW.seq > canary.ramp_after_seq,
            )
            .order_by(_ROW.seq.desc())
            .limit(NEWEST)
        )
        rows = [row for row in session.execute(statement) if line.has(row.project)]
        conversations.update(row.session_id for row in rows)
        linked = {row.parent_id for row in rows if row.parent_id and row.placed_by != "called"}
        parents = {
            name: _Turn(*turn)
            for name, *turn in session.execute(
                select(_ROW.exchange_id, *_TURN).where(_ROW.exchange_id.in_(linked))
            )
        }
        for row in rows:
            parent = parents.get(row.parent_id) if row.placed_by != "called" else None
            if parent is None or parent.seq <= canary.ramp_after_seq or parent.fallback_from:
                continue
            turn = _Turn(row.arm, row.propensity, row.seq, "")
            if turn.arm != parent.arm and turn.weight_bp == parent.weight_bp:
                both.add(row.session_id)
    return len(conversations), len(both)
