"""Limits that hold across the proxies of one machine: a file in `state_dir`, one slot per key.

A slot is 64 bytes, read and written under a byte-range lock of its own, which the kernel releases
when its holder dies. So the counts are right across processes, and survive their restarts; they
do not survive the loss of the file or of the machine's power (then at most what the kernel had not
yet written, some 30 s).

Read and written by system calls, not through a mapping: a mapped file that someone truncates, or
a disk that is full, would kill the proxy by a signal. It costs 1.3 us more a request.

Nothing here fails a request. Where the file cannot be used (away, full of other keys, locked by a
process that was stopped in that very moment), the process's own memory decides, so that such a key
gets at most its limit from each process; that is counted, by reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sidecar.access.limits import (
    Allowance,
    MemoryLimiter,
    Standing,
    Usage,
    charge,
    fresh,
    is_spent_record,
    take,
)

SLOTS = 4096
SLOT_BYTES = 64
HEADER = b"sidecar-limits-1" + SLOTS.to_bytes(4, "little") + bytes(44)
FILE_BYTES = SLOT_BYTES * (1 + SLOTS)
WINDOW = 64
"""A key's slot is one of this many neighbours, which its id chooses."""
LOCK_WAIT_S = 0.002
"""A lock is held for some microseconds; who holds it longer was stopped by the kernel."""
START_WAIT_S = 1.0
RETRY_S = 10.0
"""How often a lost file, and a slot for a key that found none, are looked for."""
_RECORD = struct.Struct("<16sddqq")
"""key id, `Usage.at`, `.requests`, `.day`, `.tokens`; a CRC-32 of them follows."""
_CHECKSUM = struct.Struct("<I")
_USED_BYTES = _RECORD.size + _CHECKSUM.size
_EMPTY = bytes(_USED_BYTES)

Count = Callable[[str], None]
"""Counts one event by reason."""


