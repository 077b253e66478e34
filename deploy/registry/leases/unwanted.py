"""Since when each loaded adapter is wanted by nothing, for each vLLM: kept in the store.

In memory alone a restart of control would begin every grace anew, and a control that restarts more
often than that would never unload anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from sidecar.store.database import Database
from sidecar.store.models import UnwantedAdapterRow


def read_since(session: Session, replica: str) -> dict[str, float]:
    """Return adapter -> since when nothing wants it, in Unix seconds, without damaged times."""
    rows = session.execute(
        select(UnwantedAdapterRow.adapter, UnwantedAdapterRow.since).where(
            UnwantedAdapterRow.replica == _key(replica)
        )
    )
    return {name: since for name, since in rows if isinstance(since, float)}


def keep_since(
    database: Database, replica: str, unwanted: Collection[str], now: float
) -> dict[str, float]:
    """Bring the store up to date with what is loaded and unwanted now; write only a change.

    A time ahead of `now` (a clock that was set back) begins anew.
    Returns: as `read_since`. Raises: StoreError.
    """
    with database.read() as session:
        known = read_since(session, replica)
    kept = {name: known[name] for name in unwanted if name in known and known[name] <= now}
    following = {name: kept.get(name, now) for name in sorted(unwanted)}
    if following != known:
        with database.write() as session:
            of_replica = UnwantedAdapterRow.replica == _key(replica)
            session.execute(delete(UnwantedAdapterRow).where(of_replica))
            session.add_all(
                UnwantedAdapterRow(replica=_key(replica), adapter=name, since=since)
                for name, since in following.items()
            )
    return following


def _key(replica: str) -> str:
    return hashlib.sha256(replica.encode()).hexdigest()
