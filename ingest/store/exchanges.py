"""Save and load exchanges, and keep the bus records that could not be stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, Final

import structlog
from sqlalchemy import ColumnElement, Select, TextClause, and_, func, insert, select, text, update
from sqlalchemy.orm import Session, defer

from ingest.errors import UnreadableExchangesError
from ingest.grouping.same_prompt import prompt_key
from ingest.grouping.selection import Caller
from ingest.sessions.messages import Place
from ingest.sessions.rows import SampledAnswer, TokenTurn
from ingest.store.bases import Row, content_of, encode_contents, settle_bases
from ingest.store.groups import place_columns, place_of
from sidecar.records import Choice, Exchange
from sidecar.store.codec import HEAD_BYTES, ID_BYTES, decoded_bytes, decoded_ids, unpack_ids
from sidecar.store.contents import Content, keyring_of, load_contents, reply_place
from sidecar.store.database import DAMAGE
from sidecar.store.keyring import BUS, Keyring, is_sealed, place_in
from sidecar.store.mapping import RowMapping
from sidecar.store.models import (
    IN_TURN,
    UNDECIDED,
    AnswerRow,
    ChoiceRow,
    DeadLetterRow,
    ExchangeRow,
    GateComparisonRow,
    GroupRow,
)

NEW = "new"
"""`exchange.selection` of an exchange that selection has not examined."""
READ_BYTES = 8 * 2**20
"""Bytes of requests and replies that are read from the store at once."""
Settled = Callable[[Any], bool]  # Any: what the column holds
"""Whether an exchange may be decided that was stored then (`stored_at`)."""
DELTAS = ("request", "prompt_token_ids")
"""Fields that are stored as differences from another exchange's (`ingest.store.bases`)."""
_EXCHANGE = RowMapping(Exchange, ExchangeRow, other_tables={"choices", "prompt_ids", *DELTAS})
_CHOICE = RowMapping(Choice, ChoiceRow)
_DEFERRED = (defer(ExchangeRow.request_body), defer(ExchangeRow.prompt_token_ids))
"""Read by `load_contents`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExchange:
    """An exchange and what ingest decided about it."""

    exchange: Exchange
    held_out: bool
    selection: str
    place: Place
    stored_at: float
    """Unix seconds."""

    @property
    def session_id(self) -> str:
        return self.place.session


@dataclass(slots=True)
class ExchangeRows:
    """The rows of one exchange, packed and compressed; made before the write lock is taken."""

    exchange: Row
    choices: list[Row]
    content: Content
    """What `encode_exchanges` makes columns of, once the place is known."""
    said: tuple[Choice, ...] = ()
    """The records of `choices`."""
    sealed: list[Row] | None = None
    """`choices` encrypted; None: the store has no key."""

    def put(self, place: Place | None, exchange: Exchange, *, held_out: bool) -> None:
        """Set the columns that say where the exchange stands, and what was found out about it then.

        place: None: its session is the one that its key names.
        """
        columns = {"session_id": exchange.session_key} if place is None else place_columns(place)
        reason = exchange.untrainable_reason
        self.exchange.update(columns, held_out=held_out, untrainable_reason=reason)


def rows_of(exchange: Exchange, *, now: float) -> ExchangeRows:
    """Make the rows of an exchange. They have no place yet (`ExchangeRows.put`), and the columns
    of request and prompt are missing (`encode_exchanges`).

    Raises: ValueError or OverflowError when a row cannot hold a value (a token id of 2**31 or more,
    two choices of one index).
    """
    _check_indices([choice.index for choice in exchange.choices])
    row = _EXCHANGE.to_row(exchange)
    row["stored_at"] = now
    row["started_at"] = exchange.timings.started_at  # a column of its own, to be searched by
    row["selection"] = NEW
    row["prompt_key"] = prompt_key(exchange)
    choices = [_CHOICE.to_row(choice) for choice in exchange.choices]
    for choice in choices:
        choice["exchange_id"] = exchange.exchange_id
    return ExchangeRows(row, choices, content_of(exchange), exchange.choices)


def encode_exchanges(session: Session, rows: Sequence[ExchangeRows]) -> None:
    """Set the columns of requests and prompts, most of them as differences from other exchanges.

    rows: in the order of storing. session: may be a reader's.
    """
    encode_contents(session, [(one.exchange, one.content) for one in rows])
    if keyring := keyring_of(session):
        for one in rows:
            one.exchange["prompt_key"] = None  # who has a guess of the prompt could test it
            one.sealed = [
                _CHOICE.sealed(row, choice, partial(_seal_reply, keyring, row))
                for row, choice in zip(one.choices, one.said, strict=True)
            ]


def _seal_reply(keyring: Keyring, row: Row, column: str, value: bytes, size: int) -> bytes:
    return keyring.seal(value, reply_place(row["exchange_id"], row["index"], column), size=size)


def stored_among(session: Session, exchange_ids: Sequence[str]) -> set[str]:
    """Return those of these exchange ids that the store has."""
    statement = select(ExchangeRow.exchange_id).where(ExchangeRow.exchange_id.in_(exchange_ids))
    return set(session.scalars(statement))


def sessions_of(session: Session, exchange_ids: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return the session of each of these exchanges, and whether it is held out."""
    rows = session.execute(
        select(ExchangeRow.exchange_id, ExchangeRow.session_id, ExchangeRow.held_out).where(
            ExchangeRow.exchange_id.in_(exchange_ids)
        )
    )
    return {exchange_id: (name, held_out) for exchange_id, name, held_out in rows}


