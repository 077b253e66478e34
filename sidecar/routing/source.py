"""Follow the routing table in the store: a thread polls it, the relay reads an attribute.

A new table takes effect at the next request. A table of an older generation is never taken. While
the store is away, or holds a table that cannot be read, the last table stays. Until a first table
was read the base answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import Connection, select

from sidecar.metrics.proxy import Metrics
from sidecar.routing.store_watch import StoreReader, StoreWatch
from sidecar.routing.table import RoutingTable, decode_table
from sidecar.store.tables import ROUTING_TABLE

log = structlog.get_logger()


class RoutingSource:
    """`table` is the table that the relay obeys. `start` it, `stop` it."""

    def __init__(
        self,
        store_url: str,
        model: str,
        *,
        poll_s: float,
        metrics: Metrics,
        readers: Sequence[StoreReader] = (),
        taken: Callable[[RoutingTable], None] = lambda table: None,
    ) -> None:
        """readers: read the store at each poll too, after the table. taken: called with each table
        that is in effect from now on."""
        self.table = RoutingTable(model=model)
        self._seen = False
        self._failing: str | None = None
        self._metrics = metrics
        self._taken = taken
        self._query = select(ROUTING_TABLE.c.body).where(ROUTING_TABLE.c.model == model)
        self._watch = StoreWatch(store_url, (self, *readers), poll_s=poll_s)

    def start(self) -> None:
        """Poll once, then go on in a thread."""
        self._watch.start()

    def stop(self) -> None:
        """End the thread."""
        self._watch.stop()

    def poll(self) -> None:
        """Poll the store now. Never raises: a poll that fails is counted."""
        self._watch.poll()

    def read(self, connection: Connection) -> None:
        """Read the table once. Raises: SQLAlchemyError."""
        body = connection.execute(self._query).scalar_one_or_none()
        if body is None:
            self._recover()
            return
        try:
            found = decode_table(body)
        except (ValueError, TypeError) as error:  # bytes or a number, where a disk damaged the row
            self._fail("unreadable", str(error))
            return
        self._recover()
        self._take(found)

    def store_away(self, why: str) -> None:
        """Count a poll that failed; the last table stays."""
        self._fail("store_away", why)

    def _take(self, found: RoutingTable) -> None:
        if found.model != self.table.model:
            self._fail("other_model", found.model)
        elif not self._seen or found.generation > self.table.generation:
            self._seen = True
            self.table = found
            self._metrics.routing_generation.set(found.generation)
            self._taken(found)
            log.info(
                "routing_changed",
                generation=found.generation,
                champion=found.champion,
                canary=found.canary,
                canary_weight_bp=found.canary_weight_bp,
            )

    def _fail(self, reason: str, why: str) -> None:
        self._metrics.routing_failures.labels(reason).inc()
        if self._failing != reason:  # several polls a second: log it once
            log.warning("routing_table_kept", reason=reason, why=why)
        self._failing = reason

    def _recover(self) -> None:
        if self._failing is not None:
            log.info("routing_table_readable_again", after=self._failing)
        self._failing = None
