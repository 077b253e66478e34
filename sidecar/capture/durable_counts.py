"""Tell the store what became of this proxy's requests, a few seconds behind.

Metrics end with the process; the funnel of control must not. A thread of its own adds what the
metrics grew by to the table `counter`, in one transaction. While the store is away the numbers stay
in the metrics, and are told when it is back. A proxy that is killed takes at most what came since
the last transaction along.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from sidecar.metrics.families import Family, merge_tables

log = structlog.get_logger()
INTERVAL_S = 5.0
"""Seconds between two transactions; each takes about a millisecond of the store's write lock."""
STOP_S = 5.0
"""Longest wait for the last transaction."""
REQUESTS, CAPTURE, BUS, RETENTION = "requests", "capture", "bus", "retention"
"""Stages of the counter rows."""
KEPT = "kept"
REFUSED = "refused_"
"""Beginning of the reasons of requests that the proxy refused for what their bodies say."""
FORWARDED = "forwarded"
Counts = dict[tuple[str, str], int]
"""(stage, reason) -> records."""
Cells = dict[bytes, tuple[float, ...]]
"""A table of metrics, as `MetricTable.read` returns it."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A metric, and what its counter rows are called: a label follows the reason."""

    metric: str
    stage: str
    reason: str = ""
    label: str = ""

    @property
    def family(self) -> Family:
        labels = (self.label,) if self.label else ()
        return Family(kind="counter", name=self.metric, help="", label_names=labels)


SOURCES = (
    _Source("sidecar_captures_kept", CAPTURE, KEPT),
    _Source("sidecar_captures_lost", CAPTURE, "lost_", "reason"),
    _Source("sidecar_captures_skipped", CAPTURE, "skipped_", "reason"),
    _Source("sidecar_forwarded", BUS, FORWARDED),
    _Source("sidecar_forward_set_aside", BUS, "set_aside_", "reason"),
    _Source("sidecar_forward_expired", RETENTION, "proxy_dead_letters"),
    _Source("sidecar_outbox_rows_gone", BUS, "outbox_gone"),
    _Source("sidecar_exchanges", REQUESTS, "", "outcome"),
    _Source("sidecar_models_unknown", REQUESTS, f"{REFUSED}unknown_model"),
    _Source("sidecar_bodies_unreadable", REQUESTS, REFUSED, "reason"),
)


def counts_of(tables: Iterable[Cells]) -> Counts:
    """Add up the tables of all processes of a proxy, as counter rows. Pure."""
    merged = merge_tables([source.family for source in SOURCES], tables)
    return {
        (source.stage, source.reason + "".join(labels)): int(cells[0])
        for source in SOURCES
        for labels, cells in merged[source.metric].items()
    }


def growth(before: Mapping[tuple[str, str], int], now: Counts) -> Counts:
    """Return by how much each count grew, without zeros. Pure."""
    grown = {key: number - before.get(key, 0) for key, number in now.items()}
    return {key: number for key, number in grown.items() if number > 0}


class DurableCounts:
    """`start`, then `stop`. One for each proxy, also for one of several workers."""

    def __init__(
        self,
        store_url: str,
        read: Callable[[], Sequence[Cells]],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """read: returns the metrics of all processes of the proxy."""
        self._store_url = store_url
        self._read = read
        self._interval_s = interval_s
        self._told: Counts = {}
        self._away = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="counts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tell the last counts. Call it when no request is left."""
        self._stopping.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        # Imported in the thread: the parent of several workers has no other use for SQLAlchemy.
        from sqlalchemy.exc import SQLAlchemyError

        from sidecar.store.counts import add_counts
        from sidecar.store.existing import open_existing

        engine = open_existing(self._store_url)
        while True:
            last = self._stopping.wait(self._interval_s)
            now = counts_of(self._read())
            grown = growth(self._told, now)
            if grown:
                try:
                    with engine.begin() as connection:
                        add_counts(connection, grown)
                except SQLAlchemyError as error:
                    self._say_away(str(error), lost=last)
                else:
                    self._told, self._away = now, False
            if last:
                break
        engine.dispose()

    def _say_away(self, why: str, *, lost: bool) -> None:
        if lost:
            # A store that never was there is a proxy's that learns nothing: no fault.
            (log.error if self._told else log.info)("counts_lost", why=why)
        elif not self._away:
            log.warning("counts_not_stored", again_in_s=self._interval_s, why=why)
        self._away = True
