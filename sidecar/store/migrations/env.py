"""Alembic's entry point. `Database.upgrade` passes a connection; a command gives `-x url=...`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, insert

from sidecar.store import traces
from sidecar.store.database import Database
from sidecar.store.models import Base, FlagRow


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:
        url = context.get_x_argument(as_dictionary=True).get("url", "sqlite:///.sidecar/store.db")
        with Database(url).engine.begin() as opened:
            _migrate(opened)
    else:
        _migrate(connection)


def _migrate(connection: Connection) -> None:
    """A store without a revision is new: it gets the tables of the models, and the newest one."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        compare_type=connection.dialect.name == "postgresql",  # STRICT tables know five types
    )
    with context.begin_transaction():
        if context.get_context().get_current_revision() is None:
            _create_tables(connection)
            context.get_context().stamp(context.script, "head")
        context.run_migrations()


def _create_tables(connection: Connection) -> None:
    tables = Base.metadata.tables.values()
    if connection.dialect.name == "postgresql":
        for index in (index for table in tables for index in table.indexes):
            where = index.dialect_options["sqlite"]["where"]
            index.dialect_options["postgresql"]["where"] = where
    Base.metadata.create_all(connection, checkfirst=False)
    if connection.dialect.name == "sqlite":  # every writer overwrites what it deletes
        whole = {"name": traces.FLAG, "value": traces.REWRITTEN, "updated_at": 0}
        connection.execute(insert(FlagRow).values(whole))


run()
