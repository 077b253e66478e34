"""PostgreSQL ends and comes back while ingest works: nothing is lost and nothing stored twice."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from sqlalchemy import func, select

from ingest.intake.loop import Intake
from sidecar.records import encode_exchange
from sidecar.settings import Groups, Serving, Settings
from sidecar.store.database import Database
from sidecar.store.models import ChoiceRow, DeadLetterRow, ExchangeRow
from support.ingest_kit import Kit, MemoryBus, make_exchange
from support.postgres import Databases, NoPostgresError, Server, private_server

RECORDS, OUTAGES = 300, 4
SETTINGS = Settings(
    serving=Serving(model="smollm", sampling_defaults={}, grammar="as_asked"),
    groups=Groups(held_out_rate=0.0),
)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of this test alone, which it may stop."""
    try:
        with private_server() as running:
            yield running
    except NoPostgresError as error:
        pytest.skip(f"no PostgreSQL here: {error}")


def test_a_server_that_ends_while_ingest_works_costs_and_doubles_no_record(server: Server) -> None:
    bus = MemoryBus([encode_exchange(make_exchange(f"e{number}")) for number in range(RECORDS)])
    rng = random.Random(7)
    failures = 0
    with closing(Database(Databases(server.url()).new())) as database:
        kit = Kit(database)
        intake = Intake(bus, database, SETTINGS, now=lambda: 10.0, batch=5)
        for outage in range(OUTAGES):
            end: Callable[[], None] = server.kill if outage % 2 else server.stop
            threading.Timer(rng.uniform(0.0, 0.1), end).start()
            while intake.attempt() < 0.5:  # the pause after a failure
                time.sleep(0.001)
            failures += 1
            assert intake.attempt() > 0.0
            _wait_until_down(server)
            server.start()
        while bus.lag():
            if intake.attempt() >= 0.5:
                failures += 1
        while intake.step():
            pass

        with database.read() as session:
            assert session.scalar(select(func.count()).select_from(ExchangeRow)) == RECORDS
            assert session.scalar(select(func.count()).select_from(ChoiceRow)) == RECORDS
            assert session.scalar(select(func.count()).select_from(DeadLetterRow)) == 0
        counted = kit.counts("consume")
    assert counted["stored"] == RECORDS
    assert counted.get("poison", 0) == 0
    assert failures >= OUTAGES


def _wait_until_down(server: Server) -> None:
    deadline = time.monotonic() + 60
    while server.runs:
        assert time.monotonic() < deadline
        time.sleep(0.01)
