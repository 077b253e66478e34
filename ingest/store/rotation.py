"""Encrypt a store anew: what is not encrypted yet, or with another key than the first.

It works in small steps while every process runs: rows are read without a lock, encrypted, and
written if nobody has changed them meanwhile. It keeps no place of its own: after a kill it is run
again and skips what has the first key. A value that cannot be decrypted stays as it is, is counted,
and named by its key.

In SQLite the old bytes are overwritten (`secure_delete`), but SQLite leaves copies of rows that it
moves to other pages, so the file is rewritten at the end, and the log is emptied. In PostgreSQL
the old bytes stay in the dead rows until `VACUUM` has run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Row, Table, Update, bindparam, func, select, text, tuple_, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from ingest.store.exchanges import seal_answer
from sidecar.store.codec import HEAD_BYTES, decoded_ids, exact_bytes
from sidecar.store.contents import answer_place, reply_place
from sidecar.store.database import Database
from sidecar.store.keyring import (
    BUS,
    TEXT_MARK,
    Keyring,
    is_sealed,
    key_id_of,
    place_in,
    sealed_of_text,
)
from sidecar.store.models import (
    AnswerRow,
    Base,
    BestOfScoreRow,
    ChoiceRow,
    DeadLetterRow,
    ExchangeRow,
    GateComparisonRow,
    JudgeCallRow,
    JudgeReplyRow,
)
from sidecar.store.traces import empty_store_log, mark_replaced, rewrite

PAGE: Final = 200
"""Rows whose heads are read at once."""
WRITTEN_BYTES: Final = 256 * 1024
"""Bytes of one write transaction, if one row has no more."""
WRITTEN_ROWS: Final = 25
"""Rows of one: with `WRITTEN_BYTES`, milliseconds of the write lock (docs/log.md, 2026-11-22)."""
LOG_WAIT_S: Final = 60.0
"""How long it waits at the end for those who keep SQLite's log from being emptied: reads of the
sidecar's processes take seconds at most."""
LOG_ATTEMPT_MS: Final = 20
"""How long one attempt waits, since the processes that write go on."""
Place = Callable[[Any], bytes]  # Any: a row
Size = Callable[[bytes], int]


class _Column(NamedTuple):
    """A column that says what was said."""

    name: str
    place: Place
    size: Size | None = None
    """Length of a value once it is decoded, from its bytes without encryption; None: a text."""


class _Table(NamedTuple):
    row: type[Base]
    key: tuple[str, ...]
    """Columns of the primary key, by which it is read in order."""
    named: tuple[str, ...]
    """Columns that `place` needs besides."""
    columns: tuple[_Column, ...]


def _ids_bytes(value: bytes) -> int:
    return decoded_ids(value[:HEAD_BYTES], len(value))


def _of_exchange(name: Literal["request_body", "prompt_token_ids"], size: Size) -> _Column:
    return _Column(name, lambda row: place_in("exchange", name, row.exchange_id), size)


def _of_choice(name: Literal["message_body", "token_ids"], size: Size) -> _Column:
    return _Column(name, lambda row: reply_place(row.exchange_id, row.index, name), size)


def _of_answer(name: str, size: Size | None = None) -> _Column:
    return _Column(name, lambda row: answer_place(row.group_id, row.index, name), size)


TABLES: Final = (
    _Table(
        ExchangeRow,
        ("seq",),
        ("exchange_id",),
        (_of_exchange("request_body", exact_bytes), _of_exchange("prompt_token_ids", _ids_bytes)),
    ),
    _Table(
        ChoiceRow,
        ("exchange_id", "index"),
        (),
        (_of_choice("message_body", exact_bytes), _of_choice("token_ids", _ids_bytes)),
    ),
    _Table(
        AnswerRow,
        ("group_id", "index"),
        (),
        (
            _of_answer("message_body", exact_bytes),
            _of_answer("token_ids", _ids_bytes),
            _of_answer("explanation"),
            _of_answer("checks"),
        ),
    ),
    _Table(
        JudgeCallRow,
        ("seq",),
        ("group_id",),
        (_Column("reply", lambda row: place_in("judge_call", "reply", row.group_id)),),
    ),
    _Table(
        JudgeReplyRow,
        ("seq",),
        ("digest",),
        (_Column("reply", lambda row: place_in("judge_reply", "reply", row.digest)),),
    ),
    _Table(DeadLetterRow, ("seq",), (), (_Column("payload", lambda _: BUS, len),)),
)
"""Tables whose values stand alone in a column."""


