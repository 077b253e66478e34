"""A store with a key: nothing that was said is in its bytes, and the key may change."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import Executable, delete, select, text, update
from sqlalchemy.orm import Session

from ingest.best_of import BestOfScores, load_scores, save_scores
from ingest.errors import UnreadableExchangesError
from ingest.judges.replies import ReplyStore
from ingest.records import Answer, Group
from ingest.ruler.calls import save_judge_calls
from ingest.ruler.judge import JudgeReply
from ingest.ruler.ruler import JudgeCall
from ingest.store import rotation
from ingest.store.exchanges import dead_letter, load_exchange, save_exchange, stored_tokens
from ingest.store.groups import load_scored_group, mark_sampled, mark_scored, save_group
from ingest.store.rotation import rotate
from sidecar.records import Exchange
from sidecar.store import traces
from sidecar.store.database import Database
from sidecar.store.keyring import Keyring, sealed_size
from sidecar.store.models import BestOfScoreRow, ChoiceRow, JudgeCallRow
from support.ingest_kit import Kit
from support.stores import NewStore

MARK = "zebra-marker-4711"
OLD, NEW = {"old": b"o" * 32}, {"new": b"n" * 32}
IDS = (9_000_001, 9_000_002, 9_000_003)


def keyed(plain: Database, keys: dict[str, bytes]) -> Database:
    return Database(plain.url, Keyring(keys))


def exchange(name: str, turns: int = 1) -> Exchange:
    messages = [{"role": "user", "content": f"{MARK} {name} {turn}"} for turn in range(turns)]
    return Kit.exchange(
        name,
        request=json.dumps({"model": "m", "messages": messages}).encode(),
        prompt_token_ids=IDS * turns,
        choices=(Kit.choice(f"{MARK} said", token_ids=IDS, logprobs=(-0.5,) * 3),),
    )


def fill(database: Database, *names: str) -> None:
    """Store exchanges, and all that is derived from the first."""
    for name in names:
        with database.write() as session:
            assert save_exchange(session, exchange(name), held_out=False, now=1.0)
    first = names[0]
    message = Kit.message(f"{MARK} answered")
    group = Group(
        group_id=f"g-{first}",
        exchange_id=first,
        session_key="s",
        adapter="base",
        request=b"{}",
        prompt_token_ids=(),
        answers=tuple(
            Answer(index=index, origin="served", message=message, token_ids=IDS)
            for index in range(2)
        ),
    )
    reply = JudgeReply(text=f"{MARK} judged", prompt_tokens=1, completion_tokens=1, seconds=0.1)
    call = JudgeCall(judge_model="j", order_seed=1, attempt=0, error=None, reply=reply)
    with database.write() as session:
        assert save_group(session, group, now=1.0)
        assert mark_sampled(session, group.group_id)
        words = [f"{MARK} one", f"{MARK} two"]
        assert mark_scored(session, group.group_id, [0.1, 0.9], words, "j", "r", 2.0)
        save_judge_calls(session, group.group_id, [call], rubric_hash="r", now=2.0)
        dead_letter(session, f"{MARK} dead {first}".encode(), where=first, reason="why", now=1.0)
        scores = BestOfScores(
            exchange_id=f"other-{first}",
            at=1.0,
            answers_digest="d",
            scores=(0.5, 0.5),
            explanations=tuple(words),
            judge_model="j",
            rubric_hash="r",
        )
        assert save_scores(session, scores)
    replies_of(database).keep(f"digest-{first}", first, reply)


def replies_of(database: Database) -> ReplyStore:
    return ReplyStore(database, max_bytes=10**6, max_age_s=1e9, clock=lambda: 2.0)


def exchange_in(session: Session, name: str) -> Exchange:
    stored = load_exchange(session, name)
    assert stored is not None
    return stored.exchange


def check(database: Database, *names: str) -> None:
    """All that `fill` stored is read as it was."""
    with database.read() as session:
        for name in names:
            assert exchange_in(session, name) == exchange(name)
        scored = load_scored_group(session, f"g-{names[0]}")
        assert scored is not None
        assert scored.explanations == (f"{MARK} one", f"{MARK} two")
        assert scored.group.answers[1].token_ids == IDS
        assert stored_tokens(session, f"g-{names[0]}") == (3, 6)
        other = load_scores(session, [f"other-{names[0]}"])[f"other-{names[0]}"]
        assert other.explanations == (f"{MARK} one", f"{MARK} two")
    kept = replies_of(database).find(f"digest-{names[0]}")
    assert kept is not None
    assert kept.text == f"{MARK} judged"


def everything(database: Database) -> Iterator[bytes]:
    """All values of all tables, as they are stored, and what a reader of the disk makes of them."""
    with database.read() as session:
        kind = session.get_bind().dialect.name
        names = (
            "SELECT name FROM sqlite_master WHERE type = 'table'"
            if kind == "sqlite"
            else "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        )
        for table in session.scalars(text(names)).all():
            for row in session.execute(text(f'SELECT * FROM "{table}"')):
                for value in row:
                    yield from guesses(value if isinstance(value, bytes) else str(value).encode())


def guesses(value: bytes) -> Iterator[bytes]:
    yield value
    for start in (0, 9, 25, 37):
        try:
            yield zstandard.ZstdDecompressor().decompress(value[start:], max_output_size=10**6)
        except zstandard.ZstdError:
            continue
    try:
        yield zlib.decompress(value)
    except zlib.error:
        return


def files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.both_stores
def test_nothing_that_was_said_is_in_the_store(new_store: NewStore) -> None:
    plain = new_store()
    fill(plain, "a")
    packed = (9_000_001).to_bytes(4, "little")
    assert any(MARK.encode() in value for value in everything(plain))  # the search finds it
    assert any(packed in value for value in everything(plain))
    sealed = new_store()
    with closing(keyed(sealed, OLD)) as database:
        fill(database, "a", "b")

        found = list(everything(database))
        check(database, "a", "b")

    assert not [value for value in found if MARK.encode() in value or packed in value]


def test_without_its_key_a_row_is_named_and_the_others_are_read(new_store: NewStore) -> None:
    plain = new_store()
    with closing(keyed(plain, OLD)) as database:
        Kit(database).store(exchange("a"))
    with closing(keyed(plain, NEW)) as database:
        Kit(database).store(exchange("b"))
        with database.read() as session:
            assert exchange_in(session, "b") == exchange("b")
            with pytest.raises(UnreadableExchangesError) as caught:
                load_exchange(session, "a")
    (why,) = caught.value.damage.values()
    assert "is encrypted with the key 'old', which is missing" in why
    assert "\n" not in why


@pytest.mark.both_stores
def test_a_key_is_rotated_and_the_old_one_can_go(new_store: NewStore) -> None:
    plain = new_store()
    fill(plain, "a", "b")  # not encrypted at all
    with closing(keyed(plain, OLD)) as database:
        fill(database, "c", "d")
        check(database, "a", "b")
        check(database, "c", "d")
    with closing(keyed(plain, NEW | OLD)) as database:
        done = rotate(database)
        assert not done.unreadable
        assert done.encrypted > 20
        again = rotate(database)
        assert (again.encrypted, again.unreadable) == (0, {})

    with closing(keyed(plain, NEW)) as database:
        check(database, "a", "b")
        check(database, "c", "d")
        assert not [value for value in everything(database) if MARK.encode() in value]
        with database.read() as session:
            assert MARK not in str(session.scalars(select(JudgeCallRow.reply)).first())


CHANGED = ["", "said later"]


@pytest.mark.both_stores
@pytest.mark.parametrize(
    ("change", "left"),
    [
        (update(BestOfScoreRow).values(explanations=CHANGED), [CHANGED]),
        (delete(BestOfScoreRow), []),
    ],
    ids=["changed", "deleted"],
)
def test_a_list_that_another_process_changes_meanwhile_stays_as_that_left_it(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch, change: Executable, left: list[list[str]]
) -> None:
    plain = new_store()
    fill(plain, "a")
    encrypted_list = rotation._encrypted_list

    def encrypt_while_it_changes(*arguments: Any) -> list[Any]:
        new = encrypted_list(*arguments)
        with plain.write() as other:
            other.execute(change)
        return new

    with closing(keyed(plain, NEW)) as database:
        with monkeypatch.context() as patched:
            patched.setattr(rotation, "_encrypted_list", encrypt_while_it_changes)
            done = rotate(database)

        assert done.unreadable == {"changed meanwhile: run it again": 1}
        with plain.read() as session:
            assert session.scalars(select(BestOfScoreRow.explanations)).all() == left
        assert not rotate(database).unreadable
        with database.read() as session:
            scores = load_scores(session, ["other-a"]).values()
            assert [list(one.explanations) for one in scores] == left


def test_the_length_beside_a_value_is_that_of_its_text(new_store: NewStore) -> None:
    plain = new_store()
    long = Kit.exchange("a", choices=(Kit.choice("z" * 300_000),))
    Kit(plain).store(long)
    with closing(keyed(plain, OLD)) as database:
        assert not rotate(database).unreadable
    with closing(keyed(plain, NEW | OLD)) as database:
        assert not rotate(database).unreadable
        with database.read() as session:
            sealed = session.scalars(select(ChoiceRow.message_body)).one()

    assert sealed_size(sealed) == len(long.choices[0].message)
    # As docs/privacy.md says it, without our code.
    end = 9 + sealed[8] + 12
    place = "\x1f".join(("choice", "message_body", "a", "0")).encode()
    body = AESGCM(NEW["new"]).decrypt(sealed[end - 12 : end], sealed[end:], sealed[:end] + place)
    assert zlib.decompress(body) == long.choices[0].message


def leave_a_copy(plain: Database) -> Path:
    """Leave bytes outside of all rows, as SQLite does when it moves a row to another page."""
    path = Path(plain.url.removeprefix("sqlite:///"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA secure_delete=OFF")
        connection.execute("INSERT INTO flag VALUES ('x', ?, 1)", ("left-copy" * 1_000,))
        connection.execute("DELETE FROM flag WHERE name = 'x'")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def test_copies_outside_of_rows_are_gone_too(
    new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = new_store()
    fill(plain, "a")
    plain.close()
    path = leave_a_copy(plain)
    with closing(keyed(plain, NEW)) as database:
        monkeypatch.setattr(traces, "REWRITTEN_BYTES", 0)
        assert rotate(database).not_rewritten_mb > 0
        assert b"left-copy" in files(path.parent)
        # Nothing is left to encrypt; that the file is to be rewritten is known from the first run.
        assert rotate(database, large_too=True).not_rewritten_mb == 0

    assert b"left-copy" not in files(path.parent)
    assert MARK.encode() not in files(path.parent)
    with closing(keyed(plain, NEW)) as database:
        check(database, "a")


def test_a_missing_key_costs_its_values_alone(new_store: NewStore) -> None:
    plain = new_store()
    with closing(keyed(plain, OLD)) as database:
        Kit(database).store(exchange("a"))
    Kit(plain).store(exchange("b"))
    with closing(keyed(plain, NEW)) as database:
        done = rotate(database)
        Kit(database).stored("b")
    (why,) = done.unreadable
    assert "the key 'old', which is missing" in why
    assert done.unreadable[why] == 4


KILLED = """
import os, signal, sys
from ingest.store.rotation import rotate
from sidecar.store.database import Database
from sidecar.store import traces
from sidecar.store.keyring import Keyring, sealed_size
import ingest.store.rotation as rotation
rotation.WRITTEN_ROWS = 3
steps = 0
def step(_):
    global steps
    steps += 1
    if steps == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
rotate(Database(sys.argv[1], Keyring({"new": b"n" * 32, "old": b"o" * 32})), on_step=step)
"""


@pytest.mark.tier_2
def test_a_rotation_that_is_killed_is_run_again(new_store: NewStore) -> None:
    plain = new_store()
    names = [f"e{number}" for number in range(12)]
    with closing(keyed(plain, OLD)) as database:
        fill(database, *names)
    for step in (2, 5):
        died = subprocess.run(
            [sys.executable, "-c", KILLED, plain.url, str(step)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        assert died.returncode == -signal.SIGKILL
        with closing(keyed(plain, NEW | OLD)) as database:
            check(database, *names)
    with closing(keyed(plain, NEW | OLD)) as database:
        assert not rotate(database).unreadable
    with closing(keyed(plain, NEW)) as database:
        check(database, *names)
