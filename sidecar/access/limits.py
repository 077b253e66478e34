"""Limits of keys across all workers of a proxy: the rule, and a table in shared memory.

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

import asyncio
import contextlib
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
import structlog

from sidecar.metrics.families import REGION_BYTES, map_regions
from sidecar.metrics.hot import LabelledCounter
from sidecar.metrics.proxy import Metrics
from sidecar.settings import Settings

# How much a key may use: requests per minute and tokens per day. The rule is pure.

DAY_S = 86_400
MINUTE_S = 60.0
CLOCK_SKEW_S = 1.0
"""A reading at most this much older comes from the same clock, read earlier; an older one means
that the clock was set back."""
MAX_TOKENS = 2**53
"""Most tokens that a key is charged in a day: no reply costs as many, and every reader of JSON
holds that number exactly. A reply that tells more is damaged, or vLLM is not what answers."""
SWEEP_AT = 4096
"""Records in `MemoryLimiter` from which on it looks for records that may be forgotten."""


Count = Callable[[str], None]
"""Counts one event by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """A key's limits; None: no limit of that kind."""

    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


class Usage(NamedTuple):
    """What is remembered of one key. A tuple, as `Standing` is: each request makes two of them, and
    a frozen dataclass costs five times as much."""

    at: float
    """Unix seconds of the last refill of the bucket."""
    requests: float
    """Requests left in the bucket, 0..requests_per_minute."""
    day: int
    """Days since 1970, UTC."""
    tokens: int
    """Tokens spent in `day`."""


class LimitState(NamedTuple):
    """What is left of a key's limits after one request."""

    refused: str | None
    """None: admitted. Else the limit that is used up: `requests_per_minute`, `tokens_per_day`."""
    requests_left: int
    requests_reset_s: float
    """Seconds until the bucket is full."""
    tokens_left: int
    tokens_reset_s: float
    """Seconds until the midnight UTC that ends the day in which the tokens count."""
    retry_after_s: float = 0.0
    """When refused: seconds until the same request is admitted, if no other comes before it."""


class Limiter(Protocol):
    """Counts what keys use. Never raises and never waits longer than 2 ms: the event loop calls
    it."""

    def take(self, key_id: str, allowance: Allowance, now: float) -> LimitState:
        """Ask for one request. now: unix seconds."""
        ...

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        """Count the tokens of a finished reply."""
        ...


def fresh(allowance: Allowance, now: float) -> Usage:
    """The usage of a key that was never seen: a full bucket, no tokens spent."""
    return Usage(
        at=now, requests=float(allowance.requests_per_minute or 0), day=_day(now), tokens=0
    )


def is_spent_record(usage: Usage, now: float) -> bool:
    """True when forgetting it changes nothing: the bucket is full again, the day is over."""
    return usage.day < _day(now) and now - usage.at > MINUTE_S


def take(usage: Usage, allowance: Allowance, now: float) -> tuple[Usage, LimitState]:
    """Take one request from the bucket. Returns: the usage after it, and whether it is admitted.

    A refused request takes nothing from the bucket.
    """
    usage = _brought_to(usage, allowance, now)
    per_minute, per_day = allowance.requests_per_minute, allowance.tokens_per_day
    to_midnight_s = (usage.day + 1) * DAY_S - now
    tokens_left = max(0, per_day - usage.tokens) if per_day is not None else 0
    refused, retry_after_s = None, 0.0
    if per_day is not None and tokens_left == 0:
        refused, retry_after_s = "tokens_per_day", to_midnight_s
    elif per_minute is not None:
        if usage.requests >= 1.0:
            usage = Usage(usage.at, usage.requests - 1.0, usage.day, usage.tokens)
        else:
            refused = "requests_per_minute"
            retry_after_s = (1.0 - usage.requests) * MINUTE_S / per_minute
    missing = per_minute - usage.requests if per_minute is not None else 0.0
    return usage, LimitState(
        refused,
        int(usage.requests),
        missing * MINUTE_S / per_minute if per_minute is not None else 0.0,
        tokens_left,
        to_midnight_s,
        retry_after_s,
    )


def charge(usage: Usage, allowance: Allowance, tokens: int, now: float) -> Usage:
    """Add the tokens of a finished reply; they count for the day in which it ended."""
    usage = _brought_to(usage, allowance, now)
    return Usage(usage.at, usage.requests, usage.day, min(usage.tokens + tokens, MAX_TOKENS))