def insert_exchanges(session: Session, rows: Sequence[ExchangeRows]) -> None:
    """Insert exchanges that the store does not have, in the caller's write transaction: one
    `executemany` for them and one for their choices.

    rows: encoded by `encode_exchanges`.
    Raises: IntegrityError when one of them is stored already, or a row cannot hold a value.
    """
    settle_bases(session, [(one.exchange, one.content) for one in rows])
    connection = session.connection()
    if rows:
        connection.execute(insert(ExchangeRow), [one.exchange for one in rows])
    if choices := [choice for one in rows for choice in one.sealed or one.choices]:
        connection.execute(insert(ChoiceRow), choices)


def save_exchange(
    session: Session, exchange: Exchange, *, held_out: bool, now: float, place: Place | None = None
) -> bool:
    """Store one exchange and its choices, in the caller's write transaction.

    place: as for `ExchangeRows.put`.
    Returns: False when this exchange id is stored already; then nothing changes.
    Raises: as `rows_of`. Then nothing was written.
    """
    rows = rows_of(exchange, now=now)
    rows.put(place, exchange, held_out=held_out)
    if stored_among(session, [exchange.exchange_id]):
        return False
    encode_exchanges(session, [rows])
    insert_exchanges(session, [rows])
    return True


def load_exchange(session: Session, exchange_id: str) -> StoredExchange | None:
    """Read one exchange; None when there is none of this id. Raises: UnreadableExchangesError."""
    found = _load(session, select(ExchangeRow).where(ExchangeRow.exchange_id == exchange_id))
    return found[0] if found else None


def load_by_seq(session: Session, seqs: Collection[int]) -> list[StoredExchange]:
    """Read these exchanges, the oldest first. Raises: UnreadableExchangesError."""
    return _load(
        session, select(ExchangeRow).where(ExchangeRow.seq.in_(seqs)).order_by(ExchangeRow.seq)
    )


def any_settled(session: Session, selection: str, settled: Settled) -> bool:
    """True when the oldest exchange with this value of `selection` has settled."""
    oldest = session.execute(
        select(ExchangeRow.stored_at)
        .where(*_undecided(selection))
        .order_by(ExchangeRow.seq)
        .limit(1)
    ).first()
    return oldest is not None and settled(oldest.stored_at)


def load_by_selection(
    session: Session,
    selection: str,
    *,
    limit: int,
    limit_bytes: int = READ_BYTES,
    newest_first: bool = False,
    settled: Settled = lambda _: True,
    of: Collection[int] | None = None,
) -> list[StoredExchange]:
    """Read up to `limit` exchanges with this value of `selection`, the oldest first by default.

    selection: "new" or "backlog"; no index finds the others.
    settled: those for which it is False are left out; they count towards the limit.
    of: their numbers (`seq`), where only some of them are wanted.
    limit_bytes: of requests and replies as they were sent, which hold all token ids as text: read,
        an exchange takes at most nine times as much. The first one is read however large it is.
    Raises: UnreadableExchangesError.
    """
    order = ExchangeRow.seq.desc() if newest_first else ExchangeRow.seq
    sizes = session.execute(
        select(
            ExchangeRow.seq,
            ExchangeRow.stored_at,
            ExchangeRow.request_bytes + ExchangeRow.reply_bytes,
        )
        .where(*_undecided(selection), *(() if of is None else (ExchangeRow.seq.in_(of),)))
        .order_by(order)
        .limit(limit)
    )
    seqs: list[int] = []
    for seq, stored_at, size in sizes.all():
        if not settled(stored_at):
            continue
        limit_bytes -= size
        if seqs and limit_bytes < 0:
            break
        seqs.append(seq)
    if not seqs:
        return []
    return _load(session, select(ExchangeRow).where(ExchangeRow.seq.in_(seqs)).order_by(order))


