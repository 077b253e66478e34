"""Follow the routing tables in the store: a thread polls them, the relay reads attributes.

A new table takes effect at the next request. A table of an older generation is never taken. While
the store is away, or holds a table that cannot be read, the last table stays. Until a first table
was read the base answers. Each line of adapters (`sidecar.lines`) has a table, and one query reads
them all; one that is damaged costs only its own line an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import Connection, select

from sidecar.lines import project_of
from sidecar.metrics.proxy import Metrics
from sidecar.routing.store_watch import StoreReader, StoreWatch
from sidecar.routing.table import RoutingTable, decode_table
from sidecar.store.tables import ROUTING_TABLE

log = structlog.get_logger()


class FollowedTable:
    """The newest routing table of one line: `table` is what the relay obeys."""

    def __init__(self, line: str, metrics: Metrics, taken: Callable[[RoutingTable], None]) -> None:
        """taken: called with each table that is in effect from now on."""
        self.table = RoutingTable(model=line)
        self._seen = False
        self._failing: str | None = None
        self._metrics = metrics
        self._taken = taken
        project = project_of(line)
        of_project = metrics.project_generation
        self._generation = (
            metrics.routing_generation if project is None else of_project.labels(project)
        )

    def read(self, body: str | None) -> None:
        """Take what the store holds; None: it has no table of this line."""
        if body is None:
            self._recover()
            return
        try:
            found = decode_table(body)
        except (ValueError, TypeError) as error:  # bytes or a number, where a disk damaged the row
            self.fail("unreadable", str(error))
            return
        self._recover()
        self._take(found)

    def fail(self, reason: str, why: str) -> None:
        """Count a poll that failed; the last table stays."""
        self._metrics.routing_failures.labels(reason).inc()
        if self._failing != reason:  # several polls a second: log it once
            log.warning("routing_table_kept", line=self.table.model, reason=reason, why=why)
        self._failing = reason

    def _take(self, found: RoutingTable) -> None:
        if found.model != self.table.model:
            self.fail("other_model", found.model)
        elif not self._seen or self._is_newer(found):
            self._seen = True
            self.table = found
            self._generation.set(found.generation)
            self._taken(found)
            log.info(
                "routing_changed",
                line=found.model,
                generation=found.generation,
                champion=found.champion,
                canary=found.canary,
                canary_weight_bp=found.canary_weight_bp,
            )

    def _is_newer(self, found: RoutingTable) -> bool:
        """Another table of the same generation is newer too: the store's last word, after a
        damaged number that cannot grow."""
        now = self.table
        return found.generation > now.generation or (
            found.generation == now.generation and found != now
        )

    def _recover(self) -> None:
        if self._failing is not None:
            log.info("routing_table_readable_again", line=self.table.model, after=self._failing)
        self._failing = None


class RoutingSource:
    """The routing tables of all lines. `start` it, `stop` it."""

    def __init__(
        self,
        store_url: str,
        model: str,
        *,
        poll_s: float,
        metrics: Metrics,
        own: Sequence[str] = (),
        readers: Sequence[StoreReader] = (),
        taken: Callable[[RoutingTable], None] = lambda table: None,
    ) -> None:
        """model: name of the default line. own: names of the other lines.
        readers: read the store at each poll too, after the tables.
        taken: called with each table that is in effect from now on."""
        self.lines = {line: FollowedTable(line, metrics, taken) for line in (model, *own)}
        """By name of the line."""
        self.default = self.lines[model]
        columns = ROUTING_TABLE.c
        self._query = select(columns.model, columns.body).where(columns.model.in_(self.lines))
        self._watch = StoreWatch(store_url, (self, *readers), poll_s=poll_s)

    @property
    def table(self) -> RoutingTable:
        """The table of the default line."""
        return self.default.table

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
        """Read the tables once. Raises: SQLAlchemyError."""
        bodies = {row.model: row.body for row in connection.execute(self._query)}
        for line, followed in self.lines.items():
            followed.read(bodies.get(line))

    def store_away(self, why: str) -> None:
        """Count a poll that failed; the last tables stay."""
        self.default.fail("store_away", why)
