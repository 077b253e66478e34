"""`python -m benchmarks.ingest.recovery`: how long Kafka's consumers need after a broker's SIGKILL.

A broker of its own is killed and started again while records come in; the time is from its first
answer until a consumer has read and committed again. `ours` is `KafkaBus` of ingest, `default` a
consumer with the library's own settings. Prints one line for each run; needs the broker of the
tests (`SIDECAR_TEST_KAFKA_HOME`), and writes no result file: `tests/ingest/intake/test_kafka.py`
has the counts, docs/log.md the figures.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from demo.ports import free_port

RUNS = 3
LIMIT_S = 150.0


def main(runs: int) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from support.kafka_broker import ROOT, Broker, write_settings

    home = os.environ.get("SIDECAR_TEST_KAFKA_HOME", str(ROOT.parent / "shared" / "kafka"))
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port(followers=2)
        write_settings(folder / "broker", port)
        command = (f"{home}/broker", str(folder / "broker"), str(port))
        broker = Broker(f"127.0.0.1:{port}", command, folder)
        broker.start()
        try:
            for _ in range(runs):
                for kind in ("default", "ours"):
                    away_s, again_s = measure(broker, kind)
                    print(f"{kind}: broker away {away_s:.1f} s, read again after {again_s:.1f} s")
        finally:
            broker.stop()
    return 0


def measure(broker: Any, kind: str) -> tuple[float, float]:  # Any: `support` is not a room
    """Return how long the broker was away, and how long the consumer was behind it."""
    from sidecar.forwarding.sender import ensure_topics
    from sidecar.settings import Kafka, KafkaUrl, read_bus_url

    place = read_bus_url(broker.new_url())
    assert isinstance(place, KafkaUrl)
    ensure_topics(place, Kafka(partitions=4))
    stopping = threading.Event()
    writer = threading.Thread(target=write, args=(broker.server, place.topic, stopping))
    writer.start()
    consumer = Ours(place) if kind == "ours" else Default(place)
    try:
        until(consumer.step)
        broker.kill()
        began = time.monotonic()
        back: list[float] = []

        def start() -> None:
            broker.start()
            back.append(time.monotonic())

        starter = threading.Thread(target=start)
        starter.start()
        until(lambda: consumer.step() and bool(back))
        again = time.monotonic()
        starter.join()
    finally:
        stopping.set()
        writer.join()
        consumer.close()
    return back[0] - began, again - back[0]


def write(server: str, topic: str, stopping: threading.Event) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=server, reconnect_backoff_max_ms=500)
    number = 0
    while not stopping.is_set():
        producer.send(topic, key=str(number).encode(), value=b"x" * 200)
        number += 1
        stopping.wait(0.01)
    producer.close(timeout=2)


def until(condition: Any) -> None:  # Any: a callable
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() >= deadline:
            raise SystemExit(f"nothing was read for {LIMIT_S:.0f} s")


class Ours:
    """Ingest's reader."""

    def __init__(self, place: Any) -> None:
        from ingest.intake.bus import open_bus

        self._bus = open_bus(str(place))

    def step(self) -> bool:
        """Return True if records were read and committed."""
        from ingest.errors import BusError

        try:
            self._bus.epoch()
            envelopes = self._bus.read(500)
            if envelopes:
                self._bus.commit(envelopes[-1].position)
        except BusError:
            return False
        return bool(envelopes)

    def close(self) -> None:
        self._bus.close()


class Default:
    """A consumer with the library's settings."""

    def __init__(self, place: Any) -> None:
        from kafka import KafkaConsumer

        self._consumer = KafkaConsumer(
            place.topic,
            bootstrap_servers=list(place.servers),
            group_id=f"{place.topic}.default",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )

    def step(self) -> bool:
        """As above."""
        from kafka.errors import KafkaError

        try:
            found = self._consumer.poll(timeout_ms=100)
            if found:
                self._consumer.commit(timeout_ms=5_000)
        except KafkaError:
            return False
        return bool(found)

    def close(self) -> None:
        self._consumer.close(autocommit=False, timeout_ms=2_000)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
