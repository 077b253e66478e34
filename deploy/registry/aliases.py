"""The history of aliases: append-only, each move with the hash of the move before it.

It answers who was champion at any time by one query, and shows an edit of the past: a changed,
removed or inserted row breaks the chain, and a removed end disagrees with the aliases themselves
(`verify`). It is no proof against somebody who may write the store and computes all hashes anew:
keep the last hash elsewhere (`sidecar audit verify` prints it) for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from sidecar.store.models import (
    AliasEventRow,
    AliasRow,
)

START = "0" * 64
"""`prev_hash` of the first move."""
_HASHED = ("at", "model", "alias", "before", "after", "generation", "actor", "reason")
"""Columns that the hash covers, with `prev_hash`; `seq` is given by the store."""


@dataclass(frozen=True, slots=True)
class Held:
    """Where an alias pointed."""

    alias: str
    adapter: str | None
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a walk over the whole history found."""

    events: int
    last_hash: str
    broken: tuple[str, ...]
    """What does not fit, in words; empty: the history is whole."""


def add(
    session: Session,
    *,
    at: float,
    model: str,
    alias: str,
    before: str | None,
    after: str | None,
    generation: int,
    actor: str,
    reason: str,
) -> None:
    """Append a move, in the caller's write transaction. before, after: None: it points nowhere."""
    session.flush()
    newest = select(AliasEventRow.hash).order_by(AliasEventRow.seq.desc()).limit(1)
    known = session.scalar(newest)
    row = AliasEventRow(
        at=float(at),  # the hash covers it as the store returns it
        model=model,
        alias=alias,
        before=before,
        after=after,
        generation=generation,
        actor=actor,
        reason=reason,
        prev_hash=known or START,
        hash="",
    )
    row.hash = hash_of(row)
    session.add(row)
    session.flush()


def hash_of(row: AliasEventRow) -> str:
    """Return the SHA-256 (hex) of a move and of the hash before it."""
    values = [getattr(row, name) for name in _HASHED]
    text = json.dumps([row.prev_hash, *values], separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def held_at(session: Session, model: str, at: float) -> list[Held]:
    """Return where each alias pointed at a time (Unix seconds), by alias."""
    held: list[Held] = []
    for alias in _aliases(session, model):
        newest = (
            select(AliasEventRow.after, AliasEventRow.generation)
            .where(
                AliasEventRow.model == model,
                AliasEventRow.alias == alias,
                AliasEventRow.at <= at,
            )
            .order_by(AliasEventRow.seq.desc())
            .limit(1)
        )
        found = session.execute(newest).first()
        if found is None or found[0] is None:
            continue
        held.append(Held(alias, *found))
    return held


def last_after(session: Session, model: str, alias: str) -> str | None:
    """Return where an alias points by its history; None: nowhere."""
    row = AliasEventRow
    moves = select(row.after).where(row.model == model, row.alias == alias)
    return session.scalar(moves.order_by(row.seq.desc()).limit(1))


def last_before(session: Session, model: str, alias: str, adapter: str) -> str | None:
    """Return where an alias pointed before it last came to `adapter`; None: nowhere, or unknown."""
    row = AliasEventRow
    moved = (
        select(row.before)
        .where(row.model == model, row.alias == alias, row.after == adapter)
        .order_by(row.seq.desc())
        .limit(1)
    )
    return session.scalar(moved)


def _aliases(session: Session, model: str) -> Iterator[str]:
    """Yield every alias that ever pointed somewhere, in order; each is one step in the index."""
    named = select(AliasEventRow.alias).where(AliasEventRow.model == model)
    alias: str | None = ""
    while alias is not None:
        following = named.where(AliasEventRow.alias > alias).order_by(AliasEventRow.alias).limit(1)
        alias = session.scalar(following)
        if alias is not None:
            yield alias


def verify(session: Session) -> Verified:
    """Walk over the history: it grows by a row for each promotion and rollback."""
    number, last = 0, START
    broken: list[str] = []
    ends: dict[tuple[str, str], tuple[str | None, int]] = {}
    for row in session.scalars(select(AliasEventRow).order_by(AliasEventRow.seq)):
        number += 1
        if row.prev_hash != last:
            broken.append(f"move {row.seq}: the one before it was changed, removed or inserted")
        if row.hash != hash_of(row):
            broken.append(f"move {row.seq}: it was changed after it was written")
        last = row.hash
        ends[row.model, row.alias] = (row.after, row.generation)
    broken += _disagree(session, ends)
    return Verified(events=number, last_hash=last, broken=tuple(broken))


def _disagree(
    session: Session, ends: dict[tuple[str, str], tuple[str | None, int]]
) -> Iterator[str]:
    present = {
        (row.model, row.alias): (row.adapter, row.generation)
        for row in session.scalars(select(AliasRow))
    }
    for key in sorted({*ends, *present}):
        found = ends.get(key, (None, 0))
        now = present.get(key, (None, found[1]))
        if found != now:
            yield (
                f"alias {key[1]} of {key[0]}: points to {now[0]} (move {now[1]}), and its history "
                f"ends with {found[0]} (move {found[1]})"
            )
