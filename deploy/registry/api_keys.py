"""API keys in the store: create, list and revoke. Each change adds an audit row.

Only deploy writes the table; every proxy polls it, so a change takes effect within `ROUTING_POLL_S`
of `sidecar.proxy`. A revoked key keeps its row: its name explains old exchanges, and a client that
still uses it is told that it was revoked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.errors import UnknownKeyError
from deploy.registry import audit
from sidecar.access.key_source import read_key
from sidecar.access.keys import ApiKey, FreshKey, make_key
from sidecar.errors import InvalidKeyError
from sidecar.routing.table import is_generation
from sidecar.store.database import Database
from sidecar.store.models import ApiKeyRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedKey:
    """A key as operators see it."""

    key: ApiKey
    created_at: float
    revoked_at: float | None

    def state(self, now: float) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        expires_at = self.key.expires_at
        return "expired" if expires_at is not None and now >= expires_at else "active"


def create(
    database: Database,
    wanted: Callable[[FreshKey], ApiKey],
    *,
    randomness: Callable[[int], bytes],
    actor: str,
    now: float,
) -> tuple[ApiKey, str]:
    """Create a key.

    wanted: builds the key's record from the fresh id and hash.
    Returns: the record, and the secret key itself, which is shown once and stored nowhere.
    Raises: InvalidKeyError; StoreError.
    """
    fresh = make_key(randomness)
    key = wanted(fresh)
    with database.write() as session:
        session.add(
            ApiKeyRow(
                key_id=key.key_id,
                project=key.project,
                name=key.name,
                secret_hash=key.secret_hash,
                scopes=" ".join(sorted(key.scopes)),
                expires_at=key.expires_at,
                requests_per_minute=key.requests_per_minute,
                tokens_per_day=key.tokens_per_day,
                best_of_max=key.best_of_max,
                created_at=now,
                revoked_at=None,
                generation=_next_generation(session),
            )
        )
        audit.record(
            session,
            now=now,
            actor=actor,
            action="key.created",
            subject=key.key_id,
            before={},
            after=public_fields(key),
            reason="no reason given",
        )
    return key, fresh.presented


def revoke(database: Database, key_id: str, *, reason: str, actor: str, now: float) -> float:
    """Revoke a key for good, also one whose row is damaged. Idempotent.

    Returns: when it was revoked, in Unix seconds. Raises: UnknownKeyError; StoreError.
    """
    with database.write() as session:
        row = session.get(ApiKeyRow, key_id)
        if row is None:
            # The message does not repeat the argument: it may be a whole key, pasted by mistake.
            raise UnknownKeyError("no key has this id; `sidecar keys ls` lists the ids")
        if row.revoked_at is None:
            row.revoked_at = now
            row.generation = _next_generation(session)
            audit.record(
                session,
                now=now,
                actor=actor,
                action="key.revoked",
                subject=key_id,
                before={"revoked_at": None},
                after={"revoked_at": now},
                reason=reason,
            )
        return row.revoked_at


def all_keys(database: Database) -> tuple[list[ListedKey], list[str]]:
    """List every key, revoked ones too, the oldest first.

    Returns: the keys; and a line for each one whose row is damaged, which every proxy refuses.
    """
    found: list[ListedKey] = []
    damaged: list[str] = []
    with database.read() as session:
        rows = session.scalars(select(ApiKeyRow).order_by(ApiKeyRow.created_at, ApiKeyRow.key_id))
        for row in rows:
            try:
                found.append(_listed(row))
            except (InvalidKeyError, msgspec.ValidationError) as error:
                damaged.append(f"key {row.key_id} is damaged in the store: {error}")
    return found, damaged


def public_fields(key: ApiKey) -> dict[str, Any]:  # Any: JSON
    """Return what may be shown of a key besides its id: its project, name, scopes and limits."""
    return {
        "project": key.project,
        "name": key.name,
        "scopes": sorted(key.scopes),
        "expires_at": key.expires_at,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_day": key.tokens_per_day,
        "best_of_max": key.best_of_max,
    }


def _next_generation(session: Session) -> int:
    known = session.scalars(select(ApiKeyRow.generation))
    return max(filter(is_generation, known), default=0) + 1


def _listed(row: ApiKeyRow) -> ListedKey:
    """Convert a row of the store. Raises: InvalidKeyError, msgspec.ValidationError."""
    columns = {column.name: getattr(row, column.name) for column in row.__table__.columns}
    created_at = msgspec.convert(row.created_at, float)
    revoked_at = msgspec.convert(row.revoked_at, float | None)
    return ListedKey(key=read_key(columns), created_at=created_at, revoked_at=revoked_at)
