"""Counters, gauges and histograms for the request path, merged over all workers at each scrape.

An update in prometheus_client takes about 1 us (locks, label look-ups). Here it takes 0.1 to 0.2
us, because it is one addition in memory that one thread owns. prometheus_client still writes the
exposition: `MetricSet` is a collector of its registry and gives the same names, labels, help texts
and `_created` series as its own classes.

Each metric has one writing thread, except metrics made with `threads=True`, which take a lock.
Each process writes its own table (`sidecar.metrics.families`). A scrape merges the tables: counters
and histograms of all processes are added; gauges of live processes are added, or the least is
taken.
"""

from __future__ import annotations

import math
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sidecar.metrics.families import (
    ABSENT,
    Cells,
    Family,
    Labels,
    Merge,
    MetricTable,
    exposition,
    merge_tables,
    read_region,
)


class Counter:
    """A counter with one writing thread."""

    __slots__ = ("_cells", "_value")

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._value: float = cells[0]
        """Cached: reading shared memory costs more than writing it."""

    def inc(self, by: float = 1.0) -> None:
        self._value += by
        self._cells[0] = self._value


class SharedCounter(Counter):
    """A counter that several threads may write."""

    __slots__ = ("_lock",)

    def __init__(self, cells: Cells) -> None:
        super().__init__(cells)
        self._lock = threading.Lock()

    def inc(self, by: float = 1.0) -> None:
        with self._lock:
            self._value += by
            self._cells[0] = self._value


class Gauge:
    """A gauge. `set` may be called by one thread at a time, `inc` and `dec` by one thread only."""

    __slots__ = ("_cells", "_value")

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        if math.isnan(cells[0]):
            cells[0] = 0.0
        self._value: float = cells[0]

    def set(self, value: float) -> None:
        self._value = value
        self._cells[0] = value

    def inc(self, by: float = 1.0) -> None:
        self.set(self._value + by)

    def dec(self, by: float = 1.0) -> None:
        self.set(self._value - by)

    def forget(self) -> None:
        """Leave the gauge out of scrapes until it is set again."""
        self.set(ABSENT)


class Histogram:
    """A histogram with one writing thread."""

    __slots__ = ("_bounds", "_bucket", "_cells", "_counts", "_lower", "_sum", "_sum_at", "_upper")

    def __init__(self, cells: Cells, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._bounds = bounds
        self._sum_at = len(bounds) + 1
        self._counts: list[float] = list(cells[: self._sum_at])
        self._sum: float = cells[self._sum_at]
        self._find(0.0)

    def _find(self, value: float) -> None:
        """Find the bucket of a value and cache it: the next value is most often in the same one."""
        bounds = self._bounds
        bucket = bisect_left(bounds, value)
        self._bucket: int = bucket
        self._lower: float = bounds[bucket - 1] if bucket else -math.inf
        self._upper: float = bounds[bucket] if bucket < len(bounds) else math.inf

    def observe(self, value: float) -> None:
        if not self._lower < value <= self._upper:
            self._find(value)
        cells, bucket = self._cells, self._bucket
        count = self._counts[bucket] + 1.0
        self._counts[bucket] = count
        cells[bucket] = count
        self._sum += value
        cells[self._sum_at] = self._sum


class LabelledCounter:
    """Counters by label values. `inc` needs one writing thread unless made with `threads=True`."""

    __slots__ = ("_children", "_lock", "_open")

    def __init__(self, open_child: Callable[[Labels], Counter], *, threads: bool) -> None:
        self._open = open_child
        self._children: dict[Labels, Counter] = {}
        self._lock = threading.Lock() if threads else nullcontext()

    def inc(self, labels: Labels, by: float = 1.0) -> None:
        child = self._children.get(labels) or self.labels(*labels)
        child.inc(by)

    def labels(self, *values: str | bytes) -> Counter:
        """Return the counter of these label values. Keeping it saves the look-up of `inc`."""
        with self._lock:
            child = self._children.get(values)
            if child is None:
                child = self._children[values] = self._open(values)
            return child


class LabelledGauge:
    """Gauges by label values."""

    __slots__ = ("_children", "_open")

    def __init__(self, open_child: Callable[[Labels], Gauge]) -> None:
        self._open = open_child
        self._children: dict[Labels, Gauge] = {}

    def set(self, labels: Labels, value: float) -> None:
        self.labels(*labels).set(value)

    def labels(self, *values: str | bytes) -> Gauge:
        """Return the gauge of these label values."""
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._open(values)
        return child


class MetricSet(Collector):
    """Makes the metrics of one process, and exposes those of all processes that share its memory.

    others: the memory regions of the other processes, read at each scrape.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        table: MetricTable,
        others: Sequence[memoryview] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._others = others
        self._clock = clock
        self._families: list[Family] = []
        # As prometheus_client's own classes do.
        disabled = os.environ.get("PROMETHEUS_DISABLE_CREATED_SERIES", "False").lower()
        self._show_created = disabled not in ("true", "1", "t")
        registry.register(self)

    # -- making metrics

    def counter(self, name: str, help_text: str, *, threads: bool = False) -> Counter:
        family = self._add(Family(kind="counter", name=name, help=help_text))
        return self._counter(family, (), threads=threads)

    def labelled_counter(
        self, name: str, help_text: str, label_names: Sequence[str], *, threads: bool = False
    ) -> LabelledCounter:
        names = tuple(label_names)
        family = self._add(Family(kind="counter", name=name, help=help_text, label_names=names))
        return LabelledCounter(
            lambda labels: self._counter(family, labels, threads=threads), threads=threads
        )

    def gauge(self, name: str, help_text: str, *, merge: Merge = "sum") -> Gauge:
        family = self._add(Family(kind="gauge", name=name, help=help_text, merge=merge))
        return Gauge(self._cells(family, ()))

    def labelled_gauge(
        self, name: str, help_text: str, label_names: Sequence[str], *, merge: Merge = "sum"
    ) -> LabelledGauge:
        names = tuple(label_names)
        family = self._add(
            Family(kind="gauge", name=name, help=help_text, label_names=names, merge=merge)
        )
        return LabelledGauge(lambda labels: Gauge(self._cells(family, labels)))

    def histogram(self, name: str, help_text: str, *, bounds: tuple[float, ...]) -> Histogram:
        family = self._add(Family(kind="histogram", name=name, help=help_text, bounds=bounds))
        return Histogram(self._created(family, ()), bounds)

    # -- showing them

    def collect(self) -> Iterator[Metric]:
        merged = merge_tables(
            self._families,
            [self._table.read(), *(read_region(region) for region in self._others)],
        )
        for family in self._families:
            yield exposition(family, merged[family.name], show_created=self._show_created)

    # -- inside

    def _add(self, family: Family) -> Family:
        self._families.append(family)
        return family

    def _cells(self, family: Family, labels: Labels) -> Cells:
        return self._table.cells(family.key(labels), family.cells)

    def _created(self, family: Family, labels: Labels) -> Cells:
        cells = self._cells(family, labels)
        if cells[-1] == 0.0:
            cells[-1] = self._clock()
        return cells

    def _counter(self, family: Family, labels: Labels, *, threads: bool) -> Counter:
        cells = self._created(family, labels)
        return SharedCounter(cells) if threads else Counter(cells)
