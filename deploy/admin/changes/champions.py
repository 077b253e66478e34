"""Versions that have been champion: what a rollback may go to, and what became of each.

They are read from the history of the alias, of which the newest MOVES are looked through, so many
canaries that failed since push no old champion out. A version whose row or folder is gone is left
out: nothing could serve it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.registry import versions
from deploy.registry.history import bans
from sidecar.records import BASE
from sidecar.store.models import AdapterRow, AliasEventRow, BannedDigestRow

MOVES = 1_000
"""Newest moves of `champion` that are looked through."""
MOST = 100
"""Versions that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """An adapter version, or the base, that has been champion and is not now."""

    adapter: str
    previous: bool
    """The alias `previous` points at it."""
    rolled_back_at: float | None = None
    """When it lost its traffic, in Unix seconds; None: it was replaced, and may be gone back to."""
    banned: str | None = None
    """Why its files are banned; None: they are not. A rollback to it lifts the ban."""

    @property
    def sound(self) -> bool:
        """False for what was taken away from the users, or proven bad since."""
        return self.rolled_back_at is None and self.banned is None


def former(session: Session, model: str) -> list[Former]:
    """List what a rollback may go to: the previous champion, earlier ones, the base, and last what
    was rolled back or banned; the newest first in each."""
    aliases = versions.aliases_of(session, model)
    champion, previous = aliases.get("champion", BASE), aliases.get("previous", BASE)
    left = _left_at(session, model)
    found = (
        _former(session, name, left.get(name), previous=name == previous)
        for name in dict.fromkeys([previous, *left])
        if name not in (champion, BASE)
    )
    known = list(islice((one for one in found if one is not None), MOST))  # asks for no more rows
    if champion != BASE:
        known.append(Former(adapter=BASE, previous=previous == BASE))
    return sorted(known, key=lambda one: (not one.sound, not one.previous, one.adapter == BASE))


def _left_at(session: Session, model: str) -> dict[str, float]:
    """Return when each champion stopped being it: adapter -> Unix seconds, the newest first."""
    moves = session.execute(
        select(AliasEventRow.before, AliasEventRow.at)
        .where(AliasEventRow.model == model, AliasEventRow.alias == "champion")
        .order_by(AliasEventRow.seq.desc())
        .limit(MOVES)
    )
    left: dict[str, float] = {}
    for name, at in moves:
        if isinstance(name, str):
            left.setdefault(name, at)
    return left


def _former(session: Session, name: str, left_at: float | None, *, previous: bool) -> Former | None:
    row = session.get(AdapterRow, name)
    if row is None or row.removed_at is not None or not versions.has_been_champion(session, name):
        return None
    ban: BannedDigestRow | None = bans.find(session, row.model, row.digest)
    lost = row.state == "rolled_back" or ban is not None
    at = (left_at or 0.0) if ban is None else ban.at
    return Former(
        adapter=name,
        previous=previous,
        rolled_back_at=at if lost else None,
        banned=None if ban is None else ban.reason,
    )
