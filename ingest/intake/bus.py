"""The bus as ingest sees it: read a batch, store it, then say how far it was stored.

Delivery is at least once: what was read and not committed is read again. That the effect is exactly
once is the store's doing (the exchange id is the key).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ingest.errors import BusError
from sidecar.capture.outbox import OutboxReader, outbox_path
from sidecar.errors import OutboxError


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One record of the bus, not looked into yet."""

    position: int
    """Grows along the bus."""
    payload: bytes


class BusReader(Protocol):
    """What ingest needs of a bus."""

    def read(self, limit: int) -> Sequence[Envelope]:
        """The next records after the last commit, in order, at most `limit`; none when it is empty.

        Reading again without a commit gives the same records. Raises: BusError.
        """

    def commit(self, position: int) -> None:
        """Everything up to and including `position` is stored and need not be kept.

        Raises: BusError.
        """

    def lag(self) -> int:
        """Records that wait. Raises: BusError."""

    def close(self) -> None:
        """Let go of the bus; what was not committed stays."""


class OutboxBus:
    """The embedded bus: the proxy's outbox file. One reader at a time."""

    def __init__(self, reader: OutboxReader) -> None:
        self._reader = reader

    def read(self, limit: int) -> Sequence[Envelope]:
        try:
            # What is committed is deleted, so the front of the file is where to go on.
            rows = self._reader.read(0, limit)
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

    Raises: SettingsError for any but `sqlite:///path`: Kafka comes with a later release, as one
    more class here that passes the same contract.
    """
    return OutboxBus(OutboxReader(outbox_path(url)))