@dataclass(slots=True)
class Rotated:
    """What became of the values of a store."""

    encrypted: int = 0
    """Encrypted with the first key now."""
    already: int = 0
    """Those that were before, or are empty."""
    unreadable: Counter[str] = field(default_factory=Counter)
    """Those that stayed as they are, by the reason."""
    log_emptied: bool = True
    """False: SQLite's log still holds pages as they were before, because somebody was reading."""
    not_rewritten_mb: int = 0
    """Size of a SQLite file that may hold copies of old values and was not rewritten; or 0."""


def rotate(
    database: Database,
    *,
    on_step: Callable[[Rotated], None] = lambda _: None,
    large_too: bool = False,
) -> Rotated:
    """Encrypt all that a store says with the first key of its keyring.

    on_step: called after each write transaction.
    large_too: rewrite a SQLite file over 256 MiB too; writers wait meanwhile.
    Raises: ValueError when there is no key; StoreError, and then it may be run again.
    """
    if not database.keyring:
        raise ValueError("there is no key; set store.encryption_key_file")
    done = Rotated()
    for table in TABLES:
        _rotate_table(database, table, done, on_step)
    _rotate_lists(database, BestOfScoreRow, "exchange_id", "explanations", done, on_step)
    _rotate_lists(database, GateComparisonRow, "comparison_id", "answers", done, on_step)
    if database.engine.dialect.name == "sqlite":
        done.not_rewritten_mb = rewrite(database, large_too=large_too)
    done.log_emptied = empty_store_log(database, wait_s=LOG_WAIT_S, attempt_ms=LOG_ATTEMPT_MS)
    return done


def _rotate_table(
    database: Database, table: _Table, done: Rotated, on_step: Callable[[Rotated], None]
) -> None:
    after: tuple[Any, ...] | None = None
    while True:
        with database.read() as session:
            heads = session.execute(_heads(table, after)).all()
        if not heads:
            return
        after = tuple(getattr(heads[-1], name) for name in table.key)
        for chunk in _chunks(table, heads, database.keyring.first, done):
            _rotate_rows(database, table, chunk, done)
            on_step(done)


def _heads(table: _Table, after: tuple[Any, ...] | None) -> Any:  # Any: a SELECT
    key = [getattr(table.row, name) for name in table.key]
    shown: list[Any] = [*key, *(getattr(table.row, name) for name in table.named)]
    for one in table.columns:
        column = getattr(table.row, one.name)
        # The id of the key of a text begins behind its mark and is in base64.
        length = HEAD_BYTES + 64 if one.size is not None else len(TEXT_MARK) + 96
        shown += [
            func.substr(column, 1, length).label(f"{one.name}_head"),
            func.length(column).label(f"{one.name}_length"),
        ]
    where = () if after is None else (tuple_(*key) > tuple_(*after),)
    return select(*shown).where(*where).order_by(*key).limit(PAGE)


