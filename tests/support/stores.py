"""Fixtures that run a test on both stores: SQLite, and PostgreSQL where one can be had.

A module with `pytestmark = pytest.mark.both_stores` runs each test that uses a store twice. Other
tests use SQLite, or what `SIDECAR_TEST_STORE` names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Connection, Engine

from sidecar.store.database import Database
from support.migrated_store import open_migrated
from support.postgres import Databases, NoPostgresError, databases

KINDS = ("sqlite", "postgres")
NewStore = Callable[[], Database]
"""Make another store with all tables and no rows, and open it."""
_COMPILED: dict[Any, Any] = {}


class _SameDialect(SQLiteDialect_pysqlite):
    """A dialect that equals each other of its kind: all stores of the tests are opened alike."""

    supports_statement_cache = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameDialect)

    def __hash__(self) -> int:
        return hash(_SameDialect)


def share_compiled_statements() -> None:
    """All SQLite engines of this process take compiled statements from one cache.

    Each engine has a cache of its own, and most tests open a store of their own: compiling took a
    fifth of the CPU seconds of the tests of deploy.
    """

    @event.listens_for(Engine, "engine_connect")
    def share(connection: Connection) -> None:
        if isinstance(connection.dialect, SQLiteDialect_pysqlite):
            connection.dialect.__class__ = _SameDialect
            connection.engine._compiled_cache = _COMPILED


def run_on_both(metafunc: pytest.Metafunc) -> None:
    """What `pytest_generate_tests` does for the mark `both_stores`."""
    if "store_kind" in metafunc.fixturenames and metafunc.definition.get_closest_marker(
        "both_stores"
    ):
        metafunc.parametrize("store_kind", KINDS, indirect=True)


@pytest.fixture
def store_kind(request: pytest.FixtureRequest) -> str:
    kind: str = getattr(request, "param", os.environ.get("SIDECAR_TEST_STORE", "sqlite"))
    return kind


@pytest.fixture(scope="session")
def postgres() -> Iterator[Databases]:
    """Databases on a PostgreSQL; the test is skipped where there is none."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(databases())
        except NoPostgresError as error:
            pytest.skip(f"no PostgreSQL here: {error}")
        yield made


@pytest.fixture
def empty_store(store_kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store without tables."""
    if store_kind == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.db"
        return
    made: Databases = request.getfixturevalue("postgres")
    url = made.new(migrated=False)
    yield url
    made.drop(url)


@pytest.fixture
def new_store(
    store_kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[NewStore]:
    names = (f"store{number or ''}.db" for number in count())
    opened: list[Database] = []
    made: Databases | None = None
    if store_kind == "postgres":
        made = request.getfixturevalue("postgres")

    def new() -> Database:
        opened.append(
            open_migrated(tmp_path / next(names)) if made is None else Database(made.new())
        )
        return opened[-1]

    yield new
    for database in opened:
        database.close()
        if made is not None:
            made.drop(database.url)
