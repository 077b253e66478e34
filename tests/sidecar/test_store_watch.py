"""One connection for everything that is polled in the store, and no work when nothing changed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import Connection, text

from sidecar.store_watch import LOOKS_BETWEEN_READS, StoreWatch


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

    watch.look()
    watch.look()
    watch.look()
    write(path, 2)
    watch.look()
    watch.stop()

    assert reader.read_values == [1, 2]
    assert reader.away == []


def test_even_an_unchanged_file_is_read_now_and_then(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    write(path, 1)
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)

    for _ in range(2 * LOOKS_BETWEEN_READS):
        watch.look()
    watch.stop()

    assert len(reader.read_values) == 3  # the first look, and every fiftieth


def test_a_file_that_was_replaced_is_followed_and_one_that_is_gone_is_told(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    write(path, 1)
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)
    watch.look()

    other = tmp_path / "other.db"
    write(other, 7)
    other.replace(path)
    watch.look()
    path.unlink()
    watch.look()
    write(path, 8)
    watch.look()
    watch.stop()

    assert reader.read_values == [1, 7, 8]
    assert len(reader.away) == 1


def test_a_read_that_failed_is_tried_again_at_the_next_look(tmp_path: Path) -> None:
    path, reader = tmp_path / "store.db", Reader()
    sqlite3.connect(path).close()
    watch = StoreWatch(f"sqlite:///{path}", [reader], poll_s=1.0)

    watch.look()
    watch.look()
    watch.stop()

    assert len(reader.away) == 2
    assert "no such table" in reader.away[0]
