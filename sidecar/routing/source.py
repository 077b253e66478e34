"""Follow the routing table in the store: a thread looks, the relay reads an attribute.

A table is obeyed from the next request on. A table of an older generation is never taken, and when
the store is away, or holds rubbish, the last table stays. Before the first one the base answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import structlog
from sqlalchemy import Connection, column, select, table

from sidecar.metrics.proxy import Metrics
from sidecar.routing.store_watch import StoreReader, StoreWatch
from sidecar.routing.table import RoutingTable, decode_table

log = structlog.get_logger()
_ROUTING = table("routing_table", column("model"), column("body"))


class RoutingSource:
    """`table` is what the relay obeys. `start` it, `stop` it."""

    def __init__(
        self,
        store_url: str,
        model: str,
        *,
        poll_s: float,
        metrics: Metrics,
        readers: Sequence[StoreReader] = (),
    ) -> None:
        """readers: what else is read from the store at each look, after the table."""
        self.table = RoutingTable(model=model)
        self._seen = False
        self._failing: str | None = None
        self._metrics = metrics
        self._query = select(_ROUTING.c.body).where(_ROUTING.c.model == model)
        self._watch = StoreWatch(store_url, (self, *readers), poll_s=poll_s)

    def start(self) -> None:
        """Look once, then go on looking in a thread."""
        self._watch.start()

    def stop(self) -> None:
        self._watch.stop()

    def look(self) -> None:
        """Look at the store now. Never raises: a look that fails is counted."""
        self._watch.look()

    def read(self, connection: Connection) -> None:
        """One look. Raises: SQLAlchemyError."""
        body = connection.execute(self._query).scalar_one_or_none()
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

    def store_away(self, why: str) -> None:
        """A look that failed."""
        self._fail("store_away", why)

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

    def _fail(self, reason: str, why: str) -> None:
        self._metrics.routing_failures.labels(reason).inc()
        if self._failing != reason:  # polled five times a second: say it once
            log.warning("routing_table_kept", reason=reason, why=why)
        self._failing = reason

    def _recover(self) -> None:
        if self._failing is not None:
            log.info("routing_table_readable_again", after=self._failing)
        self._failing = None
