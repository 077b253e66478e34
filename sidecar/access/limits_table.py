"""Limits that hold across all workers of a proxy: a table in memory that they share.

The parent of the workers makes the memory, and each worker inherits its descriptor. A slot of 64
bytes holds one key's usage. One lock guards the whole table, as in nginx's `limit_req_zone`; it is
held for about 10 us. It is a POSIX record lock on the memory's descriptor, because the kernel
releases such a lock when its holder dies. (An open-file-description lock would not exclude anybody:
the workers inherit one description.)

A limit never fails a request. Where the lock cannot be had (its holder lost its core), the worker
decides by the usage that it saw last, and adds what it admitted and charged to the table as soon as
it has the lock again. Where the table is full of other keys, the worker's own memory decides, so
that the key gets at most its limit from each worker. The caller counts these cases by reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from sidecar.access.limits import (
    Allowance,
    Count,
    MemoryLimiter,
    Standing,
    Usage,
    believed,
    charge,
    fresh,
    is_spent_record,
    take,
)
from sidecar.metrics.table import REGION_BYTES, map_regions

SLOT_BYTES = 64
SLOTS = REGION_BYTES // SLOT_BYTES
WINDOW = 64
"""A key's slot is one of this many neighbours; its id chooses which."""
LOCK_WAIT_S = 0.002
"""Longest wait for the lock. A holder that keeps it longer was stopped by the kernel."""
LOCK_PAUSE_S = 0.1
"""After a wait in vain: how long the lock is only tried, so that a stopped holder does not cost
every request the full wait."""
FULL_RETRY_S = 10.0
"""How often a slot is searched for a key that found none."""
MAX_SEEN = 4096
"""Keys whose last seen usage a worker remembers; beyond it, all of them are forgotten."""
_NO_SLOT, _NO_LOCK = -1, -2
_RECORD = struct.Struct("<16sddqq")
"""Key id, `Usage.at`, `.requests`, `.day`, `.tokens`; a CRC-32 of them follows, because a worker
may be killed while it writes."""
_CHECKSUM = struct.Struct("<I")
_USED_BYTES = _RECORD.size + _CHECKSUM.size
_EMPTY = bytes(_USED_BYTES)


class _Slot(NamedTuple):
    owner: bytes
    usage: Usage


class _Debt(NamedTuple):
    """What a worker admitted and charged without the lock."""

    allowance: Allowance
    requests: int = 0
    tokens: int = 0


