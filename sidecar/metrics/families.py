"""Numbers of one process in shared memory that other processes can read: no lock, copy or file.

A table is a memory region with one writing process at a time. It holds entries, each a key and a
row of 64-bit floats ("cells"). The writer changes a cell in place, which costs as much as an
assignment, and every process that maps the region sees the new value at once. Nothing is lost when
a writer is killed: the process that takes over its region continues from its values, so a counter
never falls.

The regions are anonymous memory (`memfd`), not a file: a write to a mapped page of a file may block
while the disk is busy, and the relay must not wait for a disk.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
import structlog
from prometheus_client.core import Metric

# Metric families: their names, how the values of the workers are merged, and the exposition.

Labels = tuple[str | bytes, ...]
"""Values of the labels, in the order of the metric's label names; bytes are read as UTF-8."""
Kind = Literal["counter", "gauge", "histogram"]
Merge = Literal["sum", "min"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Name, labels and kind of a metric, and how the values of the workers are merged."""

    kind: Kind
    name: str
    help: str
    label_names: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    merge: Merge = "sum"

    @property
    def cells(self) -> int:
        """Floats a row. Counter: value, created; gauge: value; histogram: buckets, sum, created."""
        return {"counter": 2, "gauge": 1, "histogram": len(self.bounds) + 3}[self.kind]

    def key(self, labels: Labels) -> bytes:
        assert len(labels) == len(self.label_names), f"{self.name} has labels {self.label_names}"
        return self.kind.encode() + b" " + msgspec.json.encode([self.name, *map(_text, labels)])


Merged = dict[str, dict[tuple[str, ...], tuple[float, ...]]]
"""Name of a family -> label values -> cells."""


def merge_tables(
    families: Iterable[Family], tables: Iterable[dict[bytes, tuple[float, ...]]]
) -> Merged:
    """Merge the tables of all processes. Pure.

    Counters and histograms are added cell by cell; `created` is the earliest. Gauges are added, or
    the least is taken, as `Family.merge` says; gauges that are not set are left out.
    """
    known = {family.name: family for family in families}
    merged: Merged = {name: {} for name in known}
    for table in tables:
        for key, cells in table.items():
            name, *labels = msgspec.json.decode(key.partition(b" ")[2], type=list[str])
            family = known.get(name)
            # A row of another length was written by another release.
            if family is None or len(cells) != family.cells or math.isnan(cells[0]):
                continue
            values = merged[name]
            before = values.get(tuple(labels))
            values[tuple(labels)] = cells if before is None else _joined(family, before, cells)
    return merged


def _joined(family: Family, left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    if family.kind == "gauge":
        return (min(left[0], right[0]) if family.merge == "min" else left[0] + right[0],)
    added = tuple(a + b for a, b in zip(left[:-1], right[:-1], strict=True))
    return (*added, min(left[-1], right[-1]))


def exposition(
    family: Family, values: dict[tuple[str, ...], tuple[float, ...]], *, show_created: bool
) -> Metric:
    metric = Metric(family.name, family.help, family.kind)
    for label_values, cells in values.items():
        labels = dict(zip(family.label_names, label_values, strict=True))
        if family.kind == "gauge":
            metric.add_sample(family.name, labels, cells[0])
            continue
        if family.kind == "counter":
            metric.add_sample(f"{family.name}_total", labels, cells[0])
        else:
            _histogram_samples(metric, family, labels, cells)
        if show_created:
            metric.add_sample(f"{family.name}_created", labels, cells[-1])
    return metric


def _histogram_samples(
    metric: Metric, family: Family, labels: dict[str, str], cells: tuple[float, ...]
) -> None:
    count = 0.0
    for bound, value in zip((*family.bounds, math.inf), cells, strict=False):
        count += value
        metric.add_sample(f"{family.name}_bucket", {**labels, "le": _bound_text(bound)}, count)
    metric.add_sample(f"{family.name}_count", labels, count)
    metric.add_sample(f"{family.name}_sum", labels, cells[-2])


def _bound_text(bound: float) -> str:
    return "+Inf" if math.isinf(bound) else repr(bound)


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


log = structlog.get_logger()
Cells: TypeAlias = "memoryview[float]"
REGION_BYTES = 1 << 20
"""Room for about 8,000 entries. Pages that were never touched take no memory."""
ABSENT = float("nan")
"""The value of a gauge that its current writer has not set."""
_HEADER = struct.Struct("=QQ")
"""Bytes in use, including this header; then the writer's heartbeat count, 0 while it does not
serve."""
_USED = struct.Struct("=Q")
_SIGNS = struct.Struct("=Q")
_ENTRY = struct.Struct("=II")
"""Length of the key, number of cells."""


class MetricTable:
    """Writes to a region. `cells` may be called by any thread; a row has one owner.

    region: None allocates private memory. Readers leave out the gauges of a shared region until
    `open` is called.
    """

    def __init__(self, region: memoryview | None = None) -> None:
        self._region = region if region is not None else private_region()
        self._lock = threading.Lock()
        self._cells: dict[tuple[bytes, int], Cells] = {}
        used = _HEADER.unpack_from(self._region)[0]
        self._full = False
        self._signs = 0
        self._used: int = used or _HEADER.size
        for key, cells in _entries(self._region):
            self._cells[key, len(cells)] = cells
            if key.startswith(b"gauge"):
                cells[0] = ABSENT
        _HEADER.pack_into(self._region, 0, self._used, 0)

    def cells(self, key: bytes, count: int) -> Cells:
        """Return the row of `count` floats of a key, with its last values, or new and all zero.

        When the region is full, which only a bug with labels causes, the row is private and not
        exposed, and an error is logged once: counting must not fail a request.
        """
        with self._lock:
            known = self._cells.get((key, count))
            if known is None:
                known = self._cells[key, count] = self._append(key, count)
            return known

    def open(self) -> None:
        """Mark the writer as serving: readers include its gauges."""
        self._signs = 1
        _HEADER.pack_into(self._region, 0, self._used, self._signs)

    def give_sign(self) -> None:
        """Count one heartbeat. For the thread that called `open`, until `close`."""
        self._signs += 1
        _SIGNS.pack_into(self._region, _USED.size, self._signs)

    def close(self) -> None:
        """Mark the writer as ended: readers leave out its gauges."""
        mark_dead(self._region)

    def read(self) -> dict[bytes, tuple[float, ...]]:
        """Return all cells by key, including the gauges."""
        return {key: tuple(cells) for (key, _), cells in list(self._cells.items())}

    def _append(self, key: bytes, count: int) -> Cells:
        start = self._used
        cells_at = _cells_at(start, key)
        end = cells_at + 8 * count
        if end > len(self._region):
            if not self._full:
                self._full = True
                log.error("metrics_full", first_lost=key.decode(), room_bytes=len(self._region))
            return memoryview(bytearray(8 * count)).cast("d")
        _ENTRY.pack_into(self._region, start, len(key), count)
        self._region[start + _ENTRY.size : start + _ENTRY.size + len(key)] = key
        self._region[cells_at:end] = bytes(8 * count)
        # Written last, so that a reader never reads half an entry.
        self._used = end
        _USED.pack_into(self._region, 0, end)
        return self._region[cells_at:end].cast("d")


def read_region(region: memoryview) -> dict[bytes, tuple[float, ...]]:
    """Return all cells of a region by key, without the gauges of a writer that ended."""
    alive = signs_of_life(region) > 0
    return {
        key: tuple(cells)
        for key, cells in _entries(region)
        if alive or not key.startswith(b"gauge")
    }


def signs_of_life(region: memoryview) -> int:
    """Return the writer's heartbeat count; 0 when it does not serve.

    A count that does not change means that the writer hangs.
    """
    signs: int = _HEADER.unpack_from(region)[1]
    return signs


def mark_dead(region: memoryview) -> None:
    """Mark the writer of a region as ended. For its parent process."""
    _HEADER.pack_into(region, 0, _HEADER.unpack_from(region)[0], 0)


def private_region() -> memoryview:
    return memoryview(mmap.mmap(-1, REGION_BYTES))


def shared_memory(regions: int) -> int:
    """Allocate memory for this many regions. Returns: a descriptor that children may inherit."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("sidecar-metrics")
    else:  # macOS: a file without a name, in the temporary folder
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, regions * REGION_BYTES)
    return fd


def map_regions(fd: int) -> list[memoryview]:
    """Map the regions of a descriptor from `shared_memory`."""
    size = os.fstat(fd).st_size
    whole = memoryview(mmap.mmap(fd, size))
    return [whole[at : at + REGION_BYTES] for at in range(0, size, REGION_BYTES)]


def _entries(region: memoryview) -> list[tuple[bytes, Cells]]:
    used = _HEADER.unpack_from(region)[0]
    found = []
    start = _HEADER.size
    while start < used:
        length, count = _ENTRY.unpack_from(region, start)
        key = bytes(region[start + _ENTRY.size : start + _ENTRY.size + length])
        cells_at = _cells_at(start, key)
        end = cells_at + 8 * count
        found.append((key, region[cells_at:end].cast("d")))
        start = end
    return found


def _cells_at(start: int, key: bytes) -> int:
    """Return the offset of an entry's cells, aligned so that each float is written at once."""
    return -(-(start + _ENTRY.size + len(key)) // 8) * 8
