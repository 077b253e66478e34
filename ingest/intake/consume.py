"""Move batches from the bus to the store: at least once from the bus, exactly once in the store.

What needs no lock is done first: records are parsed, checked, placed in their sessions, packed and
compressed. Then one write transaction inserts them and decides which of them become groups, and
only when it is on the disk the records are committed on the bus. After a crash between the two, the
batch comes again and changes nothing. A batch whose records are large once they are read is stored
in portions, so memory is bounded whatever the records hold.

A record that cannot be read or stored is kept whole in `dead_letter`, counted and logged; it never
blocks later records. An exchange whose token ids do not decode to its text is stored, marked, and
never learned from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import msgspec
import structlog
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import Session

from ingest.feedback.deriving import Arrived, Derived, Placed, derive, join_waiting, save_feedback
from ingest.feedback.signals import tool_error
from ingest.feedback.store import save_derived, withdraw_abandonments
from ingest.intake.bus import BusReader, Envelope
from ingest.intake.choose import PLACING_STAGE as SESSIONS_STAGE, Sessions, as_moved
from ingest.privacy.screen import STAGE as PRIVACY_STAGE, Screened, keep_all
from ingest.retention.deletion import remove_leftovers
from ingest.sampling.round import REHEARSED, SERVED, completion_tokens
from ingest.store.exchanges import (
    NEW,
    ExchangeRows,
    StoredExchange,
    dead_letter,
    encode_exchanges,
    insert_exchanges,
    rows_of,
    stored_among,
)
from ingest.store.listing import day_of
from ingest.store.sessions import any_forgotten, forgotten_among, save_forgotten
from ingest.tokens import DISAGREES, NOT_CHECKED
from sidecar.bounds import bound
from sidecar.feedback import Feedback, decode_feedback, is_feedback
from sidecar.records import IMPORTED, Exchange, decode_exchange, read_prompt_ids
from sidecar.store.database import Database, count
from sidecar.store.keyring import BUS, Keyring, is_sealed

# What became of the records of a batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """Outcome of a batch; all numbers but `decided` add up to the records read."""

    stored: int = 0
    repeated: int = 0
    poison: int = 0
    feedback: int = 0
    """Feedback and outcomes, whatever became of them (`ingest.feedback.deriving`)."""
    dropped: int = 0
    """Records that the privacy policy of their project dropped."""
    forgotten: int = 0
    """Records of a user, a session or an exchange that `sidecar forget` removed."""
    decided: int = 0
    """Exchanges that selection decided, of those stored."""

    @property
    def read(self) -> int:
        found = self.stored + self.repeated + self.poison
        return found + self.feedback + self.dropped + self.forgotten

    def __add__(self, other: Consumed) -> Consumed:
        more = asdict(other)
        return Consumed(**{name: one + more[name] for name, one in asdict(self).items()})


# Drop records that arrive after their user, session or exchange was forgotten.


def forgotten_of(session: Session, arrived: Sequence[StoredExchange], *, now: float) -> set[str]:
    """Return the ids of those that are not stored, delete what was stored of them before, and have
    feedback on them dropped when it comes."""
    if not any_forgotten(session):
        return set()
    named = {one.exchange.exchange_id: (one.exchange, one.session_id) for one in arrived}
    forgotten = forgotten_among(session, named)
    if forgotten:
        remove_leftovers(session, sorted(forgotten))
        save_forgotten(session, "exchange", forgotten, now=now, until=None)
    return forgotten


STAGE = "consume"
TOKEN_STAGE = "token_check"
BOUND_STAGE = "bounded"
"""Counter rows: (stage, reason of `sidecar.bounds.bound`) -> stored exchanges."""
STORED = "stored"
REPEATED = "repeated"
POISON = "poison"
DROPPED = "dropped"
"""By the privacy policy of the project."""
FORGOTTEN = "forgotten"
"""Dropped, because `sidecar forget` was told its user, session or exchange."""
SHARED_OPENING = "shared_opening"
"""`untrainable_reason` of an exchange whose place says `shares_opening`, if it has no other."""
UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError)
"""Errors of bytes that are no record, or of a value that no row can hold."""
REFUSED = (StatementError, OverflowError)
"""Errors of rows that the database, or its driver, refuses."""
PORTION_BYTES = 32 * 2**20
"""Memory of the records that one transaction stores, with their rows: over 500 of ordinary size."""
ID_BYTES, FLOAT_BYTES = 40, 36
"""Memory of a token id and of a log-probability: an object and a reference in a tuple, and the
packed one in the row."""

log = structlog.get_logger()


Decide = Callable[[Session, Sequence[StoredExchange]], None]
"""Decides exchanges that were stored in this transaction (`ingest.intake.choose.decide`)."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A record of the bus, made ready before the write lock is taken."""

    envelope: Envelope
    stored: StoredExchange | None = None
    """None: it is feedback, or cannot be read or stored, or must not be."""
    rows: ExchangeRows | None = None
    tokens: str = NOT_CHECKED
    error: Exception | None = None
    bounded: tuple[str, ...] = ()
    """What was changed for the store to hold it, as `sidecar.bounds.bound` says."""
    feedback: Feedback | None = None
    tool_error: str | None = None
    """By which rule the request says that a tool failed (`ingest.feedback.signals`)."""
    private: tuple[str, ...] = ()
    """What the privacy policy found and did, to be counted."""

    @property
    def dropped(self) -> bool:
        """The privacy policy says that it is not stored."""
        return self.stored is None and self.error is None and self.feedback is None

    @property
    def size(self) -> int:
        """Memory held, in bytes, but for small fields."""
        size = 3 * len(self.envelope.payload)  # it, the exchange's copy, and the rows at most
        if self.stored is None:
            return size
        exchange = self.stored.exchange
        size += ID_BYTES * len(exchange.prompt_token_ids)
        for choice in exchange.choices:
            size += ID_BYTES * len(choice.token_ids) + FLOAT_BYTES * len(choice.logprobs)
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readiness:
    """Makes records ready to be stored."""

    sessions: Sessions
    check_tokens: Callable[[Exchange], str]
    now: float
    keyring: Keyring
    screen: Callable[[Exchange], Screened]

    def __call__(self, envelope: Envelope) -> _Record:
        try:
            payload = self.keyring.open(envelope.payload, BUS)
            if is_feedback(payload):
                return _Record(envelope, feedback=decode_feedback(payload))
            exchange, bounded = bound(read_prompt_ids(decode_exchange(payload)))
            tokens = self.check_tokens(exchange)
            if tokens == DISAGREES and exchange.untrainable_reason is None:
                exchange = msgspec.structs.replace(exchange, untrainable_reason=DISAGREES)
            screened = self.screen(exchange)
            if screened.exchange is None:
                return _Record(envelope, private=screened.reasons)
            # Placed as it is stored: after a restart the sessions are read from the store.
            exchange = screened.exchange
            rows = rows_of(exchange, now=self.now)
        except UNREADABLE as error:
            return _Record(envelope, error=error)
        arrival = self.sessions.read(exchange)
        place, held_out = self.sessions.place(exchange, now=self.now, arrival=arrival)
        if place.shares_opening and exchange.untrainable_reason is None:
            exchange = msgspec.structs.replace(exchange, untrainable_reason=SHARED_OPENING)
        rows.put(place, exchange, held_out=held_out)
        stored = StoredExchange(
            exchange=exchange, held_out=held_out, selection=NEW, place=place, stored_at=self.now
        )
        return _Record(
            envelope,
            stored,
            rows,
            tokens,
            bounded=bounded,
            private=screened.reasons,
            tool_error=tool_error(arrival.conversation.messages),
        )


