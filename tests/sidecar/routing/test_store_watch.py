"""One connection for everything that is polled in the store, and no work when nothing changed."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from structlog.testing import capture_logs

from sidecar.routing.source import POLLS_BETWEEN_READS, RevisionReader, StoreWatch


class Reader:
    """Reads one number, and counts."""

    def __init__(self) -> None:
        self.read_values: list[int] = []
        self.away: list[str] = []

    def read(self, connection: Connection) -> None:
        self.read_values.append(connection.execute(text("SELECT n FROM t")).scalar_one())

    def store_away(self, why: str) -> None:
        self.away.append(why)


def write(path: Path, value: int) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE IF NOT EXISTS t(n INTEGER)")
    connection.execute("DELETE FROM t")
    connection.execute("INSERT INTO t VALUES (?)", (value,))
    connection.commit()
    connection.close()


def test_an_unchanged_file_is_not_read_again_and_a_change_is_seen_at_once(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    write(path, 1)
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)

    watch.poll()
    watch.poll()
    watch.poll()
    write(path, 2)
    watch.poll()
    watch.stop()

    assert reader.read_values == [1, 2]
    assert reader.away == []


def test_even_an_unchanged_file_is_read_now_and_then(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    write(path, 1)
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)

    for _ in range(2 * POLLS_BETWEEN_READS):
        watch.poll()
    watch.stop()

    assert len(reader.read_values) == 3  # the first poll, and every fiftieth


def test_a_file_that_was_replaced_is_followed_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    write(path, 1)
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)
    watch.poll()

    other = tmp_path / "other.db"
    write(other, 7)
    other.replace(path)
    watch.poll()
    path.unlink()
    watch.poll()
    write(path, 8)
    watch.poll()
    watch.stop()

    assert reader.read_values == [1, 7, 8]
    assert len(reader.away) == 1


def test_a_read_that_failed_is_tried_again_at_the_next_poll(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    sqlite3.connect(path).close()
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)

    watch.poll()
    watch.poll()
    watch.stop()

    assert len(reader.away) == 2
    assert "no such table" in reader.away[0]


@contextmanager
def watched(path: Path, reader: Reader) -> Iterator[StoreWatch]:
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)
    try:
        yield watch
    finally:
        watch.stop()


@contextmanager
def writer(path: Path, journal: str = "WAL") -> Iterator[sqlite3.Connection]:
    """A connection that stays open, as those of the other programs do. Commits each statement; each
    begins the log anew, so that its length tells nothing."""
    write(path, 0)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        assert connection.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal.lower(),)
        connection.execute("PRAGMA wal_autocheckpoint=1")
        yield connection
    finally:
        connection.close()


def put(connection: sqlite3.Connection, value: int) -> None:
    connection.execute("UPDATE t SET n = ?", (value,))


def age(path: Path, seconds: float) -> None:
    """As if the last write to the file and its log had been so long ago."""
    at = time.time_ns() - int(seconds * 1e9)
    for file in (path, Path(f"{path}-wal")):
        os.utime(file, ns=(at, at))


@pytest.mark.parametrize(
    ("journal", "changes"), [("WAL", 200), ("DELETE", 50), ("TRUNCATE", 50), ("PERSIST", 50)]
)
def test_every_change_is_seen_by_the_look_behind_it(
    journal: str, changes: int, tmp_path: Path
) -> None:
    path, reader = tmp_path / "store.db", Reader()
    rng = random.Random(5)
    with writer(path, journal) as connection, watched(path, reader) as watch:
        watch.poll()
        for value in range(1, changes + 1):
            time.sleep(rng.choice((0.0, rng.random() * 0.03)))
            if rng.random() < 0.2:
                watch.poll()  # also one behind which nothing is new
            put(connection, value)
            watch.poll()
            assert reader.read_values[-1] == value
    assert reader.away == []


def test_a_change_is_seen_whose_file_times_a_poll_has_seen_before(tmp_path: Path) -> None:
    """As on a slow disk: a transaction is in the log for a while before it can be read."""
    path, reader = tmp_path / "store.db", Reader()
    with writer(path) as connection, watched(path, reader) as watch:
        for value in range(1, 6):
            put(connection, value)
            age(path, 10)
            watch.poll()
            watch.poll()
            files = (path, Path(f"{path}-wal"))
            before = [os.stat(file) for file in files]
            put(connection, -value)
            for file, had in zip(files, before, strict=True):
                os.utime(file, ns=(had.st_atime_ns, had.st_mtime_ns))
                assert os.stat(file).st_size == had.st_size
            watch.poll()
            assert reader.read_values[-1] == -value
    assert reader.away == []


@pytest.mark.parametrize(
    ("revision", "expected"), [("9999_future", "store_is_newer"), ("0001", "store_is_too_old")]
)
def test_a_store_of_another_release_is_said_once_and_read(
    tmp_path: Path, revision: str, expected: str
) -> None:
    path, reader = tmp_path / "store.db", Reader()
    write(path, 1)
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("CREATE TABLE alembic_version(version_num TEXT)")
        store.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
    watch = StoreWatch(f"sqlite:///{path}", [RevisionReader(), reader], poll_s=1.0)

    with capture_logs() as said:
        watch.poll()
        write(path, 2)
        watch.poll()
    watch.stop()

    assert [(one["event"], one["store"]) for one in said] == [(expected, revision)]
    assert reader.read_values == [1, 2]
