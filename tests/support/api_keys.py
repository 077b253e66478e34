"""Write API keys to a store as the command `sidecar keys` does, for tests of the data plane, which
import no other room. `tests/rooms/test_api_keys.py` compares the rows with those of the command."""

from __future__ import annotations

import os
from typing import Any

from sqlalchemy import func, select

from sidecar.access.keys import ApiKey, make_key
from sidecar.store.database import Database
from sidecar.store.models import ApiKeyRow


def create(database: Database, *, project: str = "shop", **values: Any) -> tuple[str, str]:
    """Create a key. values: further fields of `ApiKey`. Returns: its id and the key itself."""
    fresh = make_key(os.urandom)
    key = ApiKey(key_id=fresh.key_id, secret_hash=fresh.secret_hash, project=project, **values)
    with database.write() as session:
        newest = session.scalar(select(func.max(ApiKeyRow.generation))) or 0
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
                created_at=0.0,
                revoked_at=None,
                generation=newest + 1,
            )
        )
    return key.key_id, fresh.presented


def revoke(database: Database, key_id: str) -> None:
    """Revoke a key, at second 1."""
    with database.write() as session:
        newest = session.scalar(select(func.max(ApiKeyRow.generation))) or 0
        row = session.get_one(ApiKeyRow, key_id)
        row.revoked_at, row.generation = 1.0, newest + 1
