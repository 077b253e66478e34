"""Follow the routing table in the store: a thread looks, the relay reads an attribute.

A table is obeyed from the next request on. A table of an older generation is never taken, and when
the store is away, or holds rubbish, the last table stays. Before the first one the base answers.
"""

from __future__ import annotations

import threading

import msgspec
import structlog
from sqlalchemy import Engine, column, create_engine, make_url, select, table
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from sidecar.errors import SettingsError
from sidecar.metrics import Metrics
from sidecar.routing import RoutingTable, decode_table

log = structlog.get_logger()
_ROUTING = table("routing_table", column("model"), column("body"))


class RoutingSource:
    """`table` is what the relay obeys. `start` it, `stop` it."""

    def __init__(self, store_url: str, model: str, *, poll_s: float, metrics: Metrics) -> None:
        self.table = RoutingTable(model=model)
        self._seen = False
        self._failing: str | None = None
        self._poll_s = poll_s
        self._metrics = metrics
        self._engine = _open(store_url)
        self._query = select(_ROUTING.c.body).where(_ROUTING.c.model == model)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="routing", daemon=True)

    def start(self) -> None:
        """Look once, then go on looking in a thread."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._engine.dispose()

    def look(self) -> None:
        """Look at the store now. Never raises: a look that fails is counted."""
        try:
            with self._engine.connect() as connection:
                body = connection.execute(self._query).scalar_one_or_none()
        except SQLAlchemyError as error:
            self._fail("store_away", str(getattr(error, "orig", None) or error))
            return
        if body is None:
            self._recover()
            return
        try:
            found = decode_table(body)
        except msgspec.MsgspecError as error:
            self._fail("unreadable", str(error))
            return
        self._recover()
        self._take(found)

    def _take(self, found: RoutingTable) -> None:
        if found.model != self.table.model:
            self._fail("other_model", found.model)
        elif not self._seen or found.generation > self.table.generation:
            self._seen = True
            self.table = found
            self._metrics.routing_generation.set(found.generation)
            log.info(
                "routing_changed",
                generation=found.generation,
                champion=found.champion,
                canary=found.canary,
                canary_weight_bp=found.canary_weight_bp,
            )

    def _run(self) -> None:
        while not self._stopping.wait(self._poll_s):
            self.look()

    def _fail(self, reason: str, why: str) -> None:
        self._metrics.routing_failures.labels(reason).inc()
        if self._failing != reason:  # ten looks a second: say it once
            log.warning("routing_table_kept", reason=reason, why=why)
        self._failing = reason

    def _recover(self) -> None:
        if self._failing is not None:
            log.info("routing_table_readable_again", after=self._failing)
        self._failing = None


def _open(store_url: str) -> Engine:
    try:
        url = make_url(store_url)
    except ArgumentError as error:
        raise SettingsError(f"store.url {store_url!r} is not a database URL") from error
    if url.get_backend_name() != "sqlite" or not url.database:
        return create_engine(url, pool_pre_ping=True)
    # mode=rw: never make the file, it is not ours. No pool: a file that was replaced is followed.
    query = {**url.query, "mode": "rw", "uri": "true"}
    path = url.database if url.database.startswith("file:") else f"file:{url.database}"
    opened = url.set(database=path, query=query)
    return create_engine(opened, poolclass=NullPool, connect_args={"timeout": 1.0})
