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
from support.clock import Clock
from support.planted import plant

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


@pytest.mark.parametrize(
    ("table", "column", "where"),
    [
        ("answer_group", "group_id", "group_id = 'g1'"),
        ("answer_group", "judge_model", "group_id = 'g1'"),
        ("answer", "origin", "group_id = 'g1' AND \"index\" = 1"),
        ("answer", "explanation", "group_id = 'g1' AND \"index\" = 1"),
        ("exchange", "exchange_id", "exchange_id = 'x-g1'"),
        ("exchange", "timings", "exchange_id = 'x-g1'"),
    ],
)
async def test_a_damaged_row_costs_the_judge_no_other_group(
    judge_kit: JudgeKit, database: Database, clock: Clock, table: str, column: str, where: str
) -> None:
    for number in range(4):
        judge_kit.put_group(database, f"g{number}", "one", "two")
    plant(database, table, column, where)
    judge = judge_kit.FakeJudge(lambda shown: judge_kit.scores_reply(dict.fromkeys(shown, 0.25)))
    judging = judge_kit.worker(database, judge, clock)

    for _ in range(20):
        await judging.step()
        clock.now += 5

    with database.read() as session:
        found = set(session.scalars(select(GroupRow.status).where(GroupRow.seq != 2)))
    assert found == {"scored"}


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
def test_a_file_that_is_damaged_is_one_line_that_says_what_to_do(
    tmp_path: Path, said: str, action: str
) -> None:
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
