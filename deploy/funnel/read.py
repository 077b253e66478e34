"""Read the funnel from the store: the counters, and what two short queries tell."""

from __future__ import annotations

from dataclasses import dataclass

import structlog
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deploy.funnel.stages import Counters, Stage, stages_of
from ingest.store.groups import CLAIMED
from sidecar.store.models import AdapterRow, CounterRow, GroupRow

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    stages: tuple[Stage, ...]
    counters: Counters
    """Everything in the table `counter`; damaged rows are left out."""

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def read_funnel(session: Session, *lines: str) -> Funnel:
    """Read the funnel. Its cost does not grow with the records.

    lines: names of the lines of adapters whose versions count in the last stage. The records of the
        stages before it are counted for all lines together.
    """
    counters = read_counters(session)
    claimed = session.scalar(
        select(func.count()).select_from(GroupRow).where(GroupRow.status == CLAIMED)
    )
    adapters = session.execute(
        select(AdapterRow.state, func.count())
        .where(AdapterRow.model.in_(lines))
        .group_by(AdapterRow.state)
    )
    return Funnel(
        stages=stages_of(
            counters,
            claimed=claimed or 0,
            adapters={str(state): number for state, number in adapters},
        ),
        counters=counters,
    )


def read_counters(session: Session) -> dict[str, dict[str, int]]:
    """Read every durable counter: stage -> reason -> count. A damaged one is left out."""
    counters: dict[str, dict[str, int]] = {}
    for row in session.scalars(select(CounterRow).order_by(CounterRow.stage, CounterRow.reason)):
        if isinstance(row.count, int):
            counters.setdefault(row.stage, {})[row.reason] = row.count
        else:
            log.warning("counter_unreadable", stage=row.stage, reason=row.reason)
    return counters
