"""Bus to store, in batches: at least once from the bus, exactly once in the store.

One write transaction stores a batch, and only then is the bus told, so a crash between the two
means that the batch comes again and changes nothing. A record that cannot be read or stored is kept
whole in `dead_letter`, counted and logged; it never holds up those behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import structlog
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session

from ingest.bus import BusReader, Envelope
from ingest.held_out import is_held_out
from ingest.store.database import Database, count
from ingest.store.exchanges import bury, save_exchange
from sidecar.records import decode_exchange

STAGE = "consume"
STORED = "stored"
REPEATED = "repeated"
POISON = "poison"
UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError)
"""Not a record, or one with a value that no row can hold."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """What a batch came to; the three add up to the records read."""

    stored: int
    repeated: int
    poison: int

    @property
    def read(self) -> int:
        return self.stored + self.repeated + self.poison


def consume(
    bus: BusReader, database: Database, *, limit: int, held_out_rate: float, now: float
) -> Consumed:
    """Take one batch from the bus to the store.

    held_out_rate: share of sessions that are marked as never to be trained on.
    Raises: BusError or StoreError; then nothing is lost, and the batch comes again.
    """
    envelopes = bus.read(limit)
    if not envelopes:
        return Consumed(stored=0, repeated=0, poison=0)
    try:
        consumed = _store(database, envelopes, held_out_rate=held_out_rate, now=now)
    except StatementError:
        # The database itself refused a row, and the whole batch with it. One by one, only the
        # rows that it refuses are put aside.
        log.warning("batch_refused", records=len(envelopes))
        consumed = _store_one_by_one(database, envelopes, held_out_rate=held_out_rate, now=now)
    bus.commit(envelopes[-1].position)
    return consumed


def _store(
    database: Database, envelopes: Sequence[Envelope], *, held_out_rate: float, now: float
) -> Consumed:
    fates = {STORED: 0, REPEATED: 0, POISON: 0}
    with database.write() as session:
        for envelope in envelopes:
            fates[_save(session, envelope, held_out_rate=held_out_rate, now=now)] += 1
        for reason, records in fates.items():
            count(session, STAGE, reason, records)
    return Consumed(**fates)


def _store_one_by_one(
    database: Database, envelopes: Sequence[Envelope], *, held_out_rate: float, now: float
) -> Consumed:
    fates = {STORED: 0, REPEATED: 0, POISON: 0}
    for envelope in envelopes:
        try:
            one = _store(database, [envelope], held_out_rate=held_out_rate, now=now)
        except StatementError as error:
            with database.write() as session:
                _put_aside(session, envelope, error, now=now)
                count(session, STAGE, POISON)
            one = Consumed(stored=0, repeated=0, poison=1)
        fates = {reason: records + getattr(one, reason) for reason, records in fates.items()}
    return Consumed(**fates)


def _save(session: Session, envelope: Envelope, *, held_out_rate: float, now: float) -> str:
    try:
        exchange = decode_exchange(envelope.payload)
        held_out = is_held_out(exchange.session_key, held_out_rate)
        saved = save_exchange(session, exchange, held_out=held_out, now=now)
    except UNREADABLE as error:
        _put_aside(session, envelope, error, now=now)
        return POISON
    return STORED if saved else REPEATED


def _put_aside(session: Session, envelope: Envelope, error: Exception, *, now: float) -> None:
    reason = f"{type(error).__name__}: {error}"[:500]
    log.error("record_put_aside", position=envelope.position, reason=reason)
    bury(session, envelope.payload, reason=reason, now=now)
