"""The buses and the stores that are measured, and the processes that work on them.

A bus is filled by its sink and named by its URL; a store is named by its URL. A new kind of either
is one function here and one entry in `BUSES` or `STORES`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.ingest.servers import Servers
from benchmarks.ingest.traffic import MODEL, WEIGHTS
from sidecar.capture.outbox import Outbox, OutboxReader
from sidecar.forwarding.process import Forwarder, Tally
from sidecar.forwarding.sender import DeadLetters, KafkaSender, ensure_topics
from sidecar.records import Exchange
from sidecar.settings import Kafka, KafkaUrl, read_bus_url
from sidecar.store.database import Database

ROOT = Path(__file__).resolve().parents[2]
CONSUMER = Path(__file__).with_name("consumer.py")
FILL = 64
"""Exchanges that a sink is given at once, as the proxy's recorder does."""
Json = dict[str, Any]  # Any: figures of a child


class Sink(Protocol):
    """The part of `sidecar.capture.recorder.ExchangeSink` that fills a bus."""

    def write(self, exchanges: Sequence[Exchange]) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bus:
    url: str
    open_sink: Callable[[], Sink]

    def fill(self, exchanges: Iterator[Exchange], count: int) -> Sink:
        """Write this many records. Returns: the sink, closed.

        Raises: RuntimeError when the bus takes fewer.
        """
        sink = self.open_sink()
        for at in range(0, count, FILL):
            batch = [next(exchanges) for _ in range(min(FILL, count - at))]
            if sink.write(batch) < len(batch):
                raise RuntimeError(f"{self.url} is full after {at} records")
        sink.close()
        return sink


@contextmanager
def outbox(folder: Path) -> Iterator[Bus]:
    """The embedded bus."""
    path = folder / "outbox.db"
    yield Bus(f"sqlite:///{path}", lambda: Outbox(path, max_rows=10_000_000))


@contextmanager
def sqlite(folder: Path) -> Iterator[str]:
    """A store in a file, without tables: the consumer makes those of its version."""
    yield f"sqlite:///{folder}/store.db"


@contextmanager
def migrated(folder: Path) -> Iterator[str]:
    """A store in a file, with its tables."""
    with sqlite(folder) as url:
        database = Database(url)
        database.upgrade()
        database.close()
        yield url


@contextmanager
def kafka(folder: Path, servers: Servers) -> Iterator[Bus]:
    """A topic of one partition on a broker; filled as the proxy does, through an outbox."""
    url = servers.new_topic()
    place = read_bus_url(url)
    assert isinstance(place, KafkaUrl)
    ensure_topics(place, Kafka(partitions=1))
    yield Bus(url, lambda: KafkaSink(place, folder / "waiting.db"))


class KafkaSink:
    """Forwards what is written when it is closed, and measures that."""

    def __init__(self, place: KafkaUrl, path: Path) -> None:
        self._place, self._path = place, path
        self._outbox = Outbox(path, max_rows=10_000_000)
        self._written = 0
        self.figures: Json = {}

    def write(self, exchanges: Sequence[Exchange]) -> int:
        self._written += len(exchanges)
        return self._outbox.write(exchanges)

    def close(self) -> None:
        self._outbox.close()
        forwarder = Forwarder(
            OutboxReader(self._path),
            lambda: KafkaSender(self._place, Kafka(partitions=1)),
            DeadLetters(self._path.with_name("dead.db")),
            Tally(),
            partition_by="caller",
        )
        began, cpu = time.monotonic(), time.process_time()
        while forwarder.step():
            pass
        self.figures = {
            "wall_s": time.monotonic() - began,
            "cpu_s": time.process_time() - cpu,
            "records": self._written,
        }
        forwarder.close()


@contextmanager
def postgres(_folder: Path, servers: Servers) -> Iterator[str]:
    """An empty database on a PostgreSQL that syncs; a new one for each measurement."""
    yield servers.new_database()


BUSES: dict[str, Callable[[Path, Servers], AbstractContextManager[Bus]]] = {
    "outbox": lambda folder, _: outbox(folder),
    "kafka": kafka,
}
STORES: dict[str, Callable[[Path, Servers], AbstractContextManager[str]]] = {
    "sqlite": lambda folder, _: sqlite(folder),
    "postgres": postgres,
}


class Consumer:
    """`consumer.py` in a process of its own."""

    def __init__(
        self,
        bus: str,
        store: str,
        *,
        tree: Path = ROOT,
        batch: int = 200,
        stay: bool = False,
        weights: Path = WEIGHTS,
        settle_s: float | None = None,
    ) -> None:
        """tree: the checkout whose `ingest` is measured.
        settle_s: `groups.settle_s`; None: the version decides when it wants."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open while the process is
        settle = {} if settle_s is None else {"SIDECAR_GROUPS__SETTLE_S": str(settle_s)}
        command = [sys.executable, "-P", str(CONSUMER), bus, store, "--batch", str(batch)]
        command += ["--model", MODEL]
        if (weights / "tokenizer.json").is_file():
            command += ["--weights", str(weights)]
        self.process = subprocess.Popen(
            [*command, "--stay"] if stay else command,
            env={**os.environ, "PYTHONPATH": str(tree), **settle},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def lines(self) -> Iterator[Json]:
        """Yield what it says, until it ends. Raises: RuntimeError when it failed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)
        if self.process.wait():
            raise RuntimeError(f"the consumer ended: {self._said()}")

    def until_done(self) -> Json:
        """Wait for its end. Returns: its last line."""
        *_, last = self.lines()
        return dict(last)

    def check(self) -> None:
        """Raises: RuntimeError when it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the consumer ended: {self._said()}")

    def rss_mb(self) -> float:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_s(self) -> float:
        """CPU time since its start, of the process and the kernel for it."""
        text = Path(f"/proc/{self.process.pid}/stat").read_text()
        user, system = text.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")[-2_000:]

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self._log.close()
