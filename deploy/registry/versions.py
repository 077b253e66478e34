"""The adapter registry: versions, their states, and the aliases that point at them.

All functions work in the caller's transaction and use no file, no vLLM and no clock. An adapter's
name is used once and never again; the aliases move:

- `champion` answers every session that no canary takes; it is "base" when no adapter does.
- `previous` is the target of a rollback without one: the champion that the current one replaced.
  After a rollback it equals the champion (`deploy.registry.rollback` gives the reason).
- `canary` is the candidate that is tried now; it points nowhere while none is.
- `anchor` is what every candidate is held to beside the champion, so that many small losses do not
  add up; an operator sets it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice
from typing import cast

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from deploy.errors import TransitionError, UnknownAdapterError
from deploy.records import AdapterState, AdapterVersion
from deploy.registry import aliases as history, audit
from sidecar.lines import line_name
from sidecar.records import BASE
from sidecar.routing.table import is_generation
from sidecar.store.models import AdapterRow, AliasEventRow, AliasRow, CanaryRow

_VERSION = re.compile(r"v?([0-9]{1,9})")
MOST_RETIRED = 50
"""Retired versions that are looked at for those that were champion."""
MAX_ANCESTORS = 10_000
"""Longest chain of parents that is followed; a longer one is a loop in the store."""


def to_version(row: AdapterRow) -> AdapterVersion:
    """Convert a row of the store to a record."""
    return AdapterVersion(
        name=row.name,
        model=row.model,
        version=row.version,
        digest=row.digest,
        path=row.path,
        parent=row.parent,
        run_id=row.run_id,
        state=cast(AdapterState, row.state),
        reason=row.reason,
        created_at=row.created_at,
        forgotten_at=row.forgotten_at,
        removed_at=row.removed_at,
    )


def find(session: Session, name: str) -> AdapterVersion:
    """Return the version with this full name. Raises: UnknownAdapterError."""
    row = session.get(AdapterRow, name)
    if row is None:
        raise UnknownAdapterError(f"no adapter is called {name}; `sidecar adapters ls` lists them")
    return to_version(row)


def resolve(session: Session, model: str, reference: str) -> str:
    """Resolve an operator's reference to an adapter name or "base".

    reference: "base", an alias ("champion", "previous", "canary", "anchor"), a version ("12",
        "v12") or a full name.
    Raises: UnknownAdapterError.
    """
    if reference == BASE:
        return BASE
    aliases = aliases_of(session, model)
    if reference in aliases or reference in ("champion", "previous"):
        return aliases.get(reference, BASE)
    match = _VERSION.fullmatch(reference)
    if match is not None:
        statement = select(AdapterRow.name).where(
            AdapterRow.model == model, AdapterRow.version == int(match[1])
        )
        name = session.scalar(statement)
        if name is not None:
            return name
    row = session.get(AdapterRow, reference)
    if row is None or row.model != model:
        raise UnknownAdapterError(
            f"no adapter of {model} matches {reference!r}; name a version (v12), a full name, "
            "champion, previous or base"
        )
    return row.name


def versions(
    session: Session, model: str, *, state: AdapterState | None = None
) -> list[AdapterVersion]:
    """List the versions of a model, or those of one state, the newest first."""
    statement = (
        select(AdapterRow).where(AdapterRow.model == model).order_by(AdapterRow.version.desc())
    )
    if state is not None:
        statement = statement.where(AdapterRow.state == state)
    return [to_version(row) for row in session.scalars(statement)]


def named(session: Session, model: str, names: Collection[str]) -> list[AdapterVersion]:
    """List those of these versions that the model has in any of its lines, the newest first.

    model: the public model name.
    """
    of_project = AdapterRow.model.startswith(line_name(model, ""), autoescape=True)
    statement = select(AdapterRow).where(
        AdapterRow.name.in_(sorted(names)), or_(AdapterRow.model == model, of_project)
    )
    # Sorted here: of several lines no index has them in this order, and they are few.
    rows = sorted(
        session.scalars(statement), key=lambda row: (row.created_at, row.name), reverse=True
    )
    return [to_version(row) for row in rows]


def any_in(session: Session, model: str, state: AdapterState, *, but: str = "") -> bool:
    """Return True when a version of the model is in this state. but: a version that
    is not meant."""
    statement = select(AdapterRow.name).where(
        AdapterRow.model == model, AdapterRow.state == state, AdapterRow.name != but
    )
    return session.scalar(statement.limit(1)) is not None


def aliases_of(session: Session, model: str) -> dict[str, str]:
    """Return the model's aliases: alias -> adapter name or "base"."""
    rows = session.scalars(select(AliasRow).where(AliasRow.model == model))
    return {row.alias: row.adapter for row in rows}


def lines_in(session: Session, model: str) -> list[str]:
    """Return the names of a model's lines of adapters that the store knows, also of those that the
    settings do not name any more; the default one first."""
    of_project = AliasRow.model.startswith(line_name(model, ""), autoescape=True)
    statement = select(AliasRow.model).where(of_project).distinct().order_by(AliasRow.model)
    return [model, *session.scalars(statement)]


def champion(session: Session, model: str) -> str:
    """Return the name of the champion, or "base". Without a row it is where the history ends."""
    found = aliases_of(session, model).get("champion")
    return found or history.last_after(session, model, "champion") or BASE


