"""Stores for tests: copies of one that this process has migrated once.

A migration from nothing takes 0.1 s of a core, a copy 4 ms. Tests of the migrations themselves call
`Database.upgrade` on an empty file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from sidecar.store.database import Database


def open_migrated(path: Path) -> Database:
    """Make a store with all its tables and no rows at `path`, and open it.

    Raises: FileExistsError.
    """
    with path.open("xb") as file:
        path.chmod(0o600)  # as the product makes it
        file.write(_migrated())
    return Database(f"sqlite:///{path}")


@cache
def _migrated() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        database = Database(f"sqlite:///{path}")
        database.upgrade()
        database.close()
        return path.read_bytes()
