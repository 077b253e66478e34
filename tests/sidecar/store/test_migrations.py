"""The schema of both stores: of a new one, and of one that migrations bring from the baseline.

`baseline_*.sql` make a store of revision 0039, one statement a line. They never change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    inspect,
    select,
    text,
)

from sidecar.errors import StoreOlderError
from sidecar.store.database import Database
from sidecar.store.engines import MIGRATIONS
from support.migrated_store import LATER, add_revision
from support.stores import NewStore

pytestmark = pytest.mark.both_stores


DROPPED = {"idempotent_reply", "rescoring", "judge_noise", "judge_call.again"}
"""Tables and columns that later migrations dropped."""


@contextmanager
def alembic(database: Database) -> Iterator[tuple[Config, Connection]]:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        yield config, connection


def test_upgrading_an_empty_store_gives_the_models_and_twice_is_once(empty_store: str) -> None:
    with closing(Database(empty_store)) as database:
        database.upgrade()
        database.upgrade()

        with alembic(database) as (config, _):
            command.check(config)  # raises when a migration is missing


def test_a_store_of_the_baseline_keeps_its_rows_and_has_the_schema_of_a_new_one(
    empty_store: str, new_store: NewStore
) -> None:
    with closing(Database(empty_store)) as database:
        with database.engine.begin() as connection:
            frozen = Path(__file__).with_name(f"baseline_{connection.dialect.name}.sql")
            for statement in frozen.read_text("utf-8").splitlines():
                connection.exec_driver_sql(statement)
            tables = [one for one in add_rows(connection, 1) if one.name not in DROPPED]
            kept = [[one for one in table.c if str(one) not in DROPPED] for table in tables]
            before = [connection.execute(select(*columns)).all() for columns in kept]

        database.upgrade()

        with alembic(database) as (config, connection):
            assert [connection.execute(select(*columns)).all() for columns in kept] == before
            add_rows(connection, 2)
            assert all(len(connection.execute(select(*one)).all()) == 2 for one in kept)
            command.check(config)
        assert schema(database) == schema(new_store())


def test_a_later_migration_changes_stores_of_today_and_not_new_ones(
    empty_store: str,
    new_store: NewStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    database = new_store()
    add_revision(tmp_path / "migrations", monkeypatch)

    database.upgrade_if_behind()

    assert database.revision() == LATER
    assert "later" in schema(database)["flag"]["columns"]
    with closing(Database(empty_store)) as new:
        new.upgrade()
        assert new.revision() == LATER
        assert "later" not in schema(new)["flag"]["columns"]  # the models do not have it


@pytest.mark.parametrize("work", [Database.upgrade, Database.upgrade_if_behind])
def test_a_store_older_than_the_baseline_is_refused_in_one_line(
    new_store: NewStore, work: Callable[[Database], None]
) -> None:
    database = new_store()
    with database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0038_failed_twice'"))

    with pytest.raises(StoreOlderError) as caught:
        work(database)

    line = str(caught.value)
    assert "its schema 0038_failed_twice is older than 0039_address_hash" in line
    assert "the last commit that has the migration 0038_failed_twice" in line
    assert "\n" not in line


def schema(database: Database) -> dict[str, Any]:
    """Each table's columns, keys, constraints and indexes. Without types on SQLite: the
    tables of a new store are STRICT, those of an older one stay as they are."""
    found = inspect(database.engine)
    typed = database.engine.dialect.name == "postgresql"
    return {
        name: {
            "columns": {
                one["name"]: (str(one["type"]) * typed, one["nullable"], one["default"])
                for one in found.get_columns(name)
            },
            "primary key": found.get_pk_constraint(name),
            "foreign keys": sorted(map(repr, found.get_foreign_keys(name))),
            "unique": sorted(map(repr, found.get_unique_constraints(name))),
            "checks": sorted(map(repr, found.get_check_constraints(name) * typed)),
            "indexes": sorted(
                f"{one} {sorted((key, str(value)) for key, value in options.items())}"
                for one in found.get_indexes(name)
                for options in [one.pop("dialect_options", {})]
            ),
        }
        for name in found.get_table_names()
    }


def reflected(connection: Connection) -> MetaData:
    metadata = MetaData()
    metadata.reflect(connection)
    return metadata


def add_rows(connection: Connection, number: int) -> list[Table]:
    """Put a row into each table. Returns: the tables."""
    tables = [one for one in reflected(connection).sorted_tables if one.name != "alembic_version"]
    for table in tables:
        row = {
            column.name: value(column, number)
            for column in table.columns
            if column.name != "seq"  # the store counts it
        }
        connection.execute(table.insert().values(row))
    return tables


def value(column: Column[Any], number: int) -> object:
    match column.type:
        case String():
            return f"r{number}"
        case LargeBinary():
            return b""
        case Boolean():
            return False
        case JSON():
            return {}
        case Numeric():
            return 1.5
        case _:
            return number
