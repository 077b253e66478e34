"""Which lines of adapters some proxy still follows an older routing table of.

Each process of a proxy writes which table it took (`sidecar.routing.taken_report`). That row is its
lease on the adapters of that table: a proxy that is cut off from the store follows the old table
on, and its sessions go on with the adapters that it names. A proxy that is gone leaves its row as
it was, so no lease holds for ever: the caller bounds it.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.store.models import RoutingRow, TableTakenRow


def lines_behind(session: Session) -> frozenset[str]:
    """Return the names of the lines of which a proxy told an older table than the present one."""
    behind = (
        select(TableTakenRow.model)
        .join(RoutingRow, RoutingRow.model == TableTakenRow.model)
        .where(TableTakenRow.generation < RoutingRow.generation)
    )
    return frozenset(one for one in session.scalars(behind) if isinstance(one, str))