def newest_of(session: Session, selection: str, *, limit: int) -> list[tuple[int, Caller]]:
    """Return number and caller of the newest exchanges with this value of `selection`."""
    row = ExchangeRow
    rows = session.execute(
        select(row.seq, row.project, row.key_id, row.user)
        .where(*_undecided(selection))
        .order_by(row.seq.desc())
        .limit(limit)
    )
    return [(seq, Caller(*who)) for seq, *who in rows]


def first_since(session: Session, since: float) -> tuple[int, int]:
    """Return the number of the first exchange stored since then, and the one after the newest.

    since: Unix seconds. No index has the time: exchanges are numbered as they are stored, so some
    twenty of them are looked at.
    """
    row = ExchangeRow
    first = session.scalar(select(func.min(row.seq))) or 0
    end = after = (session.scalar(select(func.max(row.seq))) or -1) + 1
    while first < after:
        middle = (first + after) // 2
        seq, at = session.execute(
            select(row.seq, row.stored_at).where(row.seq >= middle).order_by(row.seq).limit(1)
        ).one()
        if at >= since:
            after = middle
        else:
            first = seq + 1
    return first, end


def spread_since(
    session: Session, since: float, *, limit: int, begin: float
) -> tuple[list[tuple[int, Caller, float, str]], float]:
    """Return number, caller, time and selection of exchanges stored since then, at equal distances,
    and how many each stands for.

    begin: part of a distance before the first one, 0..1; another one finds other exchanges.
    """
    row = ExchangeRow
    first, end = first_since(session, since)
    number = min(limit, end - first)
    if not number:
        return [], 0.0
    each = (end - first) / number
    seqs = [first + int((place + begin) * each) for place in range(number)]
    rows = session.execute(
        select(row.seq, row.project, row.key_id, row.user, row.stored_at, row.selection).where(
            row.seq.in_(seqs)
        )
    )
    return [(seq, Caller(*who), at, state) for seq, *who, at, state in rows], each


def load_of_turns(
    session: Session, turns: Collection[tuple[str, str]], *, selection: str
) -> list[StoredExchange]:
    """Read the exchanges of these turns (project, turn id) that have this value of `selection`.

    selection: as for `load_by_selection`. Raises: UnreadableExchangesError.
    """
    if not turns or not any_settled(session, selection, lambda _: True):
        return []
    found = _load(
        session,
        select(ExchangeRow)
        .where(_of_turns(turns), ExchangeRow.selection == selection)
        .order_by(ExchangeRow.seq),
    )
    return [one for one in found if (one.exchange.project, one.exchange.turn_id) in turns]


def turns_with(
    session: Session, turns: Collection[tuple[str, str]], *, selections: Collection[str]
) -> set[tuple[str, str]]:
    """Find those of these turns that have an exchange with one of these values of `selection`."""
    if not turns:
        return set()
    rows = session.execute(
        select(ExchangeRow.project, ExchangeRow.turn_id)
        .where(_of_turns(turns), ExchangeRow.selection.in_(selections))
        .distinct()
    )
    return {(project, turn_id) for project, turn_id in rows}.intersection(turns)


def set_selection(session: Session, exchange_ids: Sequence[str], selection: str) -> None:
    """Store what selection decided about these exchanges."""
    session.execute(
        update(ExchangeRow)
        .where(ExchangeRow.exchange_id.in_(exchange_ids))
        .values(selection=selection)
        # No caller reads these rows again in its session: there is nothing to refresh.
        .execution_options(synchronize_session=False)
    )


