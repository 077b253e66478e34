"""The log of a SQLite file is emptied while others read and write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sidecar.store.write_ahead import empty_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.db"


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection with a time limit of 7 s whose log holds something."""
    with closing(sqlite3.connect(path, timeout=7.0, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE said(words TEXT)")
        yield connection


def log_bytes(path: Path) -> int:
    return path.with_name("some.db-wal").stat().st_size


@pytest.mark.parametrize("attempt_ms", [0, 20])
def test_it_tries_until_the_reader_has_gone(
    path: Path, writer: sqlite3.Connection, attempt_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM said").fetchall()
    writer.execute("INSERT INTO said VALUES ('x')")
    waits: list[float] = []

    def leave_at_the_second(pause_s: float) -> None:
        waits.append(pause_s)
        if len(waits) == 2:
            reader.close()

    monkeypatch.setattr("sidecar.store.write_ahead.time.sleep", leave_at_the_second)

    assert empty_log(writer, wait_s=60.0, attempt_ms=attempt_ms)

    assert waits == [0.1, 0.1]
    assert log_bytes(path) == 0


def test_it_gives_up_and_the_connection_is_as_before(
    path: Path, writer: sqlite3.Connection
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM said").fetchall()
        writer.execute("INSERT INTO said VALUES ('x')")

        assert not empty_log(writer, wait_s=0.0)

    assert log_bytes(path) > 0
    assert writer.execute("PRAGMA busy_timeout").fetchone() == (7_000,)
