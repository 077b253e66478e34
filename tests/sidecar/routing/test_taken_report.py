"""A proxy tells when it took a table, and serves all the same when it cannot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sqlalchemy import select

from sidecar.routing import source as taken_report
from sidecar.routing.source import NAME_CHARACTERS, TakenReporter, proxy_name
from sidecar.routing.table import RoutingTable
from sidecar.store.database import Database
from sidecar.store.models import TableTakenRow
from support.clock import Clock
from support.stores import NewStore


def table(generation: int) -> RoutingTable:
    return RoutingTable(model="m", champion="m--v1", generation=generation)


def rows(database: Database) -> list[tuple[str, str, int, float]]:
    with database.read() as session:
        found = session.scalars(select(TableTakenRow).order_by(TableTakenRow.proxy))
        return [(one.proxy, one.model, one.generation, one.taken_at) for one in found]


def wait_for(database: Database, number: int) -> list[tuple[str, str, int, float]]:
    deadline = time.monotonic() + 20.0
    while len(found := rows(database)) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.both_stores
def test_each_process_has_one_row_with_its_newest_table(new_store: NewStore) -> None:
    database, clock = new_store(), Clock(100.0)
    url = database.engine.url.render_as_string(hide_password=False)
    one, other = TakenReporter(url, "a:1", clock), TakenReporter(url, "a:2", clock)

    one.report(table(7))
    wait_for(database, 1)
    clock.now = 103.5
    one.report(table(8))
    one.stop()
    other.report(table(8))
    other.stop()

    assert rows(database) == [("a:1", "m", 8, 103.5), ("a:2", "m", 8, 103.5)]


def test_a_store_that_comes_later_is_told_with_the_time_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken_report, "RETRY_S", 0.01)
    monkeypatch.setattr(taken_report, "TRIES", 100_000)
    clock = Clock(100.0)
    reporter = TakenReporter(f"sqlite:///{tmp_path}/store.db", "a:1", clock)

    reporter.report(table(3))
    clock.now = 200.0
    database = Database(f"sqlite:///{tmp_path}/store.db")
    database.upgrade()

    assert wait_for(database, 1) == [("a:1", "m", 3, 100.0)]
    reporter.stop()
    database.close()


def test_a_report_that_was_held_up_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    database = Database(url)
    database.upgrade()
    clock = Clock(200.0)
    newer = TakenReporter(url, "a:1", clock)
    newer.report(table(4))
    newer.stop()
    clock.now = 100.0
    older = TakenReporter(url, "a:1", clock)
    older.report(table(3))
    older.stop()

    assert rows(database) == [("a:1", "m", 4, 200.0)]
    database.close()


def test_a_process_is_named_by_machine_port_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "shop-3")
    monkeypatch.setattr("os.getpid", lambda: 4711)

    assert proxy_name(8080, None) == "shop-3:8080"
    assert proxy_name(8080, 2) == "shop-3:8080 worker 2"
    assert proxy_name(0, None) == "shop-3:4711", "a free port is not known yet"
    monkeypatch.setattr("socket.gethostname", lambda: "x" * 300)
    assert len(proxy_name(8080, 2)) == NAME_CHARACTERS
