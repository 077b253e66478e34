"""Numbers of one process in memory that other processes can read: no lock, no copy, no file.

A table is a region of bytes that belongs to one writing process at a time. It holds entries, each
a key and a row of 64-bit floats ("cells"). The writer adds to a cell in place, which costs what an
assignment costs; a reader in any process that maps the region sees it at once. A writer that is
killed loses nothing that it counted, and who takes the region over goes on where it ended, so that
a counter never falls.

The regions are memory (`memfd`), never a file on a disk: a disk that is busy stops who writes to
a mapped page of its file, and the relay must not wait for a disk.
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
"""A gauge that its present writer has not set."""
_HEADER = struct.Struct("=QQ")
"""Bytes in use, this header included; 0 while the writer does not serve, else from 1 up: one more
with each sign of life."""
_USED = struct.Struct("=Q")
_SIGNS = struct.Struct("=Q")
_ENTRY = struct.Struct("=II")
"""Length of the key, number of cells."""


class MetricTable:
    """The writing end of a region. Cells belong to who asked for them; `cells` may be called by
    any thread.

    region: None takes memory that no other process sees. Another's is shown without its gauges
    until `open` is called.
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
        """The row of `count` floats under this key: as it was left, or new and all zero.

        When the region is full, which a bug with labels would do, the row is one that nobody
        reads, and that is logged once: counting must not fail a request.
        """
        with self._lock:
            known = self._cells.get((key, count))
            if known is None:
                known = self._cells[key, count] = self._append(key, count)
            return known

    def open(self) -> None:
        """Say that the writer serves: its gauges are of now."""
        self._signs = 1
        _HEADER.pack_into(self._region, 0, self._used, self._signs)

    def give_sign(self) -> None:
        """Say that the writer still serves. For the thread that called `open`, until `close`."""
        self._signs += 1
        _SIGNS.pack_into(self._region, _USED.size, self._signs)

    def close(self) -> None:
        """Say that the writer ends: its gauges are not of now any more."""
        mark_dead(self._region)

    def read(self) -> dict[bytes, tuple[float, ...]]:
        """What it holds, the gauges in any case."""
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
        # Last, so that a reader never meets half an entry.
        self._used = end
        _USED.pack_into(self._region, 0, end)
        return self._region[cells_at:end].cast("d")


def read_region(region: memoryview) -> dict[bytes, tuple[float, ...]]:
    """What a region holds now. The gauges of a writer that is dead are left out."""
    alive = signs_of_life(region) > 0
    return {
        key: tuple(cells)
        for key, cells in _entries(region)
        if alive or not key.startswith(b"gauge")
    }


def signs_of_life(region: memoryview) -> int:
    """How many its writer has given since it serves; 0: it does not. One that stays the same is
    that of a writer which stands still."""
    signs: int = _HEADER.unpack_from(region)[1]
    return signs


def mark_dead(region: memoryview) -> None:
    """For who saw the writer end."""
    _HEADER.pack_into(region, 0, _HEADER.unpack_from(region)[0], 0)


def private_region() -> memoryview:
    return memoryview(mmap.mmap(-1, REGION_BYTES))


def shared_memory(regions: int) -> int:
    """Memory for this many regions, as a descriptor that child processes may inherit."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("sidecar-metrics")
    else:  # macOS: a file without a name, in the temporary folder
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, regions * REGION_BYTES)
    return fd


def map_regions(fd: int) -> list[memoryview]:
    """The regions behind a descriptor of `shared_memory`."""
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
    """Where an entry's cells begin: aligned, so that a reader never meets half a float."""
    return -(-(start + _ENTRY.size + len(key)) // 8) * 8
