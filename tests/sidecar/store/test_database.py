"""Transactions on both stores: what they see of each other, what they count, how they fail."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from sidecar.errors import (
    SettingsError,
    StoreBusyError,
    StoreError,
    StoreLockedError,
    StoreNewerError,
)
from sidecar.store import engines, engines as store_url
from sidecar.store.database import Database, count, get_flag, set_flag
from sidecar.store.engines import open_existing
from sidecar.store.models import AuditRow, CounterRow, DeadLetterRow, FlagRow, RunRow
from support.migrated_store import open_migrated
from support.stores import NewStore

both = pytest.mark.both_stores
postgres_only = pytest.mark.parametrize("store_kind", ["postgres"], indirect=True)
REASONS = [f"r{number}" for number in range(8)]
WRITERS, ROUNDS = 4, 50


def at_once(*work: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(one) for one in work]:
            future.result(timeout=100)


@postgres_only
def test_two_hundred_transactions_that_count_in_opposite_orders_do_not_deadlock(
    new_store: NewStore,
) -> None:
    stores = [new_store()]
    stores += [Database(stores[0].url) for _ in range(WRITERS - 1)]

    def write(number: int) -> None:
        for _ in range(ROUNDS):
            with stores[number].write(alone=False) as session:
                for reason in REASONS[:: 1 if number % 2 else -1]:
                    count(session, "stage", reason)

    at_once(*(lambda number=number: write(number) for number in range(WRITERS)))

    with stores[0].read() as session:
        found = {row.reason: row.count for row in session.scalars(select(CounterRow))}
    assert found == dict.fromkeys(REASONS, WRITERS * ROUNDS)
    for database in stores[1:]:
        database.close()


@both
def test_what_a_writer_read_stays_true_until_it_commits(new_store: NewStore) -> None:
    database = new_store()

    def add_one() -> None:
        for _ in range(25):
            with database.write() as session:
                set_flag(session, "n", str(int(get_flag(session, "n") or 0) + 1), now=1.0)

    at_once(add_one, add_one, add_one)

    with database.read() as session:
        assert get_flag(session, "n") == "75"


@both
def test_a_reader_sees_one_state_of_the_store(new_store: NewStore) -> None:
    database = new_store()
    with database.read() as session:
        assert get_flag(session, "a") is None
        with database.write() as writing:
            set_flag(writing, "a", "1", now=1.0)
        assert get_flag(session, "a") is None
    with database.read() as session:
        assert get_flag(session, "a") == "1"


@both
def test_a_failed_transaction_counts_nothing(new_store: NewStore) -> None:
    database = new_store()

    def fail() -> None:
        with database.write() as session:
            count(session, "stage", "reason")
            raise LookupError

    with pytest.raises(LookupError):
        fail()

    with database.read() as session:
        assert session.scalars(select(CounterRow)).all() == []


@both
def test_texts_and_numbers_are_stored_alike(new_store: NewStore) -> None:
    database = new_store()
    with database.write() as session:
        set_flag(session, "text", "a\0b\ud83dc ä😀", now=1.0)
        session.add(
            AuditRow(
                at=1.0,
                actor="t",
                action="t",
                subject="t",
                reason="\0",
                before={"loss": math.inf, "deep": [{"x": math.nan}]},
                after={"text": "\0"},
            )
        )

    with database.read() as session:
        assert get_flag(session, "text") == "a\ufffdb\ufffdc ä😀"
        row = session.scalars(select(AuditRow)).one()
        assert (row.reason, row.before) == ("\ufffd", {"loss": None, "deep": [{"x": None}]})
        assert row.after == {"text": "\0"}


@both
def test_many_rows_at_once_are_stored_as_one_and_large_numbers_added_up(
    new_store: NewStore,
) -> None:
    database, rows = new_store(), 3
    with database.write() as session:
        for _ in range(2):
            count(session, "tokens", "day", 2**40)
        for number in range(rows):
            session.add(DeadLetterRow(at=1.0, reason=f"r\0{number}", payload=b"\0"))
        session.execute(
            insert(FlagRow),
            [{"name": f"n{one}", "value": "\0", "updated_at": 1.0} for one in range(rows)],
        )

    with database.read() as session:
        found = session.execute(select(DeadLetterRow.reason, DeadLetterRow.payload)).all()
        assert sorted(map(tuple, found)) == [(f"r\ufffd{one}", b"\0") for one in range(rows)]
        flags = select(FlagRow.value).where(FlagRow.name.startswith("n"))
        assert session.scalars(flags).all() == ["\ufffd"] * rows
        assert session.scalars(select(CounterRow.count)).one() == 2**41


@both
def test_a_store_without_tables_says_who_makes_them(empty_store: str) -> None:
    with closing(Database(empty_store)) as database:
        missing = r"no such table|\"training_run\" does not exist; start ingest or control"
        with pytest.raises(StoreError, match=missing), database.read() as session:
            session.scalars(select(RunRow)).all()
        database.upgrade_if_behind()
        with database.read() as session:
            assert session.scalars(select(RunRow)).all() == []


@postgres_only
def test_a_deadlock_is_told_and_repeating_ends_it(new_store: NewStore) -> None:
    database = new_store()
    with database.write() as session:
        for name in "ab":
            set_flag(session, name, "0", now=1.0)
    both_hold_one = threading.Barrier(2)
    attempts: list[str] = []

    def add(first: str, second: str) -> None:
        def work(session: object) -> None:
            attempts.append(first)
            _increase(session, first)
            if attempts.count(first) == 1:
                both_hold_one.wait(60)
            _increase(session, second)

        database.repeat(work, alone=False)

    at_once(lambda: add("a", "b"), lambda: add("b", "a"))

    with database.read() as session:
        assert [get_flag(session, name) for name in "ab"] == ["2", "2"]
    # Who repeats may be faster than who was let through: then they meet once more.
    assert len(attempts) >= 3


@postgres_only
def test_repeating_ends_after_five_attempts(new_store: NewStore) -> None:
    database, attempts = new_store(), []

    def conflict(session: object) -> None:
        attempts.append(1)
        _execute(session, "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$")

    with pytest.raises(StoreBusyError, match="no"):
        database.repeat(conflict)

    assert len(attempts) == 5


def set_a(database: Database) -> None:
    with database.write() as session:
        set_flag(session, "a", "1", now=0.0)


@both
@pytest.mark.parametrize("work", [Database.upgrade, set_a])
def test_a_lock_that_is_held_for_long_is_told_with_what_to_do(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch, work: Callable[[Database], None]
) -> None:
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", 0.2)
    holder = new_store()
    todo = r"held its lock for over .* end it, then try again"

    with closing(Database(holder.url)) as other, holder.write() as session:
        set_flag(session, "a", "0", now=0.0)
        with pytest.raises(StoreLockedError, match=todo):
            work(other)


@pytest.mark.parametrize("open_it", [Database.upgrade, Database.upgrade_if_behind])
def test_a_store_of_a_newer_release_is_refused_in_one_line(
    tmp_path: Path, open_it: Callable[[Database], None]
) -> None:
    with closing(open_migrated(tmp_path / "store.db")) as database:
        with database.write() as session:
            session.execute(text("UPDATE alembic_version SET version_num = '9999_future'"))

        with pytest.raises(StoreNewerError, match=r"a newer release has migrated it \(9999_future"):
            open_it(database)


def test_a_full_disk_is_told_with_what_to_do() -> None:
    with closing(sqlite3.connect(":memory:")) as full:
        full.execute("CREATE TABLE one (text TEXT)")
        full.execute("PRAGMA max_page_count = 3")
        with pytest.raises(sqlite3.OperationalError) as found:
            full.execute("INSERT INTO one VALUES (?)", ("x" * 100_000,))

    assert engines.describe(found.value) == (
        "database or disk is full; free space on the disk of its file, then try again"
    )


@postgres_only
def test_a_transaction_needs_nothing_of_the_connection_before_it(new_store: NewStore) -> None:
    """As behind a pooler, which gives each transaction another connection to the server."""
    database = new_store()
    for _ in range(12):  # the driver prepares what it sends for the fifth time, unless told not to
        set_a(database)

    with database.read() as session:
        assert session.scalar(text("SELECT count(*) FROM pg_prepared_statements")) == 0
        assert session.scalar(text("SHOW lock_timeout")) == "15s"
        assert session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "2min"
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as plain:
        assert plain.scalar(
            text("SELECT reset_val FROM pg_settings WHERE name='lock_timeout'")
        ) == ("0")


@pytest.mark.parametrize(
    ("state", "of_statement"),
    [
        *[(state, True) for state in ("22001", "23505", "42601", "21000")],
        *[(state, False) for state in ("26000", "42P05", "42P01", "42501", "57P01")],
    ],
)
def test_an_error_of_the_connection_is_not_the_statements(state: str, of_statement: bool) -> None:
    cause = type("PostgresError", (Exception,), {"sqlstate": state})()
    error = ProgrammingError("SELECT 1", None, cause)

    assert engines.is_of_statement(error) is of_statement


def _increase(session: object, name: str) -> None:
    _execute(session, f"UPDATE flag SET value = (value::int + 1)::text WHERE name = '{name}'")


def _execute(session: object, statement: str) -> None:
    session.execute(text(statement))  # type: ignore[attr-defined]


def test_a_server_that_is_away_is_one_line_without_the_password() -> None:
    with (
        closing(Database("postgres://joe:s3cret@127.0.0.1:1/x")) as database,
        pytest.raises(StoreError) as caught,
        database.read() as session,
    ):
        session.scalars(select(FlagRow)).all()

    message = str(caught.value)
    assert message.startswith("store postgres://**********@127.0.0.1:1/x: ")
    assert "refused" in message
    assert "s3cret" not in message
    assert "\n" not in message


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")

    monkeypatch.setattr(
        "sqlalchemy.dialects.postgresql.psycopg.PGDialect_psycopg.import_dbapi", missing
    )
    install = "pip install 'learning-sidecar[postgres]'"

    with pytest.raises(StoreError, match="needs psycopg, which is not installed") as caught:
        Database("postgresql://joe:s3cret@h/x")
    assert install in str(caught.value)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(SettingsError, match="needs psycopg") as refused:
        open_existing("postgresql://joe:s3cret@h/x")
    assert install in str(refused.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://u:s3cret@h/x", "is of mysql; the store is SQLite or PostgreSQL"),
        ("postgresql://u:s3cret@h/x?nonsense=1", "its parameter nonsense is not what psycopg"),
        ("nosuch://u:s3cret@h/x", "is no database URL"),
    ],
)
def test_a_url_that_no_store_has_is_refused_without_its_password(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        store_url.refuse_bad_arguments(url)

    assert "s3cret" not in str(caught.value)


@both
def test_the_error_of_a_refused_row_does_not_quote_it(new_store: NewStore) -> None:
    database = new_store()
    row = {"seq": 1, "at": 1.0, "reason": "r", "payload": b"what a user said"}

    errors = []
    for engine in (database.engine, open_existing(database.url)):
        with pytest.raises(IntegrityError) as caught, engine.begin() as connection:
            connection.execute(insert(DeadLetterRow), [row, row])
        errors.append(str(caught.value))
        engine.dispose()

    assert all("what a user said" not in error for error in errors)
    assert all("INSERT INTO dead_letter" in error for error in errors)