class _UnusableError(Exception):
    """The file cannot decide now; `reason` is its name in the counter. Never leaves this module."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Slot(NamedTuple):
    owner: bytes
    usage: Usage


class FileLimiter:
    """A `Limiter` for one thread of each of several processes."""

    def __init__(
        self, path: Path, *, unchecked: Count, lost: Count, lock_wait_s: float = LOCK_WAIT_S
    ) -> None:
        """unchecked: a request or charge that the process's memory had to decide: `away`, `full`,
        `locked`, `io`. lost: counts that are gone: `deleted`, `short`, `foreign` (the whole file),
        `torn` (one key's)."""
        self._path = path
        self._unchecked = unchecked
        self._lost = lost
        self._lock_wait_s = lock_wait_s
        self._memory = MemoryLimiter()
        self._places: dict[str, int] = {}
        """Key id -> offset of the slot that it had when last seen; checked at each use."""
        self._unallocated: dict[str, float] = {}
        """Key id -> when it found no slot."""
        self._fd = -1
        self._closed = False
        self._looked_at = 0.0
        try:
            self._open(START_WAIT_S)
        except (OSError, _UnusableError):
            self._drop()  # every request from now on counts it, and looks again now and then

    def take(self, key_id: str, allowance: Allowance, now: float) -> Standing:
        try:
            offset, usage = self._enter(key_id, allowance, now)
            try:
                usage, standing = take(usage, allowance, now)
                self._write(offset, _owner(key_id), usage)
            finally:
                self._unlock(offset)
            return standing
        except _UnusableError as why:
            self._unchecked(why.reason)
        except OSError:
            self._unchecked("io")
        return self._memory.take(key_id, allowance, now)

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        try:
            offset, usage = self._enter(key_id, allowance, now)
            try:
                self._write(offset, _owner(key_id), charge(usage, allowance, tokens, now))
            finally:
                self._unlock(offset)
            return
        except _UnusableError as why:
            self._unchecked(why.reason)
        except OSError:
            self._unchecked("io")
        self._memory.charge(key_id, allowance, tokens, now)

    def close(self) -> None:
        """For good: what comes after it, the memory decides."""
        self._closed = True
        self._drop()

    # The file

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open(self, wait_s: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock(0, wait_s)
        try:
            self._make_sound()
        finally:
            self._unlock(0)

    def _make_sound(self) -> None:
        """Under the header's lock: what is not our file is made anew, in place, so that processes
        that have it open go on with the same one."""
        size = os.fstat(self._fd).st_size
        if size == FILE_BYTES and os.pread(self._fd, SLOT_BYTES, 0) == HEADER:
            return
        if size:
            self._lost("foreign" if size >= FILE_BYTES else "short")
        os.ftruncate(self._fd, 0)
        # Zeros are written, not left as a hole: a disk that fills up later does not matter.
        os.pwrite(self._fd, HEADER + bytes(FILE_BYTES - SLOT_BYTES), 0)

    def _look_after_file(self) -> None:
        """Now and then: open the file if it was not there, and leave one that was deleted, or each
        process started later would count in another."""
        if self._fd >= 0:
            if os.fstat(self._fd).st_nlink:
                return
            self._lost("deleted")
            self._drop()
        if self._closed:
            return
        try:
            self._open(self._lock_wait_s)
        except (OSError, _UnusableError):
            self._drop()

    def _lock(self, offset: int, wait_s: float) -> None:
        """Lock a slot, or the header at 0. Raises: _UnusableError, OSError."""
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, SLOT_BYTES, offset)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            deadline = deadline or time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                raise _UnusableError("locked")
            os.sched_yield()

    def _unlock(self, offset: int) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, SLOT_BYTES, offset)

    # One key's slot

    def _enter(self, key_id: str, allowance: Allowance, now: float) -> tuple[int, Usage]:
        """Lock the key's slot, for the caller to unlock. Raises: _UnusableError, OSError."""
        if not 0.0 <= now - self._looked_at < RETRY_S:
            self._looked_at = now
            self._look_after_file()
        if self._fd < 0:
            raise _UnusableError("away")
        owner = _owner(key_id)
        offset = self._places.get(key_id, 0)
        while True:
            found = offset == 0
            if found:
                offset = self._places[key_id] = self._find(key_id, owner, allowance, now)
            self._lock(offset, self._lock_wait_s)
            slot = _decode(os.pread(self._fd, _USED_BYTES, offset))
            if slot is not None and slot.owner == owner:
                return offset, slot.usage
            self._unlock(offset)
            if found:  # and lost within microseconds: there are more keys than slots
                raise _UnusableError("full")
            offset = 0  # another key has it since, or it was damaged

    def _find(self, key_id: str, owner: bytes, allowance: Allowance, now: float) -> int:
        """The key's slot, or a free one made its own. Raises: _UnusableError, OSError."""
        if 0.0 <= now - self._unallocated.get(key_id, -RETRY_S) < RETRY_S:
            raise _UnusableError("full")
        first = SLOT_BYTES * (1 + zlib.crc32(owner) % (SLOTS - WINDOW + 1))
        self._lock(0, self._lock_wait_s)  # nobody else gives out slots meanwhile
        try:
            self._make_sound()
            free = None
            window = os.pread(self._fd, WINDOW * SLOT_BYTES, first)
            for start in range(0, WINDOW * SLOT_BYTES, SLOT_BYTES):
                data = window[start : start + _USED_BYTES]
                slot = _decode(data)
                if slot is None and data != _EMPTY:
                    data = self._read_again(first + start)
                    slot = _decode(data)
                if slot is not None and slot.owner == owner:
                    return first + start
                if free is None and (slot is None or is_spent_record(slot.usage, now)):
                    free = first + start, data
            if free is None:
                self._unallocated[key_id] = now
                raise _UnusableError("full")
            offset, data = free
            self._claim(offset, key_id, fresh(allowance, now), torn_if=data)
            self._unallocated.pop(key_id, None)
            return offset
        finally:
            self._unlock(0)

    def _read_again(self, offset: int) -> bytes:
        """A slot that looked damaged: its owner may have been writing it."""
        self._lock(offset, self._lock_wait_s)
        try:
            return os.pread(self._fd, _USED_BYTES, offset)
        finally:
            self._unlock(offset)

    def _claim(self, offset: int, key_id: str, usage: Usage, *, torn_if: bytes) -> None:
        if torn_if != _EMPTY and _decode(torn_if) is None:
            self._lost("torn")
        self._lock(offset, self._lock_wait_s)
        try:
            self._write(offset, _owner(key_id), usage)
        finally:
            self._unlock(offset)

    def _write(self, offset: int, owner: bytes, usage: Usage) -> None:
        record = _RECORD.pack(owner, *usage)
        os.pwrite(self._fd, record + _CHECKSUM.pack(zlib.crc32(record)), offset)


def _owner(key_id: str) -> bytes:
    return key_id.encode().ljust(16, b"\0")


def _decode(data: bytes) -> _Slot | None:
    """A slot's content; None when it is empty, damaged or cut short."""
    if len(data) != _USED_BYTES:
        return None
    record = data[: _RECORD.size]
    if _CHECKSUM.unpack_from(data, _RECORD.size)[0] != zlib.crc32(record):
        return None
    owner, at, requests, day, tokens = _RECORD.unpack(record)
    return _Slot(owner, Usage(at, requests, day, tokens))
