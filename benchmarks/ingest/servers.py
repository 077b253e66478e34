"""A Kafka broker and a PostgreSQL of the benchmark's own, started when the first cell needs them.

They are those of the tests (`tests/support`); PostgreSQL syncs to disk here, as a real one does.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from demo.ports import free_port

HOME = "SIDECAR_TEST_KAFKA_HOME"
DURABLE = {
    "fsync": "on",
    "full_page_writes": "on",
    "autovacuum": "on",
    "wal_level": "replica",
    "shared_buffers": "128MB",
}
"""PostgreSQL's own defaults, which the tests' server departs from."""


class NoServerError(Exception):
    """The server cannot be had here; the message says why."""


class Servers:
    """The servers of one run; leave it to stop them."""

    def __init__(self, folder: Path) -> None:
        """folder: exists; the broker's files go there."""
        self._folder = folder
        self._open = ExitStack()
        self._broker: Any = None  # Any: `support` is not a room
        self._databases: Any = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    def new_topic(self) -> str:
        """Return a `bus.url` with a topic that nobody else has. Raises: NoServerError."""
        if self._broker is None:
            self._broker = self._start_broker()
        url: str = self._broker.new_url()
        return url

    def new_database(self) -> str:
        """Make an empty database. Returns: its URL. Raises: NoServerError."""
        _use_test_support()
        from support import postgres

        if self._databases is None:
            options = {**postgres.OPTIONS, **DURABLE}
            try:
                server = self._open.enter_context(postgres.private_server(options))
            except postgres.NoPostgresError as error:
                raise NoServerError(f"no PostgreSQL: {error}") from error
            self._databases = postgres.Databases(server.url())
        url: str = self._databases.new(migrated=False)
        return url

    def _start_broker(self) -> Any:  # Any: as above
        _use_test_support()
        from support import kafka_broker

        home = Path(os.environ.get(HOME, kafka_broker.ROOT.parent / "shared" / "kafka"))
        if not (home / "broker").is_file() or kafka_broker.find_java() is None:
            raise NoServerError(f"no Kafka: {home} has no `broker`, or Java is missing; set {HOME}")
        port = free_port(followers=2)
        folder = self._folder / "kafka"
        folder.mkdir()
        kafka_broker.write_settings(folder / "broker", port)
        command = (str(home / "broker"), str(folder / "broker"), str(port))
        broker = kafka_broker.Broker(f"127.0.0.1:{port}", command, folder)
        self._open.callback(broker.stop)
        try:
            broker.start()
        except AssertionError as error:
            raise NoServerError(f"no Kafka: {error}") from error
        return broker


def _use_test_support() -> None:
    folder = str(Path(__file__).resolve().parents[2] / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
