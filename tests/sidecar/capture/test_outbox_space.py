"""A drained outbox is a small file again, and its size in bytes is bounded."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sidecar.capture import outbox as outbox_space
from sidecar.capture.outbox import Outbox, OutboxReader
from sidecar.records import Exchange
from support.exchanges import make_plain_exchange

MB = 2**20
BODY = random.Random(1).randbytes(100_000)


def _exchange(name: str, body: bytes = BODY) -> Exchange:
    return make_plain_exchange(name, request=body)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.db"


@pytest.fixture
def outbox(path: Path) -> Iterator[Outbox]:
    with closing(Outbox(path, max_rows=10_000)) as outbox:
        yield outbox


@pytest.fixture
def reader(path: Path) -> Iterator[OutboxReader]:
    with closing(OutboxReader(path)) as reader:
        yield reader


def fill(outbox: Outbox, rows: int) -> None:
    for start in range(0, rows, 50):
        batch = [_exchange(f"e{n}") for n in range(start, min(start + 50, rows))]
        assert outbox.write(batch) == len(batch)


def drain(reader: OutboxReader, meanwhile: Callable[[], object] = lambda: None) -> int:
    read = 0
    while rows := reader.read(0, 50):
        read += len(rows)
        meanwhile()
        reader.delete_through(rows[-1].seq)
    return read


def sizes(path: Path) -> tuple[int, int]:
    """Bytes of the file and of its log."""
    return path.stat().st_size, path.with_name(f"{path.name}-wal").stat().st_size


def test_a_drained_outbox_is_small(outbox: Outbox, reader: OutboxReader, path: Path) -> None:
    fill(outbox, 500)
    assert path.stat().st_size > 45 * MB

    assert drain(reader) == 500

    assert max(sizes(path)) < MB
    assert outbox.write([_exchange("next")]) == 1
    assert [row.exchange_id for row in reader.read(0, 9)] == ["next"]


def test_it_is_small_while_a_writer_goes_on(
    outbox: Outbox, reader: OutboxReader, path: Path
) -> None:
    fill(outbox, 500)
    written = iter(range(40))

    def write_more() -> None:
        if (number := next(written, None)) is not None:
            assert outbox.write([_exchange(f"more{number}", b"{}")]) == 1

    assert drain(reader, write_more) == 540

    assert max(sizes(path)) < MB


def test_it_shrinks_while_it_is_never_empty(
    outbox: Outbox, reader: OutboxReader, path: Path
) -> None:
    """More waits than VACUUM may copy: the free pages are given back in steps."""
    fill(outbox, 500)
    (last,) = reader.read(449, 1)

    for _ in range(200):  # of a limited time each, so a slow machine needs more of them
        reader.delete_through(last.seq)
        with closing(sqlite3.connect(path)) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if path.stat().st_size < 23 * MB:
            break

    assert path.stat().st_size < 23 * MB  # 5 MB that wait, and what a file in use keeps
    assert len(reader.read(0, 100)) == 50


def test_a_file_of_an_older_version_shrinks_too(
    path: Path, outbox: Outbox, reader: OutboxReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_space, "prepare", lambda _: None)  # as it was made before
    fill(outbox, 100)
    monkeypatch.undo()
    assert auto_vacuum(path) == 0

    drain(reader)

    assert max(sizes(path)) < MB
    assert auto_vacuum(path) == 2
    assert outbox.write([_exchange("next")]) == 1
    assert [row.seq for row in reader.read(0, 9)] == [101]  # numbers are not used again


def auto_vacuum(path: Path) -> int:
    with closing(sqlite3.connect(path)) as other:
        found: int = other.execute("PRAGMA auto_vacuum").fetchone()[0]
        return found


def test_a_lock_delays_the_shrinking_only(outbox: Outbox, reader: OutboxReader, path: Path) -> None:
    fill(outbox, 100)
    reader.delete_through(100)
    with closing(sqlite3.connect(path, isolation_level=None)) as locker:
        locker.execute("BEGIN IMMEDIATE")
        assert reader.read(0, 9) == []
        assert path.stat().st_size > 5 * MB
        locker.execute("ROLLBACK")

    assert reader.read(0, 9) == []

    assert max(sizes(path)) < MB


def test_the_waiting_records_are_bounded_in_bytes(path: Path) -> None:
    with closing(Outbox(path, max_rows=10_000, max_bytes=MB)) as outbox:
        kept = [outbox.write([_exchange(f"e{n}")] * 2) for n in range(20)]
        with closing(OutboxReader(path)) as reader:
            assert len(reader.read(0, 99)) == sum(kept)
            reader.delete_through(10**9)
            assert outbox.write([_exchange("fits")]) == 1

    assert 8 <= sum(kept) <= 10
    assert kept == sorted(kept, reverse=True)  # the front of a batch, then nothing