def consume(
    bus: BusReader,
    database: Database,
    *,
    limit: int,
    sessions: Sessions,
    now: float,
    check_tokens: Callable[[Exchange], str] = lambda _: NOT_CHECKED,
    decide: Decide | None = None,
    screen: Callable[[Exchange], Screened] = keep_all,
    keeps_unread: bool = True,
) -> Consumed:
    """Move one batch from the bus to the store.

    sessions: finds the session of each exchange, and whether it is held out.
    check_tokens: returns an outcome of `ingest.tokens`, which is counted.
    decide: None: the exchanges wait in the store until `choose_new` decides them.
    screen: applies the privacy policy; it never raises.
    keeps_unread: `dead_letter` keeps what a record that cannot be read says.
    Raises: BusError or StoreError; nothing is lost then, and what is not stored comes again.
    """
    consumed = Consumed()
    read = _Readiness(
        sessions=sessions,
        check_tokens=check_tokens,
        now=now,
        keyring=database.keyring,
        screen=screen,
    )
    store = partial(_store, database, sessions=sessions, decide=decide, now=now, whole=keeps_unread)
    for records in _portions(bus.read(limit), read):
        poison = [(one.envelope, one.error) for one in records if one.error is not None]
        try:
            consumed += store(records)
        except REFUSED:
            # The database refused a row, and with it the whole batch. Stored one by one, only the
            # refused rows are dead-lettered.
            log.warning("batch_refused", records=len(records))
            for record in records:
                try:
                    consumed += store([record])
                except REFUSED as error:
                    with database.write(alone=False) as session:
                        aside = _put_aside(
                            session, record.envelope, error, now=now, whole=keeps_unread
                        )
                        count(session, STAGE, POISON if aside else REPEATED)
                    consumed += Consumed(poison=int(aside), repeated=int(not aside))
                    poison.append((record.envelope, error))
        sessions.saved()
        for envelope, why in poison:
            bus.put_aside(envelope, _reason(why))
        bus.commit(records[-1].envelope.position)
        del records  # before the next ones are read
    return consumed


