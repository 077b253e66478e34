"""The keys are followed, kept when the store is away, and read with the routing table."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection
from structlog.testing import capture_logs

from sidecar.access.key_source import FULL_READ_S, KeySource
from sidecar.access.keys import ApiKey, FreshKey, KeyRing, make_key
from sidecar.metrics.proxy import Metrics
from sidecar.routing.source import POLLS_BETWEEN_READS, RoutingSource, StoreWatch
from sidecar.routing.table import RoutingTable, encode_table
from support.clock import Clock


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


class Kit:
    """A store, and what follows its keys by a clock that stands."""

    def __init__(self, path: Path) -> None:
        self.store, self.metrics, self.clock = Store(path), Metrics(), Clock(100.0)
        self.source = KeySource(self.metrics, self.clock)
        self.watch = StoreWatch(self.store.url, (self.source,), poll_s=0.005)

    @property
    def ids(self) -> list[str]:
        return ids(self.source)

    def failures(self, reason: str) -> float:
        labels = {"reason": reason}
        value = self.metrics.registry.get_sample_value("sidecar_api_key_failures_total", labels)
        return value or 0.0


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    made = Kit(tmp_path / "store.db")
    yield made
    made.watch.stop()


def ids(source: KeySource) -> list[str]:
    assert source.ring is not None
    return sorted(key.key_id for key in source.ring._keys)


def test_before_the_store_is_seen_nothing_is_known(kit: Kit) -> None:
    kit.watch.poll()
    assert kit.source.ring is None
    assert not kit.store.path.exists(), "the store is not ours to make"

    kit.store.run("CREATE TABLE other (x)")  # of a release without keys: not migrated yet
    kit.watch.poll()
    assert kit.source.ring is None
    assert kit.failures("store_away") == 2

    kit.store.create()
    kit.watch.poll()
    assert kit.source.ring == KeyRing()


def test_a_row_becomes_a_key(kit: Kit) -> None:
    fresh = make_key(os.urandom)
    kit.store.create()
    kit.store.put(fresh, 1)

    kit.watch.poll()

    assert kit.source.ring is not None
    assert kit.source.ring.find(fresh.presented.encode()) == ApiKey(
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


def test_changes_are_followed_and_the_rest_is_not_read_again(kit: Kit) -> None:
    one, other = make_key(os.urandom), make_key(os.urandom)
    kit.store.create()
    kit.store.put(one, 1)
    kit.watch.poll()
    first = kit.source.ring
    kit.watch.poll()
    assert kit.source.ring is first, "the relay keeps what it made of it"

    kit.store.put(other, 2)
    kit.watch.poll()
    assert kit.ids == sorted([one.key_id, other.key_id])
    kit.store.put(one, 3, revoked_at=9.0)
    kit.watch.poll()

    assert kit.source.ring is not None
    found = kit.source.ring.find(one.presented.encode())
    assert found is not None
    assert found.revoked
    assert kit.metrics.registry.get_sample_value("sidecar_api_keys") == 1


def test_another_store_of_the_same_generation_is_noticed_in_time(kit: Kit) -> None:
    revoked, other = make_key(os.urandom), make_key(os.urandom)
    kit.store.create()
    kit.store.put(revoked, 1)
    kit.watch.poll()
    kit.store.delete()
    kit.store.create()
    kit.store.put(other, 1)

    kit.clock.now += FULL_READ_S - 0.1
    kit.watch.poll()
    before = kit.ids
    kit.clock.now += 0.1
    for _ in range(POLLS_BETWEEN_READS):  # an unchanged file is read at one of these
        kit.watch.poll()

    assert (before, kit.ids) == ([revoked.key_id], [other.key_id])


def test_the_last_keys_outlive_the_store(kit: Kit) -> None:
    fresh = make_key(os.urandom)
    kit.store.create()
    kit.store.put(fresh, 1)
    kit.watch.poll()
    kit.store.delete()
    with capture_logs() as lines:
        kit.watch.poll()
        kit.watch.poll()

    assert kit.ids == [fresh.key_id]
    assert kit.failures("store_away") == 2
    assert [line["event"] for line in lines] == ["api_keys_kept"]


@pytest.mark.parametrize(
    ("column", "stored"),
    [
        ("scopes", "'infer fly'"),
        ("scopes", "NULL"),
        ("best_of_max", "'many'"),
        ("project", "''"),
        ("name", "CAST(x'ff80c3' AS TEXT)"),
        ("scopes", "CAST(x'ff80c3' AS TEXT)"),
    ],
)
def test_a_row_that_is_no_key_opens_nothing_and_hides_no_other(
    column: str, stored: str, kit: Kit
) -> None:
    good, bad = make_key(os.urandom), make_key(os.urandom)
    kit.store.create()
    kit.store.put(good, 1)
    kit.store.put(bad, 2)
    kit.store.run(f"UPDATE api_key SET {column} = {stored} WHERE key_id = ?", bad.key_id)
    with capture_logs() as lines:
        kit.watch.poll()

    assert kit.ids == [good.key_id]
    assert (kit.failures("unreadable"), kit.failures("store_away")) == (1, 0)
    told = [line["key_id"] for line in lines if line["event"] == "api_key_unreadable"]
    assert told == [bad.key_id]
    assert bad.secret_hash not in repr(lines)


def test_one_thread_follows_routing_and_keys_and_neither_stops_the_other(kit: Kit) -> None:
    class Waiting(KeySource):
        came = threading.Event()

        def read(self, connection: Connection) -> None:
            super().read(connection)
            if self.ring:
                self.came.set()

    keys = Waiting(kit.metrics)
    routing = RoutingSource(kit.store.url, "m", poll_s=0.005, metrics=kit.metrics, readers=(keys,))
    kit.store.create()  # and no routing table
    before = threading.active_count()
    routing.start()
    started = threading.active_count() - before

    fresh = make_key(os.urandom)
    kit.store.put(fresh, 1)
    assert keys.came.wait(5.0)
    assert ids(keys) == [fresh.key_id]

    table = RoutingTable(model="m", champion="m--v1", generation=1)
    kit.store.run("DROP TABLE api_key")
    kit.store.run("CREATE TABLE routing_table (model, generation, body, updated_at)")
    kit.store.run("INSERT INTO routing_table VALUES ('m', 1, ?, 0)", encode_table(table))
    routing.poll()
    routing.stop()

    assert started == 1
    assert routing.table == table
    assert ids(keys) == [fresh.key_id]
