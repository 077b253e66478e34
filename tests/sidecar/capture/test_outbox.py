"""The embedded bus, and the contract of every sink."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sidecar.capture.outbox import Outbox, OutboxReader, outbox_path
from sidecar.errors import OutboxError, SettingsError
from sidecar.records import decode_exchange
from support.exchanges import make_plain_exchange
from support.proxy_kit import Wire


def _names(path: Path, after: int = 0, limit: int = 100) -> list[str]:
    reader = OutboxReader(path)
    rows = reader.read(after, limit)
    reader.close()
    assert [decode_exchange(row.payload).exchange_id for row in rows] == [
        row.exchange_id for row in rows
    ]
    return [row.exchange_id for row in rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bus" / "outbox.db"


@pytest.fixture
def outbox(path: Path) -> Iterator[Outbox]:
    outbox = Outbox(path, max_rows=3, busy_timeout_s=0.05, clock=lambda: 12.5)
    yield outbox
    outbox.close()


@pytest.fixture(params=["outbox", "memory"])
def sink(request: pytest.FixtureRequest, outbox: Outbox, path: Path, wire: Wire) -> Any:
    """A sink with room for three, and how to see what it keeps."""
    if request.param == "outbox":
        return outbox, lambda: _names(path)
    memory = wire.Sink(room=3)
    return memory, lambda: [item.exchange_id for item in memory.exchanges]


class TestEverySink:
    def test_keeps_what_it_says_in_order(self, sink: Any) -> None:
        target, names = sink

        assert target.write([make_plain_exchange("a"), make_plain_exchange("b")]) == 2
        assert target.write([make_plain_exchange("c")]) == 1

        assert names() == ["a", "b", "c"]

    def test_keeps_the_front_of_a_batch_when_it_is_nearly_full(self, sink: Any) -> None:
        target, names = sink
        target.write([make_plain_exchange("a"), make_plain_exchange("b")])

        assert target.write([make_plain_exchange("c"), make_plain_exchange("d")]) == 1
        assert target.write([make_plain_exchange("e")]) == 0

        assert names() == ["a", "b", "c"]


def test_the_reader_goes_on_after_a_position_and_deletes_up_to_one(
    outbox: Outbox, path: Path
) -> None:
    outbox.write([make_plain_exchange(name) for name in "abc"])
    reader = OutboxReader(path)

    assert [(row.seq, row.exchange_id, row.at) for row in reader.read(0, 2)] == [
        (1, "a", 12.5),
        (2, "b", 12.5),
    ]
    assert [row.exchange_id for row in reader.read(2, 2)] == ["c"]
    reader.delete_through(2)
    assert ([row.exchange_id for row in reader.read(0, 9)], reader.count()) == (["c"], 1)
    reader.delete_through(3)
    assert reader.count() == 0

    reader.close()


def test_reading_makes_room_and_numbers_are_never_used_twice(outbox: Outbox, path: Path) -> None:
    outbox.write([make_plain_exchange(name) for name in "abc"])
    reader = OutboxReader(path)
    reader.delete_through(3)

    assert outbox.write([make_plain_exchange("d")]) == 1
    assert [row.seq for row in reader.read(0, 9)] == [4]

    reader.close()


def test_what_users_wrote_is_for_the_owner_only(outbox: Outbox, path: Path) -> None:
    outbox.write([make_plain_exchange("a")])

    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("reason", ["locked", "disk_full", "read_only"])
def test_what_keeps_a_batch_out_is_said_and_does_not_last(
    reason: str, outbox: Outbox, path: Path
) -> None:
    outbox.write([make_plain_exchange("a")])
    other = sqlite3.connect(path, isolation_level=None)
    with outbox._file.connection() as own:
        if reason == "locked":
            other.execute("BEGIN IMMEDIATE")
        elif reason == "read_only":
            own.execute("PRAGMA query_only = ON")
        else:  # SQLite's own page limit gives the same error as a disk without room
            pages = own.execute("PRAGMA page_count").fetchone()[0]
            own.execute(f"PRAGMA max_page_count = {pages}")

    with pytest.raises(OutboxError) as raised:
        outbox.write([replace(make_plain_exchange("b"), request=b"x" * 100_000)])
    assert raised.value.reason == reason

    other.close()
    # The file was opened anew, without the limit.
    assert outbox.write([make_plain_exchange("c")]) == 1
    assert _names(path) == ["a", "c"]


def test_a_deleted_directory_is_made_again(outbox: Outbox, path: Path) -> None:
    outbox.write([make_plain_exchange("a")])
    shutil.rmtree(path.parent)

    assert outbox.write([make_plain_exchange("b")]) == 1

    assert _names(path) == ["b"]


@pytest.mark.parametrize("leave", [(), ("-wal",), ("-wal", "-shm")])
def test_what_went_unread_with_a_deleted_file_is_counted_once(
    path: Path, leave: tuple[str, ...]
) -> None:
    gone: list[int] = []
    writers = [Outbox(path, max_rows=9, on_rows_gone=gone.append) for _ in range(2)]
    writers[0].write([make_plain_exchange("a"), make_plain_exchange("b")])
    writers[1].write([make_plain_exchange("c")])
    reader = OutboxReader(path)
    reader.delete_through(1)
    for suffix in {"", "-wal", "-shm"} - set(leave):
        path.with_name(path.name + suffix).unlink(missing_ok=True)

    for writer, name in zip(writers, "de", strict=True):
        assert writer.write([make_plain_exchange(name)]) == 1

    assert sum(gone) == 2
    assert [row.exchange_id for row in reader.read(0, 9)] == ["d", "e"]
    for writer in writers:
        writer.close()
    reader.close()
    assert _names(path) == ["d", "e"]


def test_the_number_of_rows_is_found_without_reading_the_table(path: Path) -> None:
    """SQLite reads every row for two ends in one SELECT: then each write costs what is unread."""
    from sidecar.capture.outbox import _ROWS

    outbox = Outbox(path, max_rows=999)
    steps: list[int] = []
    for more in (2, 200):
        outbox.write([make_plain_exchange("a")] * more)
        steps.append(0)
        with outbox._file.connection() as connection:
            connection.set_progress_handler(lambda: steps.__setitem__(-1, steps[-1] + 1), 1)
            connection.execute(_ROWS).fetchone()
            connection.set_progress_handler(None, 0)
    outbox.close()

    assert steps[0] == steps[1] > 0


@pytest.mark.tier_2
def test_several_processes_may_begin_one_outbox_together(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "outbox.db"
    script = (
        "import sys; from pathlib import Path; from sidecar.capture.outbox import Outbox;"
        "from sidecar.records import *; sys.stdin.read(1);"
        "box = Outbox(Path(sys.argv[1]), max_rows=999);"
        "[box.write([Exchange(exchange_id=sys.argv[2] + str(n), surface='chat',"
        "public_model='m', adapter='base', arm='champion', propensity=1.0, replica='r',"
        "session_key='s', request=b'{}', choices=(), sampling=Sampling(), stream=False,"
        "status=200, outcome='ok', timings=Timings(started_at=0.0))]) for n in range(20)]"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(path), name], stdin=subprocess.PIPE)
        for name in "abcd"
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"x")
        writer.stdin.close()

    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    assert sorted(_names(path)) == sorted(f"{name}{n}" for name in "abcd" for n in range(20))


@pytest.mark.parametrize(("name", "reason"), [("file", "corrupt"), ("file/in", "unreachable")])
def test_what_is_in_the_place_is_told(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("this is no database, and long enough for SQLite's header: so")
    outbox = Outbox(tmp_path / name, max_rows=3)

    with pytest.raises(OutboxError) as raised:
        outbox.write([make_plain_exchange("a")])

    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a/b.db", "a/b.db"),
        ("sqlite:////var/b.db", "/var/b.db"),
        ("kafka://h:9092/t", "state/outbox.db"),
    ],
)
def test_the_url_names_a_file(url: str, path: str) -> None:
    assert outbox_path(url, Path("state")) == Path(path)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "outbox.db", "kafka://h", "amqp://h/t"])
def test_another_bus_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(SettingsError, match=r"bus\.url: .*; give (sqlite|kafka)://"):
        outbox_path(url, Path("state"))
