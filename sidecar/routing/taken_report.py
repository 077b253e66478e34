"""Tell the store when this proxy took a routing table: the time until a rollback is in effect.

From then on every new request follows the table. A thread of its own writes the row, and tries
again for a while; no request waits for it, and a proxy that cannot tell serves all the same.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from sidecar.routing.table import RoutingTable
from sidecar.store.existing import open_existing
from sidecar.store.tables import TABLE_TAKEN

log = structlog.get_logger()
RETRY_S = 1.0
TRIES = 30
"""Attempts to write one row; after that the page says that this proxy has not told."""
STOP_S = 1.0
NAME_CHARACTERS = 255


def proxy_name(port: int, slot: int | None, project: str | None = None) -> str:
    """Name a process of a proxy: machine, port, which of several workers it is, and whose line of
    adapters the row is of, because a process has a row for each."""
    worker = "" if slot is None else f" worker {slot}"
    of = "" if project is None else f", project {project}"
    place = f":{port or os.getpid()}{worker}{of}"
    return socket.gethostname()[: NAME_CHARACTERS - len(place)] + place


class TakenReporter:
    """`report` returns at once; `stop` waits for an attempt in progress."""

    def __init__(self, store_url: str, proxy: str, clock: Callable[[], float] = time.time) -> None:
        """proxy: name of this process and line, one row each."""
        self._store_url = store_url
        self._proxy = proxy
        self._clock = clock
        self._stopped = threading.Event()
        self._newest: threading.Thread | None = None

    def report(self, table: RoutingTable) -> None:
        """Write that the table is in effect since now, in a thread."""
        if self._stopped.is_set():
            return
        self._newest = threading.Thread(
            target=self._write, args=(table, self._clock()), name="taken", daemon=True
        )
        self._newest.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._newest is not None:
            self._newest.join(STOP_S)

    def _write(self, table: RoutingTable, at: float) -> None:
        engine = open_existing(self._store_url)
        for tried in range(1, TRIES + 1):
            try:
                _store(engine, self._proxy, table, at)
                break
            except SQLAlchemyError as error:
                last = tried == TRIES or self._stopped.is_set()
                if tried == 1 or last:
                    why = str(getattr(error, "orig", None) or error)
                    event = "table_taken_not_told" if last else "table_taken_told_later"
                    log.warning(event, generation=table.generation, why=why)
                if last or self._stopped.wait(RETRY_S):
                    break
        engine.dispose()


def _store(engine: Engine, proxy: str, table: RoutingTable, at: float) -> None:
    """Write the row, unless it tells of a newer table already. Raises: SQLAlchemyError."""
    row = {"proxy": proxy, "model": table.model, "generation": table.generation, "taken_at": at}
    with engine.begin() as connection:
        # The engine has imported the dialect that is in use.
        if connection.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert
        else:
            from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
        statement = insert(TABLE_TAKEN).values(**row)
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["proxy"],
                set_={name: statement.excluded[name] for name in row if name != "proxy"},
                where=TABLE_TAKEN.c.taken_at <= statement.excluded.taken_at,
            )
        )