def put_aside(session: Session, seqs: Collection[int], selection: str) -> None:
    """Store why damaged exchanges are left out. `seqs`: an id may be damaged too."""
    session.execute(
        update(ExchangeRow)
        .where(ExchangeRow.seq.in_(seqs))
        .values(selection=selection)
        .execution_options(synchronize_session=False)
    )


def dead_letter(session: Session, payload: bytes, *, where: str, reason: str, now: float) -> bool:
    """Keep the whole of a bus record that cannot be stored as an exchange.

    where: its place on the bus. Returns: False when it came before, from this place; the bus gives
        it again after a crash. Then nothing changes.
    """
    # Of the record as it came: encrypted twice, it has other bytes each time.
    digest = sha256(f"{where}\0".encode() + payload).hexdigest()
    known = select(DeadLetterRow.seq).where(DeadLetterRow.digest == digest)
    if session.scalar(known) is not None:
        return False
    if not is_sealed(payload):
        payload = keyring_of(session).seal(payload, BUS)
    session.add(DeadLetterRow(at=now, reason=reason, payload=payload, digest=digest))
    session.flush()
    return True


def _open_reply(keyring: Keyring, row: ChoiceRow, column: str, value: bytes) -> bytes:
    return keyring.open(value, reply_place(row.exchange_id, row.index, column))


def _undecided(selection: str) -> tuple[ColumnElement[bool], TextClause]:
    return ExchangeRow.selection == selection, text(UNDECIDED)


def _of_turns(turns: Collection[tuple[str, str]]) -> ColumnElement[bool]:
    # The caller tells projects apart: no two of them are likely to have a turn id in common, and
    # pairs make the statement three times as long.
    ids = {turn_id for _, turn_id in turns}
    return and_(text(IN_TURN), ExchangeRow.turn_id.in_(sorted(ids)))


def _check_indices(indices: Sequence[int]) -> None:
    if len(set(indices)) != len(indices) or not all(0 <= index < 2**31 for index in indices):
        raise ValueError(f"choices are not numbered one by one: {indices}")


def _load(session: Session, statement: Select[ExchangeRow]) -> list[StoredExchange]:
    """Read exchanges in one query. If that fails, read them one by one to find damaged ones."""
    try:
        return _stored(session, session.scalars(statement.options(*_DEFERRED)).all())
    except DAMAGE as error:
        seqs = session.scalars(statement.with_only_columns(ExchangeRow.seq)).all()
        damage = {seq: why for seq in seqs if (why := _damage(session, seq)) is not None}
        if not damage:
            raise
        raise UnreadableExchangesError(damage) from error


def _damage(session: Session, seq: int) -> str | None:
    try:
        one = select(ExchangeRow).where(ExchangeRow.seq == seq).options(*_DEFERRED)
        _stored(session, session.scalars(one).all())
    except DAMAGE as error:
        return f"{type(error).__name__}: {error}"
    return None


def _stored(session: Session, rows: Sequence[ExchangeRow]) -> list[StoredExchange]:
    if not rows:
        return []
    choices: dict[str, list[ChoiceRow]] = {row.exchange_id: [] for row in rows}
    found = session.scalars(
        select(ChoiceRow).where(ChoiceRow.exchange_id.in_(choices)).order_by(ChoiceRow.index)
    )
    for choice in found:
        choices[choice.exchange_id].append(choice)
    contents = load_contents(session, choices)
    keyring = keyring_of(session)
    return [
        StoredExchange(
            exchange=_EXCHANGE.to_record(
                row,
                choices=tuple(
                    _CHOICE.open_record(choice, partial(_open_reply, keyring, choice))
                    for choice in choices[row.exchange_id]
                ),
                request=contents[row.exchange_id].request,
                prompt_token_ids=unpack_ids(contents[row.exchange_id].prompt_ids),
            ),
            held_out=row.held_out,
            selection=row.selection,
            place=place_of(row),
            stored_at=row.stored_at,
        )
        for row in rows
    ]


# The answers of a gate's comparison, encrypted in the store when it has a key.

_SAID = ("content", "tool_calls", "explanation")
"""Members of an answer that are encrypted when the store has a key, together in `sealed`."""


def seal_answer(
    keyring: Keyring, comparison: str, index: int, answer: dict[str, Any]
) -> dict[str, Any]:
    """Encrypt what an answer says; returned as it is when the store has no key."""
    if not keyring:
        return answer
    said = json.dumps({name: answer.get(name) for name in _SAID})
    place = place_in("gate_comparison", "answers", comparison, index)
    shown = {name: value for name, value in answer.items() if name not in _SAID}
    return {**shown, "sealed": keyring.seal_text(said, place)}