def _portions(
    envelopes: Sequence[Envelope], read: Callable[[Envelope], _Record]
) -> Iterator[list[_Record]]:
    """Make records ready, as many at once as fit into `PORTION_BYTES`, but at least one."""
    portion: list[_Record] = []
    size = 0
    for envelope in envelopes:
        portion.append(read(envelope))
        size += portion[-1].size
        if size >= PORTION_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _store(
    database: Database,
    records: Sequence[_Record],
    *,
    sessions: Sessions,
    decide: Decide | None,
    now: float,
    whole: bool,
) -> Consumed:
    with database.read() as session:
        encode_exchanges(session, [one.rows for one in records if one.rows is not None])
        derived = _derive(session, records, sessions)
    feedback = [one.feedback for one in records if one.feedback is not None]
    # A batch that is not decided may be stored beside that of another consumer: if both store one
    # exchange, the database refuses a row, and the records are stored one by one. Feedback is not:
    # an exchange that is stored meanwhile would never be joined.
    with database.write(alone=decide is not None or bool(feedback)) as session:
        unseen = _not_stored(session, records)
        arrived = [one.stored for one in unseen if one.stored is not None]
        gone = forgotten_of(session, arrived, now=now)
        new = [
            one
            for one in unseen
            if one.stored is None or one.stored.exchange.exchange_id not in gone
        ]
        insert_exchanges(session, [record.rows for record in new if record.rows is not None])
        _tell(session, new, derived)
        conflicts = save_feedback(session, feedback, now=now)
        _keep_conflicts(session, records, conflicts, now=now)
        poison = 0
        for record in records:
            if record.error is not None:
                poison += _put_aside(session, record.envelope, record.error, now=now, whole=whole)
        sessions.save_moves(session)
        dropped = sum(record.dropped for record in records)
        consumed = Consumed(
            stored=len(new),
            repeated=len(records) - len(unseen) - poison - len(feedback) - dropped,
            poison=poison,
            feedback=len(feedback),
            dropped=dropped,
            forgotten=len(unseen) - len(new),
            decided=len(new) if decide is not None else 0,
        )
        if new and decide is not None:
            stored = [record.stored for record in new if record.stored is not None]
            decide(session, as_moved(session, stored) if sessions.moved else stored)
        counts = Counter((TOKEN_STAGE, record.tokens) for record in new)
        counts.update((BOUND_STAGE, reason) for record in new for reason in record.bounded)
        counts.update(
            (SESSIONS_STAGE, record.stored.place.full)
            for record in new
            if record.stored is not None and record.stored.place.full is not None
        )
        counts.update(
            (PRIVACY_STAGE, reason)
            for record in (*new, *(one for one in records if one.dropped))
            for reason in record.private
        )
        for outcome in (STORED, REPEATED, POISON, DROPPED, FORGOTTEN):
            counts[STAGE, outcome] = getattr(consumed, outcome)
        counts[STAGE, IMPORTED] = sum(
            record.stored is not None and record.stored.exchange.origin == IMPORTED
            for record in new
        )
        for (stage, reason), number in counts.items():
            count(session, stage, reason, number)
        for origin, of_origin in (("user", SERVED), ("rehearsal", REHEARSED)):
            said = (one.stored.exchange for one in new if one.stored is not None)
            spent = sum(completion_tokens(one) for one in said if one.origin == origin)
            if spent:
                count(session, of_origin, day_of(now), spent)
    for record in new:
        if record.tokens == DISAGREES and record.stored is not None:
            exchange = record.stored.exchange
            log.warning(
                "exchange_doubted",
                reason=DISAGREES,
                exchange_id=exchange.exchange_id,
                stream=exchange.stream,
            )
    return consumed


