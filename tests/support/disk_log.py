"""What a real process wrote to its files and synced, and what a power cut would leave of it.

The process runs with `disk_log.c` preloaded, which logs each write, truncation and sync. At any
point of the log a power cut leaves of each file what was synced by then, and of later writes any
part: `Disk` holds both ends, nothing of them and all of them.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_ENTRY = struct.Struct("<QIHcx")
"""Offset, length of the data, length of the path, kind."""
WRITE, TRUNCATE, SYNC = b"w", b"t", b"s"


@dataclass(frozen=True, slots=True)
class Entry:
    kind: bytes
    name: str
    """The file's, without its folder."""
    offset: int
    data: bytes


def build(folder: Path) -> Path | None:
    """Compile the library. Returns: its path; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "disk_log.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def read_log(path: Path) -> Iterator[Entry]:
    """Yield the entries of a log, in the order in which the process did them."""
    log, at = path.read_bytes(), 0
    while at < len(log):
        offset, length, path_length, kind = _ENTRY.unpack_from(log, at)
        at += _ENTRY.size
        name = log[at : at + path_length].decode().rpartition("/")[2]
        at += path_length
        yield Entry(kind, name, offset, log[at : at + length])
        at += length


@dataclass(slots=True)
class Disk:
    """Files by name, with what a power cut leaves of them at least and at most."""

    synced: dict[str, bytes] = field(default_factory=dict)
    written: dict[str, bytearray] = field(default_factory=dict)

    def put(self, name: str, content: bytes) -> None:
        """Add a file that was there, synced, when the process began."""
        self.synced[name], self.written[name] = content, bytearray(content)

    def apply(self, entry: Entry) -> None:
        content = self.written.setdefault(entry.name, bytearray())
        if entry.kind == WRITE:
            content.extend(bytes(max(0, entry.offset - len(content))))
            content[entry.offset : entry.offset + len(entry.data)] = entry.data
        elif entry.kind == TRUNCATE:
            content.extend(bytes(max(0, entry.offset - len(content))))
            del content[entry.offset :]
        else:
            self.synced[entry.name] = bytes(content)

    def after_power_cut(self, folder: Path, name: str, *, keep_unsynced: bool) -> Path:
        """Write a database's files as a power cut leaves them. Returns: the database's path."""
        left = self.written if keep_unsynced else self.synced
        for one in (name, f"{name}-wal"):
            (folder / one).write_bytes(left.get(one, b""))
        (folder / f"{name}-shm").unlink(missing_ok=True)
        return folder / name
