"""One schema: the row classes and the Core tables of the proxy agree."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from sqlalchemy import insert

from sidecar.store.database import Database
from sidecar.store.models import ApiKeyRow, Base, BreakerTripRow, RoutingRow
from sidecar.store.tables import METADATA


def test_a_start_removes_the_statistics_of_a_smaller_store(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(insert(ApiKeyRow.__table__).values(_key()))
        connection.exec_driver_sql("ANALYZE")
        assert ("api_key",) in connection.exec_driver_sql("SELECT tbl FROM sqlite_stat1").all()

    database.upgrade()

    with database.engine.begin() as connection:
        tables = connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all()
    database.close()
    assert not {"sqlite_stat1", "sqlite_stat4"} & set(tables)


def _key() -> dict[str, Any]:
    names = {"key_id", "project", "name", "secret_hash", "scopes"}
    numbers = {"best_of_max": 1, "created_at": 1.0, "generation": 1}
    return {**dict.fromkeys(names, "k"), **numbers}


def test_every_table_has_a_row_class() -> None:
    mapped = {mapper.local_table for mapper in Base.registry.mappers}

    assert mapped == set(METADATA.tables.values())


@pytest.mark.parametrize("row", [RoutingRow, BreakerTripRow, ApiKeyRow])
def test_a_row_class_of_a_core_table_tells_the_types_of_its_columns(row: Any) -> None:
    hints = get_type_hints(row)
    told = {name: get_args(hints[name])[0] for name in row.__annotations__}

    expected = {
        column.name: column.type.python_type | None if column.nullable else column.type.python_type
        for column in row.__table__.columns
    }
    assert told == expected
    assert any(NoneType in get_args(kind) for kind in told.values()) is (row is ApiKeyRow)