def _derive(session: Session, records: Sequence[_Record], sessions: Sessions) -> Derived:
    placed = [
        Placed(record.stored, kin, record.tool_error)
        for record in records
        if record.stored is not None
        and (kin := sessions.kin(record.stored.exchange.exchange_id)) is not None
    ]
    return derive(session, placed, sessions.regrouped())


def _tell(session: Session, new: Sequence[_Record], derived: Derived) -> None:
    """Join what was told of exchanges before they came, and store what they tell themselves."""
    stored = [record.stored for record in new if record.stored is not None]
    if not stored:
        return
    join_waiting(
        session,
        [
            Arrived(
                exchange_id=one.exchange.exchange_id,
                session_id=one.place.session,
                session_key=one.exchange.session_key,
                trace_id=one.exchange.trace_id,
                task=one.exchange.task,
                project=one.exchange.project,
            )
            for one in stored
        ],
    )
    began: dict[str, list[float]] = {}
    for one in stored:
        began.setdefault(one.place.session, []).append(one.exchange.timings.started_at)
    withdraw_abandonments(session, began)
    save_derived(session, derived)


def _keep_conflicts(
    session: Session, records: Sequence[_Record], conflicts: Sequence[Feedback], *, now: float
) -> None:
    by_record = {id(record.feedback): record for record in records}
    for conflict in conflicts:
        why = f"{conflict.feedback_id} has another content already"
        log.warning("feedback_conflict", why=why)
        envelope = by_record[id(conflict)].envelope
        place = envelope.where or str(envelope.position)
        dead_letter(session, envelope.payload, where=place, reason=why, now=now)


def _not_stored(session: Session, records: Sequence[_Record]) -> list[_Record]:
    """Return the records whose exchange the store does not have, each exchange once."""
    found: dict[str, _Record] = {}
    for record in records:
        if record.stored is not None:
            found.setdefault(record.stored.exchange.exchange_id, record)
    for known in stored_among(session, list(found)):
        del found[known]
    return list(found.values())


def _put_aside(
    session: Session, envelope: Envelope, error: Exception, *, now: float, whole: bool
) -> bool:
    """Keep a record in `dead_letter`. Returns: False when the bus gave it again."""
    reason = _reason(error)
    log.error("record_put_aside", where=envelope.where, reason=reason)
    place = envelope.where or str(envelope.position)
    # What nobody could read may hold what must be replaced before it is stored.
    kept = envelope.payload if whole or is_sealed(envelope.payload) else b""
    return dead_letter(session, kept, where=place, reason=reason, now=now)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