def ancestors(session: Session, name: str) -> list[AdapterVersion]:
    """List the version and its ancestors, the youngest first, to the one trained from the base.

    The chain ends early at a parent that this store does not know.
    """
    chain: list[AdapterVersion] = []
    row = session.get(AdapterRow, name)
    while row is not None and len(chain) < MAX_ANCESTORS:
        chain.append(to_version(row))
        row = session.get(AdapterRow, row.parent)
    return chain


def descends_from(session: Session, model: str, name: str, ancestor: str) -> bool:
    """Return True when a version was trained from `ancestor`, or from one that was. False for the
    base on either side. Reads names alone."""
    known = select(AdapterRow.name, AdapterRow.parent).where(AdapterRow.model == model)
    parents = {row.name: row.parent for row in session.execute(known)}
    for _ in range(len(parents)):
        name = parents.pop(name, BASE)
        if name in (BASE, ancestor):
            return name != BASE
    return False


def has_been_champion(session: Session, name: str) -> bool:
    """Return True for the base and for a version that a canary promoted."""
    if name == BASE:
        return True
    statement = select(CanaryRow.canary_id).where(
        CanaryRow.candidate == name, CanaryRow.state == "promoted"
    )
    return session.scalar(statement.limit(1)) is not None


def former_champions(session: Session, model: str, most: int) -> list[str]:
    """Return the newest retired versions that were champion, and whose folder is there.

    most: how many, of the newest `MOST_RETIRED` retired ones; a rolled back one is none of them.
    """
    retired = (
        select(AdapterRow.name)
        .where(
            AdapterRow.model == model,
            AdapterRow.state == "retired",
            AdapterRow.removed_at.is_(None),
        )
        .order_by(AdapterRow.version.desc())
        .limit(MOST_RETIRED)
    )
    found = (name for name in session.scalars(retired).all() if has_been_champion(session, name))
    return list(islice(found, most))


def reason_removed(session: Session, name: str) -> str | None:
    """Return in words that retention removed the version's folder, and what to do; else None."""
    row = session.get(AdapterRow, name) if name != BASE else None
    if row is None or row.removed_at is None:
        return None
    return (
        f"the folder of {name} was removed, because nothing had used it for long "
        "(adapters.folder_days); name another version, or bring it back from a copy: "
        "`sidecar adapters import FOLDER`"
    )


def refuse_removed(session: Session, name: str) -> None:
    """Raises: TransitionError when retention removed the version's folder."""
    if (why := reason_removed(session, name)) is not None:
        raise TransitionError(why)


def move_alias(
    session: Session, *, model: str, alias: str, to: str, now: float, actor: str, reason: str
) -> bool:
    """Move an alias to another adapter; write its next generation and an audit row.

    Returns: False, with nothing written, when it points there already.
    """
    row = session.get(AliasRow, (model, alias))
    before = row.adapter if row is not None else None
    if before == to:
        return False
    if row is None:
        row = AliasRow(
            model=model, alias=alias, adapter=to, generation=last_generation(session, model, alias)
        )
        session.add(row)
    row.adapter = to
    row.generation = _next(row.generation)
    _told(session, row, before, to, now=now, actor=actor, reason=reason)
    return True


def drop_alias(
    session: Session, *, model: str, alias: str, now: float, actor: str, reason: str
) -> bool:
    """Let an alias point nowhere. Returns: False, with nothing written, when it does already."""
    row = session.get(AliasRow, (model, alias))
    if row is None:
        return False
    row.generation = _next(row.generation)
    _told(session, row, row.adapter, None, now=now, actor=actor, reason=reason)
    session.delete(row)
    session.flush()
    return True


def _next(generation: int) -> int:
    return generation + 1 if is_generation(generation) else 1


def last_generation(session: Session, model: str, alias: str) -> int:
    """Return the generation of an alias that pointed nowhere until now: none comes twice."""
    statement = (
        select(AliasEventRow.generation)
        .where(AliasEventRow.model == model, AliasEventRow.alias == alias)
        .order_by(AliasEventRow.seq.desc())
    )
    found = session.scalar(statement.limit(1))
    return found if found is not None and is_generation(found) else 0


def _told(
    session: Session,
    row: AliasRow,
    before: str | None,
    after: str | None,
    *,
    now: float,
    actor: str,
    reason: str,
) -> None:
    history.add(
        session,
        at=now,
        model=row.model,
        alias=row.alias,
        before=before,
        after=after,
        generation=row.generation,
        actor=actor,
        reason=reason,
    )
    if row.alias == "canary":
        return  # the canary's own rows of the audit say it
    audit.record(
        session,
        now=now,
        actor=actor,
        action=f"alias.{row.alias}",
        subject=row.model,
        before={"adapter": before},
        after={"adapter": after, "generation": row.generation},
        reason=reason,
    )


def set_state(session: Session, name: str, state: AdapterState, reason: str | None = None) -> None:
    """Set the state of a version. The base has no row: nothing is written for it.

    A version whose row was deleted is skipped too: ending its canary or rolling it back must not
    fail, and the audit row of that change names it.
    """
    if name == BASE:
        return
    row = session.get(AdapterRow, name)
    if row is None:
        return
    row.state = state
    row.reason = reason
