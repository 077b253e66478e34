"""Alembic's entry point. `Database.upgrade` passes a connection; a command gives `-x url=...`."""

from __future__ import annotations

from alembic import context

from sidecar.store.database import Database
from sidecar.store.models import Base


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:
        url = context.get_x_argument(as_dictionary=True).get("url", "sqlite:///.sidecar/store.db")
        with Database(url).engine.begin() as opened:
            _migrate(opened)
    else:
        _migrate(connection)


def _migrate(connection: object) -> None:
    context.configure(
        connection=connection,  # type: ignore[arg-type]  # alembic's stub names a narrower type
        target_metadata=Base.metadata,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