def believed(tokens: int, lost: Count) -> int:
    """The tokens of a reply, at most `MAX_TOKENS`; what is more is counted as `too_large`."""
    if tokens <= MAX_TOKENS:
        return tokens
    lost("too_large")
    return MAX_TOKENS


def _brought_to(usage: Usage, allowance: Allowance, now: float) -> Usage:
    at, requests = usage.at, usage.requests
    per_minute = allowance.requests_per_minute or 0
    if now > at:
        requests += (now - at) * per_minute / MINUTE_S
        at = now
    elif at - now > CLOCK_SKEW_S:
        at = now
    requests = min(float(per_minute), requests)  # also where the limit was lowered
    today, day, tokens = _day(now), usage.day, usage.tokens
    if day < today:
        day, tokens = today, 0
    elif day > today + 1:  # the clock was far ahead: what was spent counts for today
        day = today
    # day == today + 1: set back over midnight. The spent tokens stay with the day that had begun.
    return Usage(at, requests, day, tokens)


def _day(now: float) -> int:
    return int(now // DAY_S)


class MemoryLimiter:
    """A `Limiter` for one process. Workers fall back to it when they cannot use the shared table.

    It holds one record for each key with limits that was used today. Keys come from the store, so
    a client cannot make it grow.
    """

    def __init__(self, lost: Count = lambda _: None) -> None:
        """lost: counts tokens that are not charged, as `believed` does."""
        self._lost = lost
        self._usages: dict[str, Usage] = {}
        self._sweep_at = SWEEP_AT

    def take(self, key_id: str, allowance: Allowance, now: float) -> LimitState:
        usage, state = take(self._usage(key_id, allowance, now), allowance, now)
        self._usages[key_id] = usage
        return state

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        tokens = believed(tokens, self._lost)
        self._usages[key_id] = charge(self._usage(key_id, allowance, now), allowance, tokens, now)

    def records(self) -> list[tuple[str, Usage]]:
        """Each key id with its usage."""
        return list(self._usages.items())

    def restore(self, records: Iterable[tuple[str, Usage]]) -> None:
        """Take over what `records` of an earlier process returned."""
        self._usages.update(records)

    def _usage(self, key_id: str, allowance: Allowance, now: float) -> Usage:
        usage = self._usages.get(key_id)
        if usage is not None:
            return usage
        if len(self._usages) >= self._sweep_at:
            kept = {key: one for key, one in self._usages.items() if not is_spent_record(one, now)}
            self._usages = kept
            self._sweep_at = max(SWEEP_AT, 2 * len(kept))
        return fresh(allowance, now)


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
        """descriptor: memory of at least one region, of `sidecar.metrics.families.shared_memory`.
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

    def take(self, key_id: str, allowance: Allowance, now: float) -> LimitState:
        place = self._enter(key_id, now)
        if place == _NO_SLOT:
            return self._memory.take(key_id, allowance, now)
        try:
            usage, state = take(self._found(place, key_id, allowance, now), allowance, now)
            self._keep(place, key_id, usage)
        finally:
            self._unlock(place)
        if place == _NO_LOCK and state.refused is None:
            self._owe(key_id, allowance, requests=1)
        return state

    def charge(self, key_id: str, allowance: Allowance, tokens: int, now: float) -> None:
        tokens = believed(tokens, self._lost)
        place = self._enter(key_id, now)
        if place == _NO_SLOT:
            self._memory.charge(key_id, allowance, tokens, now)
            return
        try:
            usage = self._found(place, key_id, allowance, now)
            self._keep(place, key_id, charge(usage, allowance, tokens, now))
        finally:
            self._unlock(place)
        if place == _NO_LOCK:
            self._owe(key_id, allowance, tokens=tokens)

    def _found(self, place: int, key_id: str, allowance: Allowance, now: float) -> Usage:
        """The usage in the table; without the lock as it was last seen."""
        known = self._seen.get(key_id) if place < 0 else self._usage(place, _owner(key_id))
        return known or fresh(allowance, now)

    def _keep(self, place: int, key_id: str, usage: Usage) -> None:
        """Write the usage into the table, if it is locked; and remember it."""
        if place >= 0:
            self._write(place, _owner(key_id), usage)
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen[key_id] = usage

    # What was decided without the lock

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
            try:
                if place >= 0:
                    self._write(place, _owner(key_id), usage)
            finally:
                self._unlock(place)

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

    def _unlock(self, place: int = 0) -> None:
        """place: what `_enter` returned: without a slot it holds no lock."""
        if place >= 0:
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


# Keep the usage of limits over a restart: a file in `state_dir`, written now and then.

log = structlog.get_logger()
SAVE_S = 5.0
MAX_BYTES = 4 * 2**20
"""Size of a file that is read or written: over 50,000 keys that were used within a day. The start
waits for the reading, and the shared table has 16,384 slots."""
_KeyId = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]{1,16}\Z")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
_Line = tuple[_KeyId, float, Annotated[float, msgspec.Meta(ge=0)], _Count, _Count]


class LimitsFile:
    """`start`, then `stop`. For one event loop."""

    def __init__(
        self,
        path: Path,
        counts: MemoryLimiter | TableLimiter,
        *,
        lost: Count,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """lost: counts usage that is gone: `unreadable` (the whole file), `line` (one key), and
        `not_saved` (a write that failed, or had no room for all keys: a restart before the next
        one forgets it)."""
        self._path = path
        self._counts = counts
        self._lost = lost
        self._clock = clock
        self._saved: list[tuple[str, Usage]] = []
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read the file, and write it from now on."""
        self._load()
        self._task = asyncio.create_task(self._keep_saved())

    async def stop(self) -> None:
        """Write what changed, and end."""
        self._stopping.set()
        if self._task is not None:
            await self._task

    def _load(self) -> None:
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("limits_unreadable", path=str(self._path), why=str(error))
            self._lost("unreadable")
            return
        if len(data) > MAX_BYTES:
            log.error(
                "limits_too_large",
                path=str(self._path),
                max_bytes=MAX_BYTES,
                to_do="every key begins anew; remove the file if no sidecar wrote it",
            )
            self._lost("unreadable")
            return
        records = []
        for line in data.splitlines():
            try:
                key_id, *usage = msgspec.json.decode(line, type=_Line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._lost("line")
                continue
            records.append((key_id, Usage(*usage)))
        self._counts.restore(records)

    async def _keep_saved(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):  # the next interval is over
                await asyncio.wait_for(self._stopping.wait(), SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Write what changed since the last time. Never raises: a failure is counted."""
        now = self._clock()
        records = [one for one in self._counts.records() if not is_spent_record(one[1], now)]
        if records == self._saved:
            return
        try:
            await asyncio.to_thread(self._write, records)
        except OSError as error:
            log.warning("limits_not_saved", path=str(self._path), why=str(error))
            self._lost("not_saved")
            return
        self._saved = records

    def _write(self, records: list[tuple[str, Usage]]) -> None:
        """Replace the file as a whole, so that a crash leaves the old one or the new one."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        size = 0
        with os.fdopen(descriptor, "wb") as file:
            for key_id, usage in records:
                line = msgspec.json.encode((key_id, *usage)) + b"\n"
                size += len(line)
                if size > MAX_BYTES:
                    self._lost("not_saved")
                    break
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


def limits_path(settings: Settings) -> Path:
    """The file of the proxy on this port. Two proxies that share a `state_dir` keep two files."""
    return settings.state_dir / f"limits-{settings.proxy.port}.jsonl"


def open_limits(
    settings: Settings, metrics: Metrics, table: int | None, clock: Callable[[], float]
) -> tuple[Limiter, LimitsFile | None]:
    """The limiter that the settings ask for, and the file that this process keeps for it.

    table: descriptor of the memory that several workers share; their parent keeps the file.
    """
    lost = counted(metrics.limits_lost, "limits_lost")
    if table is not None:
        unchecked = counted(metrics.limits_unchecked, "limits_unchecked")
        return TableLimiter(table, unchecked=unchecked, lost=lost), None
    memory = MemoryLimiter(lost)
    if settings.access.mode != "keys":
        return memory, None
    return memory, LimitsFile(limits_path(settings), memory, lost=lost, clock=clock)


def counted(counter: LabelledCounter, event: str) -> Count:
    """Count each time, and log the first time of each reason."""
    logged: set[str] = set()

    def count(reason: str) -> None:
        counter.labels(reason).inc()
        if reason not in logged:
            logged.add(reason)
            log.warning(event, reason=reason)

    return count
