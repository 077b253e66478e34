"""Stores for tests: copies of one that this process has made once.

To make one takes 0.1 s of a core, to copy it 4 ms. Tests of the schema itself call
`Database.upgrade` on an empty file.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sidecar.store import database, engines
from sidecar.store.database import Database

LATER = "9998_later"
"""A revision after all others, which adds a column to the table `flag`."""


def open_migrated(path: Path) -> Database:
    """Make a store with all its tables and no rows at `path`, and open it.

    Raises: FileExistsError.
    """
    with path.open("xb") as file:
        path.chmod(0o600)  # as the product makes it
        file.write(_migrated())
    return Database(f"sqlite:///{path}")


def add_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the revision `LATER`, so that stores made before are one revision behind.

    folder: not there yet; it gets the migrations.
    """
    newest = engines.newest_revision()
    shutil.copytree(engines.MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "versions" / f"{LATER}.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        f"revision, down_revision = {LATER!r}, {newest!r}\n"
        "def upgrade():\n    op.add_column('flag', sa.Column('later', sa.Text()))\n"
    )
    for module in (engines, database):
        monkeypatch.setattr(module, "MIGRATIONS", folder)


@cache
def _migrated() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        made = Database(f"sqlite:///{path}")
        made.upgrade()
        made.close()
        return path.read_bytes()
