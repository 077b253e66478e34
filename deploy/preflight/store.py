"""Check that a PostgreSQL store can be reached and hold the tables. Nothing is made or changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from sqlalchemy import text

from deploy.preflight.findings import Finding, error
from sidecar.errors import StoreError
from sidecar.store.database import Database
from sidecar.store.postgres import is_postgres, with_driver

KEY = "store.url"


def check_store(url: str) -> Iterator[Finding]:
    """Yield what keeps the processes from using this store. SQLite: see `places`."""
    if not is_postgres(with_driver(url)):
        return
    try:
        with closing(Database(url)) as database, database.read() as session:
            encoding = session.scalar(text("SHOW server_encoding"))
            schema = session.scalar(text("SELECT current_schema()"))
            may_create = schema is not None and session.scalar(
                text("SELECT has_schema_privilege(:schema, 'CREATE')"), {"schema": schema}
            )
    except StoreError as problem:
        yield error(KEY, f"{problem}; start the server, make the database, or correct the URL")
        return
    if encoding != "UTF8":
        yield error(
            KEY,
            f"the encoding of the database is {encoding}; make one with `createdb --encoding UTF8 "
            "--template template0 NAME`",
        )
    if not may_create:
        yield error(
            KEY,
            "its user may not make tables there; make the user the database's owner, or GRANT "
            "CREATE ON SCHEMA public",
        )
