"""The embedded bus, and the choice of the bus by `bus.url`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ingest.errors import BusError
from ingest.intake.kafka_bus import KafkaBus
from ingest.intake.reader import BATCH_BYTES, BusReader, Envelope
from sidecar.capture.outbox import OutboxReader
from sidecar.errors import OutboxError, SettingsError
from sidecar.settings import Kafka, OutboxUrl, read_bus_url


class OutboxBus:
    """The embedded bus: the proxy's outbox file, with one reader at a time."""

    def __init__(self, reader: OutboxReader) -> None:
        self._reader = reader

    def epoch(self) -> int:
        return 0  # the outbox has one reader

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        try:
            # Committed records are deleted, so reading starts at the front of the file.
            rows = self._reader.read(0, limit, limit_bytes)
        except OutboxError as error:
            raise BusError(str(error)) from error
        return [
            Envelope(position=row.seq, payload=row.payload, where=f"seq {row.seq}") for row in rows
        ]

    def commit(self, position: int) -> None:
        try:
            self._reader.delete_through(position)
        except OutboxError as error:
            raise BusError(str(error)) from error

    def lag(self) -> int:
        try:
            return self._reader.count()
        except OutboxError as error:
            raise BusError(str(error)) from error

    def put_aside(self, envelope: Envelope, reason: str) -> None:
        """Nothing: the store's table has the record, and the outbox no other readers."""

    def close(self) -> None:
        self._reader.close()


def open_bus(url: str, kafka: Kafka | None = None) -> BusReader:
    """Open the bus that `bus.url` names; a bus that is away is noticed when it is read.

    kafka: the section of that name; None: its defaults.
    Raises: SettingsError when the URL names no bus.
    """
    try:
        place = read_bus_url(url)
    except ValueError as error:
        raise SettingsError(f"bus.url: {error}") from error
    if isinstance(place, OutboxUrl):
        return OutboxBus(OutboxReader(Path(place.path)))
    return KafkaBus(place, kafka or Kafka())