def _chunks(
    table: _Table, heads: Sequence[Row[Any]], first: str, done: Rotated
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the keys of rows that are to be encrypted, bounded in number and bytes."""
    chunk: list[tuple[Any, ...]] = []
    total = 0
    for row in heads:
        stale = [one for one in table.columns if not _is_current(row, one, first)]
        done.already += len(table.columns) - len(stale)
        if not stale:
            continue
        size = sum(getattr(row, f"{one.name}_length") or 0 for one in stale)
        if chunk and (total + size > WRITTEN_BYTES or len(chunk) == WRITTEN_ROWS):
            yield chunk
            chunk, total = [], 0
        chunk.append(tuple(getattr(row, name) for name in table.key))
        total += size
    if chunk:
        yield chunk


def _is_current(row: Row[Any], column: _Column, first: str) -> bool:
    head, length = getattr(row, f"{column.name}_head"), getattr(row, f"{column.name}_length")
    if not length:
        return True
    if column.size is None:
        # Cut at a multiple of four characters, which base64 can decode.
        head = sealed_of_text(head)
    return _has_key(head, first)


def _has_key(sealed: object, first: str) -> bool:
    if not isinstance(sealed, bytes) or not is_sealed(sealed):
        return False
    try:
        return key_id_of(sealed) == first
    except ValueError:
        return False


def _rotate_rows(
    database: Database, table: _Table, keys: Sequence[tuple[Any, ...]], done: Rotated
) -> None:
    columns: list[InstrumentedAttribute[Any]] = [
        getattr(table.row, name)
        for name in (*table.key, *table.named, *(one.name for one in table.columns))
    ]
    with database.read() as session:
        rows = session.execute(
            select(*columns).where(tuple_(*(columns[: len(table.key)])).in_(keys))
        ).all()
    changes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if new := _encrypted(table, row, database.keyring, done):
            named = {f"key_{name}": getattr(row, name) for name in table.key}
            old = {f"old_{name}": getattr(row, name) for name in new}
            changed = {f"new_{name}": value for name, value in new.items()}
            changes.setdefault(tuple(new), []).append({**named, **old, **changed})
    if not changes:
        return
    with database.write(alone=False) as session:
        _overwrite_what_goes(session)
        for names, parameters in changes.items():
            result = session.connection().execute(_update(table, names), parameters)
            done.encrypted += result.rowcount * len(names)
            if late := len(parameters) - result.rowcount:
                done.unreadable["changed meanwhile: run it again"] += late * len(names)


def _update(table: _Table, names: Sequence[str]) -> Update:
    """Change a row as long as it says what it said when it was read."""
    held = table.row.__table__
    assert isinstance(held, Table)
    columns = held.c
    same = [columns[name] == bindparam(f"old_{name}") for name in names]
    key = [columns[name] == bindparam(f"key_{name}") for name in table.key]
    new: dict[str, Any] = {name: bindparam(f"new_{name}") for name in names}
    return update(held).where(*key, *same).values(new)


def _encrypted(
    table: _Table, row: Row[Any], keyring: Keyring, done: Rotated
) -> dict[str, bytes | str]:
    new: dict[str, bytes | str] = {}
    for name, place_for, size in table.columns:
        stored, place = getattr(row, name), place_for(row)
        if not stored or _has_key(
            stored if size is not None else sealed_of_text(stored), keyring.first
        ):
            continue
        try:
            if size is None:
                new[name] = keyring.seal_text(keyring.open_text(stored, place), place)
            else:
                value = keyring.open(stored, place)
                new[name] = keyring.seal(value, place, size=size(value))
        except (ValueError, TypeError) as error:
            done.unreadable[str(error)] += 1
    return new


def _rotate_lists(
    database: Database,
    row: type[Base],
    key: str,
    column: str,
    done: Rotated,
    on_step: Callable[[Rotated], None],
) -> None:
    """Encrypt the elements of a JSON list: texts, or objects whose contents are in `sealed`."""
    keyring = database.keyring
    after = ""
    name: InstrumentedAttribute[Any] = getattr(row, key)
    held: InstrumentedAttribute[Any] = getattr(row, column)
    while True:
        with database.read() as session:
            found = session.execute(
                select(name, held).where(name > after).order_by(name).limit(WRITTEN_ROWS)
            ).all()
        if not found:
            return
        after = found[-1][0]
        changes = []
        for subject, elements in found:
            try:
                new = _encrypted_list(keyring, row.__tablename__, column, subject, elements or [])
            except (ValueError, TypeError) as error:
                done.unreadable[str(error)] += 1
                continue
            if new == elements:
                done.already += 1
            else:
                changes.append((subject, elements, new))
        if changes:
            with database.write(alone=False) as session:
                _overwrite_what_goes(session)
                for subject, old, new in changes:
                    # Whoever forgets may have blanked or deleted it meanwhile.
                    now = select(held).where(name == subject).with_for_update()
                    if session.execute(now).scalar_one_or_none() != old:
                        done.unreadable["changed meanwhile: run it again"] += 1
                        continue
                    session.execute(update(row).where(name == subject).values({column: new}))
                    done.encrypted += 1
        on_step(done)


def _encrypted_list(
    keyring: Keyring, table: str, column: str, subject: str, elements: Sequence[Any]
) -> list[Any]:
    new: list[Any] = []
    for index, element in enumerate(elements):
        if isinstance(element, str):
            place = place_in(table, column, subject)
            new.append(_again(keyring, element, place))
        else:
            place = place_in(table, column, subject, index)
            if "sealed" in element:
                new.append({**element, "sealed": _again(keyring, element["sealed"], place)})
            else:
                new.append(seal_answer(keyring, subject, index, element))
    return new


def _again(keyring: Keyring, stored: str, place: bytes) -> str:
    if not stored or _has_key(sealed_of_text(stored), keyring.first):
        return stored
    return keyring.seal_text(keyring.open_text(stored, place), place)


def _overwrite_what_goes(session: Session) -> None:
    if session.get_bind().dialect.name == "sqlite":
        session.execute(text("PRAGMA secure_delete = ON"))
        mark_replaced(session)
