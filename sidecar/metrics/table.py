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

import mmap
import os
import struct
import tempfile
import threading
from typing import TypeAlias

import structlog

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
