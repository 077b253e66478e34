"""The tests of the data plane write API keys as the command `sidecar keys` does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import inspect

from deploy.registry import api_keys as command
from sidecar.access.keys import ApiKey
from sidecar.store.database import Database
from sidecar.store.models import ApiKeyRow
from support import api_keys as written_by_tests

FIELDS: dict[str, Any] = {
    "project": "shop",
    "name": "till 4",
    "scopes": frozenset({"infer", "operate"}),
    "expires_at": 99.5,
    "requests_per_minute": 7,
    "tokens_per_day": 900,
    "best_of_max": 4,
}


def rows(database: Database) -> list[dict[str, Any]]:
    """All keys but for what is drawn at random."""
    columns = [one.key for one in inspect(ApiKeyRow).columns]
    with database.read() as session:
        found = session.query(ApiKeyRow).order_by(ApiKeyRow.generation).all()
    drawn = {"key_id", "secret_hash"}
    return [{name: getattr(row, name) for name in columns if name not in drawn} for row in found]


def test_keys_of_tests_are_rows_as_the_command_writes_them(tmp_path: Path) -> None:
    ours, theirs = (Database(f"sqlite:///{tmp_path}/{name}.db") for name in ("ours", "theirs"))
    for database in (ours, theirs):
        database.upgrade()

    for fields in ({"project": "shop"}, FIELDS):
        key_id, presented = written_by_tests.create(ours, **fields)
        key, as_presented = command.create(
            theirs,
            lambda fresh, fields=fields: ApiKey(  # type: ignore[misc]
                key_id=fresh.key_id, secret_hash=fresh.secret_hash, **fields
            ),
            randomness=os.urandom,
            actor="test",
            now=0.0,
        )
    written_by_tests.revoke(ours, key_id)
    command.revoke(theirs, key.key_id, reason="test", actor="test", now=1.0)

    assert len(presented) == len(as_presented)
    assert rows(ours) == rows(theirs)
    assert [row["generation"] for row in rows(ours)] == [1, 3]
    for database in (ours, theirs):
        database.close()
