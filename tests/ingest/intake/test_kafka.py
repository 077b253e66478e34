"""Kafka as the bus: consumers that share a topic, records that cannot be stored, and deaths."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select

from ingest.errors import BusError
from ingest.intake.bus import BusReader, open_bus
from ingest.intake.choose import Sessions
from ingest.intake.consume import consume
from sidecar.capture.outbox import Outbox
from sidecar.records import Exchange, decode_exchange
from sidecar.settings import KafkaUrl, read_bus_url
from sidecar.store.database import Database
from sidecar.store.models import DeadLetterRow
from support.ingest_kit import Kit, forward, make_exchange, settle
from support.kafka_broker import UP_S, Broker, unclosed_sockets


def of_users(*numbers: int, users: int = 16) -> list[Exchange]:
    return [make_exchange(f"e{number}", user=f"u{number % users}") for number in numbers]


def place_of(url: str) -> KafkaUrl:
    place = read_bus_url(url)
    assert isinstance(place, KafkaUrl)
    return place


def until(condition: Callable[[], bool], limit_s: float = UP_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Reader:
    """A consumer in a thread of its own, as in a process of its own."""

    def __init__(self, url: str) -> None:
        self.bus: BusReader = open_bus(url)
        self.users: list[str] = []
        """The user of each record that was committed."""
        self.ids: list[str] = []
        self.epoch = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.epoch = self.bus.epoch()
            envelopes = self.bus.read(100)
            exchanges = [decode_exchange(one.payload) for one in envelopes]
            if envelopes:
                self.bus.commit(envelopes[-1].position)
            self.users += [one.user for one in exchanges]
            self.ids += [one.exchange_id for one in exchanges]
        self.bus.close()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def test_kafka_gives_each_caller_to_one_of_two_consumers(broker: Broker, tmp_path: Path) -> None:
    url = broker.new_url()
    forward(url, of_users(*range(40)), tmp_path, partitions=4)
    first = Reader(url)
    second: Reader | None = None
    try:
        until(lambda: len(first.ids) == 40)
        before = first.epoch
        second = Reader(url)
        until(lambda: second.epoch > 0)
        first.users.clear()

        forward(url, of_users(*range(40, 120)), tmp_path)
        until(lambda: len(first.ids) + len(second.ids) == 120)
        assert set(first.users).isdisjoint(second.users)
        assert first.users
        assert second.users
        assert first.epoch == before  # what it keeps, it had

        second.stop()
        until(lambda: first.epoch > before)  # what it gets, another one had
        forward(url, of_users(*range(120, 160)), tmp_path)
        until(lambda: len(first.ids) + len(second.ids) == 160)
        assert len(set(first.ids) | set(second.ids)) == 160
    finally:
        first.stop()
        if second is not None:
            second.stop()


def test_kafka_that_is_away_is_a_bus_error_that_names_it() -> None:
    bus = open_bus("kafka://127.0.0.1:1/t")

    with unclosed_sockets():
        for use in (bus.epoch, bus.lag):
            with pytest.raises(BusError, match=r"127\.0\.0\.1:1, topic t"):
                use()
    bus.close()


def test_kafka_keeps_a_poison_record_and_goes_on(broker: Broker, kit: Kit, tmp_path: Path) -> None:
    from kafka import KafkaProducer

    url = broker.new_url()
    place = place_of(url)
    forward(url, [kit.exchange("a")], tmp_path)
    producer = KafkaProducer(bootstrap_servers=broker.server)
    producer.send(place.topic, key=b"somebody", value=b"\xffrubbish", partition=0).get(30)
    producer.close()
    bus = open_bus(url)
    settle(bus, 2)

    consumed = consume(bus, kit.database, limit=10, sessions=Sessions(held_out_rate=0.0), now=1.0)
    lag = bus.lag()
    bus.close()

    assert (consumed.stored, consumed.poison, lag) == (1, 1, 0)
    with kit.database.read() as session:
        assert [row.payload for row in session.scalars(select(DeadLetterRow))] == [b"\xffrubbish"]
    (letter,) = broker.records(place.dead_letters, 1)
    headers = {name: value.decode() for name, value in letter.headers}
    assert (letter.key, letter.value) == (b"somebody", b"\xffrubbish")
    assert headers["where"] == f"{place.topic}[0]@0"
    assert headers["reason"].startswith("DecodeError") or "Error" in headers["reason"]
    assert headers["set-aside-by"] == "ingest"


class Process:
    """One of our processes, and its next one."""

    def __init__(self, folder: Path, module: str) -> None:
        self._log = folder / f"{module}.log"
        config = str(folder / "sidecar.toml")
        self._command = (sys.executable, "-P", "-m", module, "--config", config)
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.running = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def stop(self) -> None:
        self.running.send_signal(signal.SIGTERM)
        try:
            self.running.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()


def test_kafka_loses_and_doubles_nothing_when_all_are_killed(
    broker: Broker, tmp_path: Path
) -> None:
    count, callers = 600, 12
    url = broker.new_url()
    (tmp_path / "sidecar.toml").write_text(
        f'state_dir = "{tmp_path}/state"\n[serving]\nupstreams = ["http://127.0.0.1:9"]\n'
        f'[bus]\nurl = "{url}"\nbatch = 20\n[kafka]\npartitions = 3\n'
        f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
    )
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()
    database.close()
    written = of_users(*range(count), users=callers)
    outbox = Outbox(tmp_path / "state" / "outbox.db", max_rows=10_000)
    done = threading.Event()

    def write() -> None:
        for start in range(0, count, 10):
            assert outbox.write(written[start : start + 10]) == 10
            done.wait(0.05)

    def stored() -> list[tuple[str, str]]:
        with sqlite3.connect(f"file:{tmp_path}/store.db?mode=ro", uri=True) as connection:
            rows = connection.execute("SELECT exchange_id, user FROM exchange ORDER BY seq")
            found = rows.fetchall()
        connection.close()
        return found

    forwarder, ingest = Process(tmp_path, "sidecar.forwarding"), Process(tmp_path, "ingest")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        until(lambda: len(stored()) > 0)
        if broker.owned:
            broker.kill()
        forwarder.kill()
        if broker.owned:
            broker.start()
        forwarder.start()
        until(lambda: len(stored()) > count // 3)
        ingest.kill()
        ingest.start()
        until(lambda: len(stored()) >= count)
    finally:
        done.set()
        writer.join()
        forwarder.stop()
        ingest.stop()
        outbox.close()

    rows = stored()
    assert sorted(name for name, _ in rows) == sorted(one.exchange_id for one in written)
    for user in {user for _, user in rows}:
        in_order = [one.exchange_id for one in written if one.user == user]
        assert [name for name, other in rows if other == user] == in_order
    with sqlite3.connect(tmp_path / "store.db") as connection:
        counted = connection.execute(
            "SELECT count FROM counter WHERE stage = 'consume' AND reason = 'stored'"
        ).fetchone()
    connection.close()
    assert counted == (count,)
    logs = "".join(
        (tmp_path / f"{name}.log").read_text() for name in ("sidecar.forwarding", "ingest")
    )
    assert "Traceback" not in logs
