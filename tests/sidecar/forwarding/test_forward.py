"""From the outbox to a sender: what leaves the outbox, in which order, and what is set aside."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from sidecar.capture.outbox import Outbox, OutboxReader, OutboxRow
from sidecar.errors import ForwardingError
from sidecar.feedback import Feedback, encode_feedback
from sidecar.forwarding.process import Forwarder, Report, Tally, forward_until, partition_key
from sidecar.forwarding.sender import DeadLetters
from sidecar.records import encode_exchange
from support.exchanges import make_plain_exchange
from support.memory_sender import MemorySender


class Kit:
    """An outbox, a forwarder, and the sender that it uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outbox = Outbox(folder / "outbox.db", max_rows=1_000)
        self.reader = OutboxReader(folder / "outbox.db")
        self.sender = MemorySender()
        self.opened = 0
        self.tally = Tally()
        self.forwarder = Forwarder(
            self.reader,
            self.open,
            DeadLetters(folder / "dead-letters.db", max_bytes=5_000),
            self.tally,
            partition_by="caller",
        )

    def open(self) -> MemorySender:
        self.opened += 1
        return self.sender

    def write(self, *names: str, **changes: Any) -> None:
        self.outbox.write([make_plain_exchange(name, **changes) for name in names])

    @property
    def sent(self) -> list[str]:
        return [record.exchange_id for record in self.sender.kept]

    @property
    def waiting(self) -> list[str]:
        return [row.exchange_id for row in self.reader.read(0, 100)]

    def dead(self) -> list[tuple[str, str, int]]:
        with sqlite3.connect(self.folder / "dead-letters.db") as connection:
            rows = connection.execute(
                "SELECT exchange_id, reason, LENGTH(payload) FROM dead_letter ORDER BY rowid"
            ).fetchall()
        connection.close()
        return rows


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path)
    yield made
    made.outbox.close()
    made.reader.close()


def test_records_leave_the_outbox_in_order_once_they_are_acknowledged(kit: Kit) -> None:
    kit.write("a", "b", "c")

    assert (kit.forwarder.step(), kit.forwarder.step()) == (3, 0)

    assert (kit.sent, kit.waiting) == (["a", "b", "c"], [])
    assert kit.tally.take(0) == Report(forwarded=3, waiting=0)
    assert kit.tally.take(0) == Report(waiting=0)


def test_a_record_that_is_not_acknowledged_stays_and_nothing_behind_it_is_sent_twice(
    kit: Kit,
) -> None:
    kit.write("a", "b", "c")
    kit.sender.failing = {"b"}

    with pytest.raises(ForwardingError) as raised:
        kit.forwarder.step()
    assert raised.value.reason == "timeout"
    assert (kit.sent, kit.waiting) == (["a", "c"], ["b", "c"])
    assert (kit.sender.closed, kit.opened) == (1, 1)

    kit.sender.failing = set()
    kit.write("d")
    assert kit.forwarder.step() == 3
    assert (kit.sent, kit.waiting) == (["a", "c", "b", "d"], [])
    assert kit.opened == 2


def test_a_record_that_no_topic_takes_is_set_aside_and_blocks_nothing(kit: Kit) -> None:
    kit.write("a")
    kit.write("big", request=b"x" * 3_000)
    kit.write("c")
    kit.sender.max_bytes = 1_000

    assert kit.forwarder.step() == 3

    size = len(encode_exchange(make_plain_exchange("big", request=b"x" * 3_000)))
    assert (kit.sent, kit.waiting) == (["a", "c"], [])
    assert kit.dead() == [("big", "MessageSizeTooLargeError", size)]
    assert kit.sender.announced == [("big", size)]
    report = kit.tally.take(0)
    assert (report.forwarded, report.set_aside) == (2, {"too_large": 1})


def test_what_is_set_aside_is_bounded_and_the_oldest_goes_first(kit: Kit) -> None:
    kit.sender.max_bytes = 1_000
    for name in ("old", "new", "newest"):
        kit.write(name, request=b"x" * 2_000)

    kit.forwarder.step()

    assert [name for name, _, _ in kit.dead()] == ["new", "newest"]


def test_one_record_is_kept_however_large_it_is(kit: Kit) -> None:
    kit.sender.max_bytes = 1_000
    kit.write("huge", request=b"x" * 9_000)

    kit.forwarder.step()

    assert [name for name, _, _ in kit.dead()] == ["huge"]


