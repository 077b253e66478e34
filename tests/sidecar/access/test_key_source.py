"""The keys are followed, kept when the store is away, and read with the routing table."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from structlog.testing import capture_logs

from sidecar.access.key_source import FULL_READ_S, KeySource
from sidecar.access.keys import ApiKey, FreshKey, KeyRing, make_key
from sidecar.metrics.proxy import Metrics
from sidecar.routing.source import POLLS_BETWEEN_READS, RoutingSource, StoreWatch
from sidecar.routing.table import RoutingTable, encode_table


class Store:
    """The tables that proxies poll, as the migrations make them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def create(self) -> None:
        self.run(
            "CREATE TABLE api_key (key_id TEXT PRIMARY KEY, project TEXT, name TEXT, "
            "secret_hash TEXT, scopes TEXT, expires_at REAL, requests_per_minute INTEGER, "
            "tokens_per_day INTEGER, best_of_max INTEGER, created_at REAL, revoked_at REAL, "
            "generation INTEGER)"
        )

    def put(self, fresh: FreshKey, generation: int, **changes: object) -> None:
        row = {
            "key_id": fresh.key_id,
            "project": "shop",
            "name": "n",
            "secret_hash": fresh.secret_hash,
            "scopes": "infer operate",
            "expires_at": 5.5,
            "requests_per_minute": 60,
            "tokens_per_day": 10**12,
            "best_of_max": 4,
            "created_at": 1.0,
            "revoked_at": None,
            "generation": generation,
            **changes,
        }
        self.run(f"INSERT OR REPLACE INTO api_key VALUES ({', '.join('?' * 12)})", *row.values())

    def run(self, statement: str, *values: object) -> None:
        connection = sqlite3.connect(self.path)
        with connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(statement, values)
        connection.close()

    def delete(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.db")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(metrics: Metrics, clock: Clock) -> KeySource:
    return KeySource(metrics, clock)


@pytest.fixture
def watch(store: Store, source: KeySource) -> Iterator[StoreWatch]:
    watch = StoreWatch(store.url, (source,), poll_s=0.005)
    yield watch
    watch.stop()


def failures(metrics: Metrics, reason: str) -> float:
    labels = {"reason": reason}
    return metrics.registry.get_sample_value("sidecar_api_key_failures_total", labels) or 0.0


def ids(source: KeySource) -> list[str]:
    assert source.ring is not None
    return sorted(key.key_id for key in source.ring._keys)


def test_before_the_store_is_seen_nothing_is_known(
    store: Store, source: KeySource, watch: StoreWatch, metrics: Metrics
) -> None:
    watch.poll()
    assert source.ring is None
    assert not store.path.exists(), "the store is not ours to make"

    store.run("CREATE TABLE other (x)")  # of a release without keys: not migrated yet
    watch.poll()
    assert source.ring is None
    assert failures(metrics, "store_away") == 2


def test_a_store_without_keys_is_known_to_have_none(
    store: Store, source: KeySource, watch: StoreWatch
) -> None:
    store.create()

    watch.poll()

    assert source.ring == KeyRing()


def test_a_row_becomes_a_key(store: Store, source: KeySource, watch: StoreWatch) -> None:
    fresh = make_key(os.urandom)
    store.create()
    store.put(fresh, 1)

    watch.poll()

    assert source.ring is not None
    assert source.ring.find(fresh.presented.encode()) == ApiKey(
        key_id=fresh.key_id,
        project="shop",
        secret_hash=fresh.secret_hash,
        scopes=frozenset({"infer", "operate"}),
        expires_at=5.5,
        requests_per_minute=60,
        tokens_per_day=10**12,
        best_of_max=4,
        name="n",
    )


def test_changes_are_followed_and_the_rest_is_not_read_again(
    store: Store, source: KeySource, watch: StoreWatch, metrics: Metrics
) -> None:
    one, other = make_key(os.urandom), make_key(os.urandom)
    store.create()
    store.put(one, 1)
    watch.poll()
    first = source.ring
    watch.poll()
    assert source.ring is first, "the relay keeps what it made of it"

    store.put(other, 2)
    watch.poll()
    assert ids(source) == sorted([one.key_id, other.key_id])
    store.put(one, 3, revoked_at=9.0)
    watch.poll()

    assert source.ring is not None
    found = source.ring.find(one.presented.encode())
    assert found is not None
    assert found.revoked
    assert metrics.registry.get_sample_value("sidecar_api_keys") == 1


def test_another_store_of_the_same_generation_is_noticed_in_time(
    store: Store, source: KeySource, watch: StoreWatch, clock: Clock
) -> None:
    revoked, other = make_key(os.urandom), make_key(os.urandom)
    store.create()
    store.put(revoked, 1)
    watch.poll()
    store.delete()
    store.create()
    store.put(other, 1)

    clock.now += FULL_READ_S - 0.1
    watch.poll()
    before = ids(source)
    clock.now += 0.1
    for _ in range(POLLS_BETWEEN_READS):  # an unchanged file is read at one of these
        watch.poll()

    assert (before, ids(source)) == ([revoked.key_id], [other.key_id])


def test_the_last_keys_outlive_the_store(
    store: Store, source: KeySource, watch: StoreWatch, metrics: Metrics
) -> None:
    fresh = make_key(os.urandom)
    store.create()
    store.put(fresh, 1)
    watch.poll()
    store.delete()
    with capture_logs() as lines:
        watch.poll()
        watch.poll()

    assert ids(source) == [fresh.key_id]
    assert failures(metrics, "store_away") == 2
    assert [line["event"] for line in lines] == ["api_keys_kept"]


@pytest.mark.parametrize(
    "changes",
    [
        {"scopes": "infer fly"},
        {"scopes": None},
        {"best_of_max": "many"},
        {"expires_at": "soon"},
        {"project": ""},
    ],
)
def test_a_row_that_is_no_key_opens_nothing_and_hides_no_other(
    changes: dict[str, str | None],
    store: Store,
    source: KeySource,
    watch: StoreWatch,
    metrics: Metrics,
) -> None:
    good, bad = make_key(os.urandom), make_key(os.urandom)
    store.create()
    store.put(good, 1)
    store.put(bad, 2, **changes)
    with capture_logs() as lines:
        watch.poll()

    assert ids(source) == [good.key_id]
    assert failures(metrics, "unreadable") == 1
    assert [line["key_id"] for line in lines if line["event"] == "api_key_unreadable"] == [
        bad.key_id
    ]
    assert bad.secret_hash not in repr(lines)


@pytest.mark.parametrize("column", ["project", "name", "secret_hash", "scopes"])
def test_a_row_with_bytes_that_are_no_utf8_opens_nothing_and_hides_no_other(
    column: str, store: Store, source: KeySource, watch: StoreWatch, metrics: Metrics
) -> None:
    good, bad = make_key(os.urandom), make_key(os.urandom)
    store.create()
    store.put(good, 1)
    store.put(bad, 2)
    store.run(f"UPDATE api_key SET {column} = CAST(x'ff80c3' AS TEXT) WHERE key_id = ?", bad.key_id)

    watch.poll()

    assert ids(source) == [good.key_id]
    assert failures(metrics, "unreadable") == 1
    assert failures(metrics, "store_away") == 0


def test_one_thread_follows_routing_and_keys_and_neither_stops_the_other(
    store: Store, metrics: Metrics
) -> None:
    class Waiting(KeySource):
        came = threading.Event()

        def read(self, connection: Connection) -> None:
            super().read(connection)
            if self.ring:
                self.came.set()

    keys = Waiting(metrics)
    routing = RoutingSource(store.url, "m", poll_s=0.005, metrics=metrics, readers=(keys,))
    store.create()  # and no routing table
    before = threading.active_count()
    routing.start()
    started = threading.active_count() - before

    fresh = make_key(os.urandom)
    store.put(fresh, 1)
    assert keys.came.wait(5.0)
    assert ids(keys) == [fresh.key_id]

    table = RoutingTable(model="m", champion="m--v1", generation=1)
    store.run("DROP TABLE api_key")
    store.run("CREATE TABLE routing_table (model, generation, body, updated_at)")
    store.run("INSERT INTO routing_table VALUES ('m', 1, ?, 0)", encode_table(table))
    routing.poll()
    routing.stop()

    assert started == 1
    assert routing.table == table
    assert ids(keys) == [fresh.key_id]


def test_a_reader_that_fails_is_told_and_the_next_one_reads(store: Store) -> None:
    class Reader:
        def __init__(self, statement: str) -> None:
            self.statement = statement
            self.seen: list[object] = []

        def read(self, connection: Connection) -> None:
            self.seen.append(connection.execute(text(self.statement)).scalar())

        def store_away(self, why: str) -> None:
            self.seen.append(why)

    store.create()
    broken, whole = Reader("SELECT x FROM nowhere"), Reader("SELECT 7")
    watch = StoreWatch(store.url, (broken, whole), poll_s=1.0)

    watch.poll()
    watch.stop()

    assert (broken.seen, whole.seen) == (["no such table: nowhere"], [7])
