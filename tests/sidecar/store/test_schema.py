"""One schema: the row classes and the Core tables of the proxy agree."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest

from sidecar.store.models import ApiKeyRow, Base, BreakerTripRow, RoutingRow
from sidecar.store.tables import METADATA


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