def test_what_was_set_aside_too_long_ago_is_deleted_a_few_at_a_time(
    kit: Kit, tmp_path: Path
) -> None:
    path = tmp_path / "aside" / "dead-letters.db"
    aside = DeadLetters(path, max_age_s=30.0)
    forwarder = Forwarder(kit.reader, kit.open, aside, kit.tally, partition_by="caller")
    forwarder.expire(0.0)  # there is no file yet
    for number in range(8):
        row = OutboxRow(seq=number, exchange_id=f"e{number}", at=float(number), payload=b"said")
        assert aside.keep(row, "too large")

    def left() -> list[str]:
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("SELECT exchange_id FROM dead_letter ORDER BY rowid")
            return [name for (name,) in rows]

    found = []
    # Of 0 to 6 s, at 37 s: five, then two. The rest at the next look, an hour later.
    for now in (37.0, 37.0, 38.5, 37.0 + 3_600.0):
        forwarder.expire(now)
        found.append(left())

    assert found == [["e5", "e6", "e7"], ["e7"], ["e7"], []]
    assert kit.tally.take(0) == Report(expired=8, waiting=0)
    assert kit.tally.take(0) == Report(waiting=0)
    assert b"said" not in path.read_bytes()


def test_a_damaged_file_of_dead_letters_is_said_once_an_hour(tmp_path: Path) -> None:
    aside = DeadLetters(tmp_path / "damaged.db", max_age_s=30.0)
    (tmp_path / "damaged.db").write_bytes(b"no database at all" * 99)

    with capture_logs() as logs:
        assert aside.expire(100.0) == aside.expire(101.0) == 0

    assert [one["event"] for one in logs] == ["dead_letters_not_expired"]


def test_a_new_outbox_with_the_numbers_of_the_old_one_is_forwarded_too(kit: Kit) -> None:
    kit.write("a", "b")
    kit.sender.failing = {"a"}
    with pytest.raises(ForwardingError):
        kit.forwarder.step()
    for suffix in ("", "-wal", "-shm"):
        (kit.folder / f"outbox.db{suffix}").unlink(missing_ok=True)
    kit.write("c", "d")

    assert kit.forwarder.step() == 2

    assert kit.sent == ["b", "c", "d"]


def test_a_record_that_cannot_be_read_is_forwarded_for_ingest_to_put_aside(kit: Kit) -> None:
    kit.write("a")
    with sqlite3.connect(kit.folder / "outbox.db") as connection:
        connection.execute("UPDATE outbox SET payload = x'ff00'")
    connection.close()

    assert kit.forwarder.step() == 1

    assert kit.sender.kept[0].key == b"a"


def test_all_exchanges_of_one_caller_have_one_key_whatever_their_sessions() -> None:
    def key(by: Any, **changes: Any) -> bytes | None:
        return partition_key(encode_exchange(make_plain_exchange("a", **changes)), by)

    same = {"project": "p", "key_id": "k", "user": "u"}
    assert key("caller", **same, session_key="m:1") == key("caller", **same, session_key="m:2")
    others = [{**same, name: "other"} for name in same]
    assert len({key("caller", **one) for one in (same, *others)}) == 4
    assert key("caller", user="a\0b") != key("caller", key_id="a", user="b")
    assert key("session", session_key="m:1") == key("session", session_key="m:1", user="u")
    assert key("session", session_key="m:1") != key("session", session_key="m:2")


def test_feedback_on_one_target_has_one_key_in_its_project() -> None:
    def key(project: str, target: str) -> bytes | None:
        record = Feedback(
            feedback_id="fb_1",
            kind="feedback",
            target_kind="session",
            target=target,
            project=project,
            received_at=1.0,
            score=1.0,
        )
        return partition_key(encode_feedback(record), "caller")

    assert key("p", "s") == key("p", "s")
    assert len({key("p", "s"), key("p", "t"), key("q", "s")}) == 3
    assert partition_key(b"\x81\xa6record\xa8feedback", "caller") is None


def test_a_broker_that_is_away_is_counted_and_asked_again(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = threading.Event()
    pauses: list[float] = []

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        kit.sender.failing = set() if len(pauses) == 3 else {"a"}
        if len(pauses) == 4:
            stopping.set()
        return stopping.is_set()

    monkeypatch.setattr(stopping, "wait", wait)
    kit.write("a")
    kit.sender.failing = {"a"}

    looked: list[float] = []
    monkeypatch.setattr(kit.forwarder, "expire", looked.append)

    forward_until(kit.forwarder, kit.tally, stopping)

    assert pauses == [0.5, 1.0, 2.0, 0.1]
    assert len(looked) == 5  # before each attempt
    assert kit.sent == ["a"]
    assert kit.tally.take(0) == Report(forwarded=1, failures={"timeout": 3}, waiting=0)
