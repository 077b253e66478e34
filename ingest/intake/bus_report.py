"""The state of the bus as ingest sees it: a row of the `flag` table, for status and metrics."""

from __future__ import annotations

import msgspec
import structlog
from sqlalchemy.orm import Session

from ingest.errors import BusError
from ingest.intake.reader import BusReader
from sidecar.errors import StoreError
from sidecar.store.database import Database, get_flag, set_flag

log = structlog.get_logger()
FLAG = "bus"
INTERVAL_S = 10.0
"""Seconds between two reports; one asks Kafka for the offsets of every partition."""


class BusState(msgspec.Struct, frozen=True, kw_only=True):
    """What ingest last saw of the bus."""

    at: float
    """Unix seconds."""
    lag: int | None
    """Records that wait to be stored; None when the bus could not say."""
    error: str = ""
    """Why the bus cannot be reached; empty when it can."""


_encoder = msgspec.json.Encoder()


def read_state(session: Session) -> BusState | None:
    """Return what ingest last wrote; None when it has not run, or the row is damaged."""
    text = get_flag(session, FLAG)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=BusState)
    except msgspec.MsgspecError:
        log.warning("bus_state_unreadable")
        return None


class BusReport:
    """Writes the row. For one thread."""

    def __init__(self, bus: BusReader, database: Database) -> None:
        self._bus, self._database = bus, database
        self._due = 0.0

    def report(self, now: float) -> None:
        """Write the state if it is due. Raises: BusError or StoreError."""
        if now >= self._due:
            self._due = now + INTERVAL_S
            self._write(BusState(at=now, lag=self._bus.lag()))

    def failed(self, error: BusError, now: float) -> None:
        """Write why the bus cannot be reached, as far as the store can be."""
        self._due = 0.0  # the next success is told at once
        try:
            self._write(BusState(at=now, lag=None, error=str(error)))
        except StoreError as second:
            log.warning("bus_state_not_stored", why=str(second))

    def _write(self, state: BusState) -> None:
        with self._database.write() as session:
            set_flag(session, FLAG, _encoder.encode(state).decode(), now=state.at)
