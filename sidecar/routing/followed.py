"""Follow every line of adapters: its routing table, its breaker, and what the store is told.

The default line answers all projects that have no line of their own. What happens in one line, a
rollback, a canary, a trip of the breaker, leaves the others as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from sidecar.lines import Line
from sidecar.metrics.proxy import Metrics
from sidecar.routing.breaker import Breaker
from sidecar.routing.breaker_report import TripReader, TripReporter, Watched
from sidecar.routing.source import FollowedTable, RoutingSource
from sidecar.routing.store_watch import RevisionReader, StoreReader
from sidecar.routing.table import RoutingTable
from sidecar.routing.taken_report import TakenReporter, proxy_name


class FollowedLines:
    """`source` is to be started and stopped, then `stop` called."""

    def __init__(
        self,
        lines: Sequence[Line],
        *,
        store_url: str,
        state_dir: Path,
        poll_s: float,
        metrics: Metrics,
        port: int,
        slot: int | None = None,
        memory: Mapping[str, memoryview] = MappingProxyType({}),
        row: int = 0,
        rows: int = 1,
        readers: Sequence[StoreReader] = (),
    ) -> None:
        """lines: the default one first. port, slot: name this process (`proxy_name`).
        memory: by name of a line, what the workers' breakers share; a line without any counts
            alone. row, rows: as for `Breaker`. readers: as for `RoutingSource`, before the trips.
        """
        self._reporters: list[TripReporter] = []
        self._taken: dict[str, TakenReporter] = {}
        self.breakers: dict[str, Breaker] = {}
        """By name of the line."""
        trips: list[Watched] = []
        for line in lines:
            project = line.project
            reporter = TripReporter(store_url, state_dir, project=project)
            shown = metrics.breaker_open
            if project is not None:
                shown = metrics.project_breaker_open.labels(project)
            breaker = Breaker(metrics, memory.get(line.name), row, rows, reporter.report, shown)
            last_trip = reporter.recall()
            if last_trip is not None:
                breaker.recall(last_trip[0])
            self._reporters.append(reporter)
            self._taken[line.name] = TakenReporter(store_url, proxy_name(port, slot, project))
            self.breakers[line.name] = breaker
            trips.append(
                Watched(line=line.name, breaker=breaker, reporter=reporter, show=shown.set)
            )
        self.source = RoutingSource(
            store_url,
            lines[0].name,
            poll_s=poll_s,
            metrics=metrics,
            own=[line.name for line in lines[1:]],
            readers=(*readers, TripReader(trips, self._table), RevisionReader()),
            taken=self._report_taken,
        )
        self.own: dict[str, tuple[FollowedTable, Breaker]] = {
            line.project: (self.source.lines[line.name], self.breakers[line.name])
            for line in lines
            if line.project is not None
        }
        """Project -> its table and its breaker, for projects with lines of their own."""
        self.default = (self.source.default, self.breakers[lines[0].name])

    def stop(self) -> None:
        """Wait for attempts in progress to tell the store, a second or so for all lines."""
        ends = [*self._reporters, *self._taken.values()]
        with ThreadPoolExecutor(len(ends)) as threads:
            list(threads.map(lambda one: one.stop(), ends))

    def _table(self, line: str) -> RoutingTable:
        return self.source.lines[line].table

    def _report_taken(self, table: RoutingTable) -> None:
        self._taken[table.model].report(table)
