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
from sqlalchemy import String, select, text

from sidecar.errors import StoreError
from sidecar.store.database import Database
from sidecar.store.models import AnswerRow, Base, ChoiceRow, ExchangeRow, GroupRow
from support.clock import Clock

if TYPE_CHECKING:
    from tests.ingest.conftest import JudgeKit


NO_UTF8 = "CAST(x'ff80c3' AS TEXT)"
MOST_STEPS = 40

DAMAGED = "g1"
WHERE = {
    GroupRow: f"group_id = '{DAMAGED}'",
    AnswerRow: f"group_id = '{DAMAGED}' AND \"index\" = 1",
    ExchangeRow: f"exchange_id = 'x-{DAMAGED}'",
    ChoiceRow: f"exchange_id = 'x-{DAMAGED}'",
}
COLUMNS = [
    (table, column.name)
    for table in WHERE
    for column in table.__table__.columns
    if isinstance(column.type, String)
] + [(GroupRow, "judge_attempts"), (GroupRow, "created_at"), (AnswerRow, "temperature")]


def damage(database: Database, table: type[Base], column: str, value: str = NO_UTF8) -> None:
    with closing(database.engine.raw_connection()) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(f'UPDATE {table.__tablename__} SET "{column}" = {value} WHERE {WHERE[table]}')
        raw.execute("PRAGMA foreign_keys=ON")


def test_bytes_that_are_no_utf8_are_read_as_replaced_text(database: Database) -> None:
    with database.read() as session:
        found = session.scalar(text("SELECT CAST(x'41ff42c3a4' AS TEXT)"))

    assert found == "A\ufffdBä"


@pytest.mark.parametrize(("table", "column"), COLUMNS)
async def test_bytes_that_are_no_utf8_cost_the_judge_no_other_group(
    judge_kit: JudgeKit, database: Database, clock: Clock, table: type[Base], column: str
) -> None:
    for number in range(4):
        judge_kit.put_group(database, f"g{number}", "one", "two")
    damage(database, table, column)
    judge = judge_kit.FakeJudge(lambda shown: judge_kit.scores_reply(dict.fromkeys(shown, 0.25)))
    judging = judge_kit.worker(database, judge, clock)

    others = select(GroupRow.status).where(GroupRow.seq != 2)
    found: set[str] = set()
    for _ in range(MOST_STEPS):
        await judging.step()
        clock.now += 5
        with database.read() as session:
            found = set(session.scalars(others))
        if found == {"scored"}:
            break

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