def opened_answers(session: Session, row: GateComparisonRow) -> list[dict[str, Any]]:
    """Return the answers of a comparison with all that was said.

    Raises: ValueError when they do not decrypt.
    """
    opened = []
    for index, stored in enumerate(row.answers or []):
        answer = dict(stored)
        if (sealed := answer.pop("sealed", None)) is not None:
            place = place_in("gate_comparison", "answers", row.comparison_id, index)
            answer |= json.loads(keyring_of(session).open_text(sealed, place))
        opened.append(answer)
    return opened


# Read many exchanges, a bounded number of bytes at once; damaged ones are left out and logged.

PAGE: Final = 256
"""Exchanges read at once, at most."""
PAGE_BYTES: Final = 32 * 2**20
"""Bytes of requests and packed prompt ids read at once, if one exchange has no more."""
log = structlog.get_logger()


def decoded_columns() -> tuple[ColumnElement[Any], ...]:  # Any: bytes and int
    """The columns that `decoded_sizes` takes. What an exchange says is not read for them."""
    body, ids = ExchangeRow.request_body, ExchangeRow.prompt_token_ids
    return (
        *(func.substr(body, 1, HEAD_BYTES), func.length(body)),
        *(func.substr(ids, 1, HEAD_BYTES), func.length(ids)),
    )


def decoded_sizes(
    body_head: bytes, body_bytes: int | None, ids_head: bytes, ids_bytes: int | None
) -> tuple[int, int]:
    """Return about how many bytes a request and its packed prompt ids take once they are read.

    They are stored as differences from others: the stored size says nothing about it.
    """
    return decoded_bytes(body_head, body_bytes or 0), decoded_ids(ids_head, ids_bytes or 0)


def stored_tokens(session: Session, group_id: str) -> tuple[int, int]:
    """Count the tokens of a group's prompt, and of all its answers, without reading them."""
    ids = ExchangeRow.prompt_token_ids
    prompt = session.execute(
        select(func.substr(ids, 1, HEAD_BYTES), func.length(ids))
        .join(GroupRow, GroupRow.exchange_id == ExchangeRow.exchange_id)
        .where(GroupRow.group_id == group_id)
    ).one_or_none()
    held = AnswerRow.token_ids
    answers = session.execute(
        select(func.substr(held, 1, HEAD_BYTES), func.length(held)).where(
            AnswerRow.group_id == group_id
        )
    )
    prompt_bytes = decoded_ids(*prompt) if prompt is not None else 0
    return prompt_bytes // ID_BYTES, sum(decoded_ids(*one) for one in answers) // ID_BYTES


def pages_of(sizes: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Divide exchanges into pages, in their order. sizes: (seq, bytes) of each."""
    pages: list[list[int]] = []
    total = 0
    for seq, size in sizes:
        total += size
        if not pages or total > PAGE_BYTES or len(pages[-1]) == PAGE:
            pages.append([])
            total = size
        pages[-1].append(seq)
    return pages


def read_pages(
    session: Session, pages: Iterable[Sequence[int]]
) -> Iterator[tuple[list[StoredExchange], int]]:
    """Yield the exchanges of each page, the oldest first, with the number of damaged ones that are
    left out of it."""
    for page in pages:
        left = list(page)
        found: list[StoredExchange] | None = None
        while found is None:
            try:
                found = load_by_seq(session, left)
            except UnreadableExchangesError as error:
                for seq, why in error.damage.items():
                    log.error("exchange_unreadable", seq=seq, why=why)
                left = [seq for seq in left if seq not in error.damage]
        yield found, len(page) - len(left)


def token_turn(stored: StoredExchange, *, trainable: bool) -> TokenTurn:
    """Return an exchange as a turn of its session's rows. trainable: its answers are no context."""
    exchange = stored.exchange
    return TokenTurn(
        exchange_id=exchange.exchange_id,
        parent=stored.place.parent,
        prompt_token_ids=exchange.prompt_token_ids,
        answers=[
            SampledAnswer(index=one.index, token_ids=one.token_ids, logprobs=one.logprobs)
            for one in exchange.choices
        ],
        trainable=trainable,
    )
