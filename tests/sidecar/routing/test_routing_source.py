"""The table is followed, never backwards, and kept when the store is away."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.metrics.proxy import Metrics
from sidecar.routing.source import RoutingSource
from sidecar.routing.table import RoutingTable, encode_table


class Store:
    """The table `routing_table`, as the migrations make it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def create(self) -> None:
        self._run(
            "CREATE TABLE routing_table "
            "(model TEXT PRIMARY KEY, generation INTEGER, body TEXT, updated_at REAL)"
        )

    def put(self, table: RoutingTable) -> None:
        self.put_text(encode_table(table), table.generation)

    def put_text(self, body: str, generation: int = 0) -> None:
        self._run("INSERT OR REPLACE INTO routing_table VALUES ('m', ?, ?, 0)", (generation, body))

    def _run(self, statement: str, values: tuple[str | int, ...] = ()) -> None:
        connection = sqlite3.connect(self.path)
        with connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(statement, values)
        connection.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def source(store: Store, metrics: Metrics) -> Iterator[RoutingSource]:
    source = RoutingSource(store.url, "m", poll_s=0.005, metrics=metrics)
    yield source
    source.stop()


def _failures(metrics: Metrics, reason: str) -> float:
    labels = {"reason": reason}
    return metrics.registry.get_sample_value("sidecar_routing_failures_total", labels) or 0.0


def _table(generation: int, champion: str = "m--v1") -> RoutingTable:
    return RoutingTable(model="m", champion=champion, generation=generation)


def test_before_the_first_table_the_base_answers(source: RoutingSource, store: Store) -> None:
    source.poll()

    assert source.table == RoutingTable(model="m")
    assert not store.path.exists(), "the store is not ours to make"


def test_a_newer_table_is_taken(source: RoutingSource, store: Store, metrics: Metrics) -> None:
    store.create()
    source.poll()
    for generation in (1, 2):
        store.put(_table(generation, f"m--v{generation}"))
        source.poll()
        assert source.table == _table(generation, f"m--v{generation}")

    assert metrics.registry.get_sample_value("sidecar_routing_generation") == 2


def test_an_older_table_is_never_taken(source: RoutingSource, store: Store) -> None:
    store.create()
    store.put(_table(5, "new"))
    source.poll()

    store.put(_table(4, "old"))
    source.poll()

    assert source.table == _table(5, "new")


def test_another_table_of_the_same_generation_is_taken_and_the_same_is_not_taken_twice(
    store: Store, metrics: Metrics
) -> None:
    taken: list[RoutingTable] = []
    source = RoutingSource(store.url, "m", poll_s=3_600.0, metrics=metrics, taken=taken.append)
    store.create()
    for champion in ("first", "second", "second"):
        store.put(_table(2**40 - 1, champion))
        source.poll()

    assert [one.champion for one in taken] == ["first", "second"]
    assert source.table == _table(2**40 - 1, "second")
    source.stop()


def test_a_first_table_of_generation_0_is_taken(source: RoutingSource, store: Store) -> None:
    store.create()
    store.put(_table(0))

    source.poll()

    assert source.table.champion == "m--v1"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("'not json'", "unreadable"),
        ("""'{"champion":"x"}'""", "unreadable"),
        ("""'{"model":"m","champion":"m--v1","generation":9007199254740991}'""", "unreadable"),
        ("CAST(x'7bff80c3' AS TEXT)", "unreadable"),
        ("x'7b226d6f64656c223a22ff227d'", "unreadable"),
        ("""'{"model":"other","generation":9}'""", "other_model"),
        ("""'{"model":"m","champion":"m--v1","generation":0}'""", "older"),
    ],
)
def test_a_damaged_row_changes_nothing_and_is_counted(
    body: str, reason: str, source: RoutingSource, store: Store, metrics: Metrics
) -> None:
    store.create()
    store.put(_table(1))
    source.poll()

    store._run(f"UPDATE routing_table SET body = {body}")
    source.poll()

    assert source.table == _table(1)
    assert (_failures(metrics, reason), _failures(metrics, "store_away")) == (1, 0)
    store.put(_table(2, "after"))
    source.poll()
    assert source.table == _table(2, "after")


def test_the_last_table_outlives_the_store_and_a_new_store_is_followed(
    source: RoutingSource, store: Store, metrics: Metrics
) -> None:
    store.create()
    store.put(_table(1))
    source.poll()

    for suffix in ("", "-wal", "-shm"):
        store.path.with_name(store.path.name + suffix).unlink(missing_ok=True)
    source.poll()
    assert source.table == _table(1)
    assert _failures(metrics, "store_away") == 1

    store.create()
    store.put(_table(2))
    source.poll()
    assert source.table == _table(2)


def test_the_thread_finds_a_change_by_itself(
    store: Store, source: RoutingSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = threading.Event()
    original = source.default._take

    def take(found: RoutingTable) -> None:
        original(found)
        if found.generation == 1:
            taken.set()

    monkeypatch.setattr(source.default, "_take", take)
    store.create()
    source.start()

    store.put(_table(1))

    assert taken.wait(5.0)
    assert source.table == _table(1)


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(
        SettingsError, match=r"store\.url: is not a database URL; see docs/settings\.md"
    ):
        RoutingSource("nonsense", "m", poll_s=1.0, metrics=Metrics())
