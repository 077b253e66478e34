"""A damaged value in any column of any table costs its row, and nothing else.

The damage is written past the library, into tables that are not STRICT, as a faulty disk would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Float, LargeBinary, String, Table, select, text
from sqlalchemy.exc import IntegrityError

from sidecar.errors import StoreBusyError
from sidecar.store.database import Database
from sidecar.store.models import CounterRow, QuarantineRow
from sidecar.store.quarantine import STAGE
from sidecar.store.tables import METADATA, JsonArray, JsonObject
from support.finished_run import finished_run
from support.migrated_store import open_migrated

NO_UTF8 = b"\xff\x80\xc3"
SOUND = "sound"


def value_of(column: Column[Any], row: str, number: int) -> object:
    """A value that the column may hold, its own in each row."""
    if isinstance(column.type, JsonObject | JsonArray):
        return "{}" if isinstance(column.type, JsonObject) else "[]"
    if isinstance(column.type, LargeBinary):
        return b"\x01\x02\x03\x04"
    return row if isinstance(column.type, String) else number


def damaged(column: Column[Any]) -> tuple[str, object]:
    """The SQL of a value that the column may not hold, and its parameter."""
    if isinstance(column.type, JsonObject):
        return "?", "[1]"
    if isinstance(column.type, JsonArray):
        return "?", '["cut'
    if isinstance(column.type, String):
        return "CAST(? AS TEXT)", NO_UTF8
    return ("?", "text") if isinstance(column.type, LargeBinary) else ("?", NO_UTF8)


@pytest.fixture
def database(tmp_path: Path) -> Any:
    path = tmp_path / "store.db"
    with closing(open_migrated(path)) as made, closing(made.engine.raw_connection()) as raw:
        raw.execute("PRAGMA writable_schema=ON")
        raw.execute("UPDATE sqlite_master SET sql = replace(sql, ' STRICT', '')")
        raw.commit()
    with closing(Database(f"sqlite:///{path}")) as opened:
        yield opened


def fill(database: Database, table: Table) -> dict[str, Column[Any]]:
    """Store a row for each column, damaged in that one, and a sound one. Returns: row -> column."""
    # The number of a row is its place in the file: SQLite itself refuses another value there.
    columns = [one for one in table.columns if not (one.primary_key and one.name == "seq")]
    rows = {f"row{number}": column for number, column in enumerate(columns)}
    names = ", ".join(f'"{one.name}"' for one in table.columns)
    with closing(database.engine.raw_connection()) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute("PRAGMA ignore_check_constraints=ON")
        for number, row in enumerate([*rows, SOUND], start=1):
            values = [value_of(one, row, number) for one in table.columns]
            marks = ", ".join("?" * len(values))
            raw.execute(f'INSERT INTO "{table.name}" ({names}) VALUES ({marks})', values)
            if row in rows:
                sql, value = damaged(rows[row])
                raw.execute(
                    f'UPDATE "{table.name}" SET "{rows[row].name}" = {sql} WHERE rowid = {number}',
                    (value,),
                )
        raw.execute("PRAGMA ignore_check_constraints=OFF")
        raw.execute("PRAGMA foreign_keys=ON")
    return rows


@pytest.mark.parametrize("table", METADATA.sorted_tables, ids=lambda table: table.name)
def test_a_damaged_value_in_any_column_costs_its_row(database: Database, table: Table) -> None:
    rows = fill(database, table)

    with pytest.raises(StoreBusyError, match=f"into quarantine: {len(rows)}; repeat"):
        read(database, table)
    found = read(database, table)

    number = len(rows) + 1
    sound = {one.name: value_of(one, SOUND, number) for one in table.columns}
    assert plain(table, sound) in [plain(table, row) for row in found]
    with database.read() as session:
        noted = session.scalars(select(QuarantineRow).order_by(QuarantineRow.seq)).all()
        counted = session.scalars(select(CounterRow).where(CounterRow.stage == STAGE)).all()
    noted = [one for one in noted if one.detail.startswith("no ")]
    assert [one.detail.split(" in ")[1] for one in noted] == [one.name for one in rows.values()]
    assert {one.table_name for one in noted} == {table.name}
    assert sum(one.count for one in counted) == len(rows)


def read(database: Database, table: Table) -> list[Any]:
    with database.read() as session:
        return [row._mapping for row in session.execute(select(table))]


def plain(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are read as they are stored."""
    kinds = (String, Float, LargeBinary)
    return {name: row[name] for name in row if isinstance(table.columns[name].type, kinds)}


def test_a_row_that_others_stand_on_is_kept_with_a_mark(database: Database) -> None:
    table = METADATA.tables["exchange"]
    fill(database, table)
    with pytest.raises(StoreBusyError):
        read(database, table)

    found = {row["exchange_id"]: row for row in read(database, table)}

    # Its number stays; without a name of its own it is gone.
    assert len(found) == len(table.columns) - 1
    marked = {row["untrainable_reason"] for name, row in found.items() if name != SOUND}
    assert marked == {"unreadable"}
    assert found[SOUND]["untrainable_reason"] == SOUND


def test_a_text_that_the_driver_refuses_in_a_write_rolls_it_back(database: Database) -> None:
    fill(database, METADATA.tables["flag"])

    def change(session: Any) -> list[float]:
        session.execute(text("UPDATE flag SET updated_at = updated_at + 1.0 WHERE name = 'sound'"))
        flags = session.execute(select(METADATA.tables["flag"])).all()
        return [row.updated_at for row in flags if row.name == SOUND]

    assert database.repeat(change) == [4.0 + 1.0]


@pytest.mark.parametrize("value", ["x'00'", "'[1'", "'text'"])
def test_a_new_store_refuses_a_value_of_another_type(tmp_path: Path, value: str) -> None:
    with closing(open_migrated(tmp_path / "store.db")) as database, database.write() as session:
        session.add(finished_run("r"))
        session.flush()
        for column in ("settings", "started_at"):
            with pytest.raises(IntegrityError), session.begin_nested():
                session.execute(text(f"UPDATE training_run SET {column} = {value}"))
