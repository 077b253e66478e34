"""The bus for ingest: read a batch, store it, then commit its position.

Delivery is at least once: records that were read but not committed are read again. The store makes
the effect exactly once, because the exchange id is its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.errors import BusError
from sidecar.capture.outbox import OutboxReader, outbox_path
from sidecar.errors import OutboxError

BATCH_BYTES = 4 * 2**20
"""Payload of one batch: over 500 exchanges of ordinary size, or ten with prompts of 100,000 tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One record of the bus, not parsed yet."""

    position: int
    """Position of the record; it increases along the bus."""
    payload: bytes


class BusReader(Protocol):
    """The operations that ingest needs of a bus."""

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        """Return up to `limit` records after the last commit, in order; none when it is empty.

        limit_bytes: of payloads; the first record is returned however large it is.
        Reading again without a commit returns the same records. Raises: BusError.
        """

    def commit(self, position: int) -> None:
        """Declare the records up to and including `position` stored: the bus may drop them.

        Raises: BusError.
        """

    def lag(self) -> int:
        """Return the number of waiting records. Raises: BusError."""

    def close(self) -> None:
        """Close the bus; uncommitted records stay."""


class OutboxBus:
    """The embedded bus: the proxy's outbox file, with one reader at a time."""

    def __init__(self, reader: OutboxReader) -> None:
        self._reader = reader

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        try:
            # Committed records are deleted, so reading starts at the front of the file.
            rows = self._reader.read(0, limit, limit_bytes)
        except OutboxError as error:
            raise BusError(str(error)) from error
        return [Envelope(position=row.seq, payload=row.payload) for row in rows]

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

    def close(self) -> None:
        self._reader.close()


def open_bus(url: str) -> BusReader:
    """Open the bus that `bus.url` names.

    Raises: SettingsError for any URL but `sqlite:///path`. Kafka comes with a later release, as
        another class in this module that passes the same contract.
    """
    return OutboxBus(OutboxReader(outbox_path(url)))
