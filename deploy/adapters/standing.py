"""Read from the store what needs which adapter version, and when each was used last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.adapters.needed import with_parents
from deploy.records import ACTIVE_PHASES, AdapterVersion
from deploy.registry import canaries, routing_writer
from deploy.registry.versions import to_version
from sidecar.records import BASE
from sidecar.store.models import (
    AdapterRow,
    AliasEventRow,
    AliasRow,
    CanaryRow,
    RoutingRow,
    RunRow,
    UnwantedAdapterRow,
)

TRIED = (*ACTIVE_PHASES, "queued")
WAITING = ("registered", "gating", "ramping", "champion")
"""States in which a version may get traffic without another decision of a person."""


def read_versions(session: Session) -> list[AdapterVersion]:
    """Return every version of every model, the newest first."""
    rows = select(AdapterRow).order_by(AdapterRow.model, AdapterRow.version.desc())
    return [to_version(row) for row in session.scalars(rows)]


def read_needed(
    session: Session,
    versions: list[AdapterVersion],
    *,
    keep_champions: int,
    loaded: Iterable[str] = (),
) -> dict[str, str]:
    """Return name -> why its folder must stay, of every model.

    loaded: adapters that a vLLM has loaded now.
    """
    needed: dict[str, str] = {}
    sources = (
        _of_aliases(session),
        _of_tables(session),
        _of_canaries(session),
        _of_runs(session),
        ((one.name, f"is {one.state}") for one in versions if one.state in WAITING),
        ((name, "is loaded in vLLM") for name in loaded),
        _still_loaded(session),
        _last_champions(session, keep_champions),
    )
    for source in sources:
        for name, why in source:
            if isinstance(name, str) and name != BASE:  # a damaged name needs nothing
                needed.setdefault(name, why)
    return with_parents(versions, needed)


def read_last_used(session: Session) -> dict[str, float]:
    """Return name -> when its last canary ended or an alias left it, in Unix seconds."""
    found: dict[str, float] = {}
    ended = select(CanaryRow.candidate, CanaryRow.ended_at).where(CanaryRow.ended_at.is_not(None))
    left = select(AliasEventRow.before, AliasEventRow.at).where(AliasEventRow.before.is_not(None))
    for statement in (ended, left):
        for name, at in session.execute(statement):
            if isinstance(name, str) and isinstance(at, int | float):
                found[name] = max(found.get(name, 0.0), float(at))
    return found


def _of_aliases(session: Session) -> Iterator[tuple[str, str]]:
    for row in session.scalars(select(AliasRow)):
        yield row.adapter, f"is {row.alias} of {row.model}"


def _of_tables(session: Session) -> Iterator[tuple[str, str]]:
    for model in session.scalars(select(RoutingRow.model)):
        table = routing_writer.current(session, model)
        for name in (table.champion, table.canary) if table is not None else ():
            if name is not None:
                yield name, f"is in the routing table of {model}"


def _of_canaries(session: Session) -> Iterator[tuple[str, str]]:
    for row in session.scalars(select(CanaryRow).where(CanaryRow.state.in_(TRIED))):
        canary = canaries.to_canary(row)
        for name in (canary.candidate, canary.champion, canary.anchor):
            yield name, f"the canary {canary.canary_id} needs it"


def _of_runs(session: Session) -> Iterator[tuple[str, str]]:
    for row in session.execute(
        select(RunRow.run_id, RunRow.parent, RunRow.adapter).where(RunRow.status == "running")
    ):
        for name in (row.parent, row.adapter):
            yield name, f"the run {row.run_id} needs it"


def _still_loaded(session: Session) -> Iterator[tuple[str, str]]:
    for name in session.scalars(select(UnwantedAdapterRow.adapter).distinct()):
        yield name, "a vLLM still has it loaded"


def _last_champions(session: Session, number: int) -> Iterator[tuple[str, str]]:
    """Yield the newest `number` champions of each model, without the base."""
    models = session.scalars(select(AdapterRow.model).distinct()).all()
    for model in models:
        found: dict[str, None] = {}
        moves = (
            select(AliasEventRow.after)
            .where(AliasEventRow.model == model, AliasEventRow.alias == "champion")
            .order_by(AliasEventRow.seq.desc())
        )
        promoted = (
            select(CanaryRow.candidate)
            .where(CanaryRow.model == model, CanaryRow.state == "promoted")
            .order_by(CanaryRow.ended_at.desc())
            .limit(number)
        )
        for name in (*session.scalars(moves), *session.scalars(promoted)):
            if len(found) >= number:
                break
            if name is not None and name != BASE:
                found[name] = None
        yield from ((name, f"is one of the last {number} champions of {model}") for name in found)
