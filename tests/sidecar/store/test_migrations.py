"""The migrations on both stores: from nothing, and from each revision with what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Connection,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    func,
    select,
)

from sidecar.store.database import MIGRATIONS, Database

pytestmark = pytest.mark.both_stores


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


def test_rows_of_each_revision_come_through_all_later_ones(empty_store: str) -> None:
    with closing(Database(empty_store)) as database:
        with alembic(database) as (config, _):
            revisions = list(ScriptDirectory.from_config(config).walk_revisions())[::-1]
        expected: Counter[str] = Counter()
        for number, revision in enumerate(revisions, start=1):
            with alembic(database) as (config, connection):
                command.upgrade(config, revision.revision)
                expected.update(add_rows(connection, number))

        with alembic(database) as (config, connection):
            command.check(config)
            tables = reflected(connection).sorted_tables
            found = {
                table.name: connection.scalar(select(func.count()).select_from(table))
                for table in tables
            }
    assert found == {**expected, "alembic_version": 1}
    assert found["exchange"] == len(revisions)


def reflected(connection: Connection) -> MetaData:
    metadata = MetaData()
    metadata.reflect(connection)
    return metadata


def add_rows(connection: Connection, number: int) -> list[str]:
    """Put a row into each table. Returns: the tables."""
    tables = [one for one in reflected(connection).sorted_tables if one.name != "alembic_version"]
    for table in tables:
        row = {
            column.name: value(column, number)
            for column in table.columns
            if column.name != "seq"  # the store counts it
        }
        connection.execute(table.insert().values(row))
    return [table.name for table in tables]


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