class TableLimiter:
    """A `Limiter` for one thread of each of several processes."""

    def __init__(
        self,
        descriptor: int,
        *,
        unchecked: Count,
        lost: Count,
        lock_wait_s: float = LOCK_WAIT_S,
    ) -> None:
        """descriptor: memory of at least one region, of `sidecar.metrics.table.shared_memory`.
        unchecked: counts a request or charge that the worker's own memory decided: `full`,
        `locked`, `lock_failed`. lost: counts a damaged slot, `torn`: its key begins anew; and what
        `believed` counts."""
        self._fd = descriptor
        self._table = map_regions(descriptor)[0]
        self._unchecked = unchecked
        self._lost = lost
        self._lock_wait_s = lock_wait_s
        self._tried_only_until = 0.0
        self._memory = MemoryLimiter()
        self._places: dict[str, int] = {}
        """Key id -> offset of the slot that it had when last seen; checked at each use."""
        self._without_slot: dict[str, float] = {}
        """Key id -> when no slot was free for it."""
        self._seen: dict[str, Usage] = {}
        """Key id -> its usage when last seen, with what this worker has done since."""
        self._debts: dict[str, _Debt] = {}

    def take(self, key_id: str, allowance: Allowance, now: float) -> Standing:
        place = self._enter(key_id, now)
        if place == _NO_SLOT:
            return self._memory.take(key_id, allowance, now)
        if place == _NO_LOCK:
            usage = self._seen.get(key_id) or fresh(allowance, now)
            usage, standing = take(usage, allowance, now)
            self._remember(key_id, usage)
            if standing.refused is None:
                self._owe(key_id, allowance, requests=1)
            return standing
        try:
            owner = _owner(key_id)
            usage = self._usage(place, owner) or fresh(allowance, now)
            usage, standing = take(usage, allowance, now)
            self._write(place, owner, usage)
            self._remember(key_id, usage)
            return standing
        finally:
            self._unlock()

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        tokens = believed(tokens, self._lost)
        place = self._enter(key_id, now)
        if place == _NO_SLOT:
            self._memory.charge(key_id, allowance, tokens, now)
            return
        if place == _NO_LOCK:
            usage = self._seen.get(key_id) or fresh(allowance, now)
            self._remember(key_id, charge(usage, allowance, tokens, now))
            self._owe(key_id, allowance, tokens=tokens)
            return
        try:
            owner = _owner(key_id)
            usage = self._usage(place, owner) or fresh(allowance, now)
            usage = charge(usage, allowance, tokens, now)
            self._write(place, owner, usage)
            self._remember(key_id, usage)
        finally:
            self._unlock()

    # What was decided without the lock

    def _remember(self, key_id: str, usage: Usage) -> None:
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[key_id] = usage

    def _owe(
        self, key_id: str, allowance: Allowance, *, requests: int = 0, tokens: int = 0
    ) -> None:
        debt = self._debts.get(key_id) or _Debt(allowance)
        self._debts[key_id] = _Debt(allowance, debt.requests + requests, debt.tokens + tokens)

    def _pay(self, now: float) -> None:
        """Add to the table what was decided without it. With the lock held."""
        if not self._debts:
            return
        debts, self._debts = self._debts, {}
        for key_id, debt in debts.items():
            owner = _owner(key_id)
            place = self._find(key_id, owner, now)
            if place < 0:  # the worker's own memory limits this key from now on
                self._memory.charge(key_id, debt.allowance, debt.tokens, now)
                continue
            usage = self._usage(place, owner) or fresh(debt.allowance, now)
            usage = charge(usage, debt.allowance, debt.tokens, now)
            left = max(0.0, usage.requests - debt.requests)
            self._write(place, owner, usage._replace(requests=left))

    def records(self) -> list[tuple[str, Usage]]:
        """Each key id with its usage. Empty when the lock cannot be had, which is counted."""
        refusal = self._lock()
        if refusal:
            self._unchecked(refusal)
            return []
        try:
            copy = bytes(self._table[: SLOTS * SLOT_BYTES])
        finally:
            self._unlock()
        slots = (_decode(copy[at : at + _USED_BYTES]) for at in range(0, len(copy), SLOT_BYTES))
        return [(one.owner.rstrip(b"\0").decode(), one.usage) for one in slots if one is not None]

    def restore(self, records: Iterable[tuple[str, Usage]]) -> None:
        """Take over what `records` of an earlier process returned."""
        for key_id, usage in records:
            place = self._enter(key_id, usage.at)
            if place < 0:
                continue
            try:
                self._write(place, _owner(key_id), usage)
            finally:
                self._unlock()

    # The lock

    def _lock(self) -> str:
        """Returns: why the lock could not be had; empty when it is held."""
        deadline = 0.0
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                return ""
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    return "lock_failed"
            now = time.monotonic()
            if now < self._tried_only_until:
                return "locked"
            deadline = deadline or now + self._lock_wait_s
            if now >= deadline:
                self._tried_only_until = now + LOCK_PAUSE_S
                return "locked"
            os.sched_yield()

    def _unlock(self) -> None:
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, 0)

    # The slots

    def _enter(self, key_id: str, now: float) -> int:
        """Lock the table and find the key's slot. Returns: its offset, and the caller unlocks; or
        `_NO_SLOT` or `_NO_LOCK`, counted and unlocked."""
        reason = self._lock()
        if reason:
            self._unchecked(reason)
            return _NO_LOCK
        self._pay(now)  # before the search: it may fill the slot that is free now
        owner = _owner(key_id)
        place = self._places.get(key_id, -1)
        if place >= 0 and self._table[place : place + len(owner)] == owner:
            return place
        place = self._find(key_id, owner, now)
        if place >= 0:
            self._places[key_id] = place
            return place
        self._unlock()
        self._unchecked("full")
        return _NO_SLOT

    def _find(self, key_id: str, owner: bytes, now: float) -> int:
        """The key's slot, else a free one, else -1. With the lock held."""
        if 0.0 <= now - self._without_slot.get(key_id, -FULL_RETRY_S) < FULL_RETRY_S:
            return -1
        first = SLOT_BYTES * (zlib.crc32(owner) % (SLOTS - WINDOW + 1))
        free = -1
        for place in range(first, first + WINDOW * SLOT_BYTES, SLOT_BYTES):
            slot = self._read(place)
            if slot is not None and slot.owner == owner:
                return place
            if free < 0 and (slot is None or is_spent_record(slot.usage, now)):
                free = place
        if free < 0:
            self._without_slot[key_id] = now
        else:
            self._without_slot.pop(key_id, None)
        return free

    def _usage(self, place: int, owner: bytes) -> Usage | None:
        """The usage in this slot; None when the slot is not this key's yet."""
        slot = self._read(place)
        return slot.usage if slot is not None and slot.owner == owner else None

    def _read(self, place: int) -> _Slot | None:
        """The slot's content. A damaged slot is counted once and emptied."""
        data = bytes(self._table[place : place + _USED_BYTES])
        slot = _decode(data)
        if slot is None and data != _EMPTY:
            self._lost("torn")
            self._table[place : place + _USED_BYTES] = _EMPTY
        return slot

    def _write(self, place: int, owner: bytes, usage: Usage) -> None:
        record = _RECORD.pack(owner, *usage)
        self._table[place : place + _USED_BYTES] = record + _CHECKSUM.pack(zlib.crc32(record))


def _owner(key_id: str) -> bytes:
    return key_id.encode().ljust(16, b"\0")


def _decode(data: bytes) -> _Slot | None:
    """A slot's content; None when it is empty or damaged."""
    record = data[: _RECORD.size]
    if data == _EMPTY or _CHECKSUM.unpack_from(data, _RECORD.size)[0] != zlib.crc32(record):
        return None
    owner, at, requests, day, tokens = _RECORD.unpack(record)
    return _Slot(owner, Usage(at, requests, day, tokens))
