"""Rows whose bytes are not what their column holds, and store files that are no database.

The damage is written past the library, with foreign keys off, as a faulty disk would do it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import select, text

from sidecar.errors import StoreError
from sidecar.store.database import Database
from sidecar.store.models import GroupRow

if TYPE_CHECKING:
    pass


def overwritten(path: Path) -> None:
    path.write_bytes(b"this is no database, but a text. " * 400)


def pages_gone(path: Path) -> None:
    """The header and the schema stay; every other page is nonsense."""
    data = path.read_bytes()
    size = int.from_bytes(data[16:18], "big")
    path.write_bytes(data[:size] + b"\xa5" * (len(data) - size))


WRONG_FILES = {
    "file is not a database": overwritten,
    "database disk image is malformed": pages_gone,
}


@pytest.mark.parametrize("said", WRONG_FILES)
@pytest.mark.parametrize("action", ["read", "write", "upgrade"])
def test_a_damaged_file_is_one_line_with_what_to_do(tmp_path: Path, said: str, action: str) -> None:
    path = tmp_path / "store.db"
    with closing(Database(f"sqlite:///{path}")) as made:
        made.upgrade()
    for left in ("store.db-wal", "store.db-shm"):
        (tmp_path / left).unlink(missing_ok=True)
    WRONG_FILES[said](path)

    with closing(Database(f"sqlite:///{path}")) as database, pytest.raises(StoreError) as caught:
        use(database, action)()

    message = str(caught.value)
    assert message.startswith(f"store sqlite:///{path}: ")
    assert said in message
    assert "restore it from a backup" in message
    assert "\n" not in message, traceback.format_exception(caught.value)


def use(database: Database, action: str) -> Callable[[], None]:
    def read() -> None:
        with database.read() as session:
            session.scalars(select(GroupRow)).all()

    def write() -> None:
        with database.write() as session:
            session.execute(text("UPDATE answer_group SET reason = 'x'"))
            session.execute(text("INSERT INTO counter VALUES ('a', 'b', 1)"))

    return {"read": read, "write": write, "upgrade": database.upgrade}[action]
