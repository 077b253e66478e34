"""Sessions in the store: late exchanges, restarts, and what is held out."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import count

import pytest
from sqlalchemy import select, update

from ingest.grouping.held_out import is_held_out
from ingest.intake import placing
from ingest.intake.consume import consume
from ingest.intake.placing import Sessions
from ingest.sessions.tree import TTL_S
from ingest.store import sessions as store
from sidecar.records import Choice, Exchange, encode_exchange
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.ingest_kit import Kit

RATE = 0.5
HELD_OUT = [name for name in (f"ex_{number}" for number in range(99)) if is_held_out(name, RATE)]
TRAINED = [name for name in (f"ex_{number}" for number in range(99)) if not is_held_out(name, RATE)]


def turn(kit: Kit, name: str, number: int) -> Exchange:
    """The exchange of this name, at this turn of one conversation."""
    messages = []
    for before in range(number):
        messages.append({"role": "user", "content": f"Question {before} of this conversation"})
        messages.append({"role": "assistant", "content": f"Answer {before} of this conversation"})
    messages.append({"role": "user", "content": f"Question {number} of this conversation"})
    reply = {"role": "assistant", "content": f"Answer {number} of this conversation"}
    return kit.exchange(
        name,
        request=json.dumps({"model": "m", "messages": messages}).encode(),
        choices=(Choice(index=0, message=json.dumps(reply).encode()),),
    )


def take(kit: Kit, sessions: Sessions, *exchanges: Exchange, now: float = 5.0) -> None:
    bus = kit.MemoryBus([encode_exchange(one) for one in exchanges])
    consume(bus, kit.database, limit=100, sessions=sessions, now=now)


def rows(kit: Kit) -> dict[str, tuple[str, str | None, int, bool]]:
    """Exchange id -> session, parent, turn, held out."""
    with kit.database.read() as session:
        return {
            row.exchange_id: (row.session_id, row.parent_id, row.turn, row.held_out)
            for row in session.scalars(select(ExchangeRow))
        }


def test_the_turns_of_a_conversation_are_stored_as_one_session(kit: Kit) -> None:
    first, second, third = TRAINED[:3]
    turns = zip((first, second, third), count(), strict=False)
    take(kit, Sessions(held_out_rate=RATE), *(turn(kit, name, at) for name, at in turns))

    assert rows(kit) == {
        first: (first, None, 0, False),
        second: (first, first, 1, False),
        third: (first, second, 2, False),
    }


def test_a_session_is_held_out_as_a_whole(kit: Kit) -> None:
    first, second = HELD_OUT[0], TRAINED[0]
    take(kit, Sessions(held_out_rate=RATE), turn(kit, first, 0), turn(kit, second, 1))

    assert rows(kit) == {first: (first, None, 0, True), second: (first, first, 1, True)}


def test_a_late_exchange_moves_those_below_it_in_the_store(kit: Kit) -> None:
    first, second, third = TRAINED[:3]
    sessions = Sessions(held_out_rate=RATE)
    take(kit, sessions, turn(kit, third, 2))
    take(kit, sessions, turn(kit, first, 0))
    take(kit, sessions, turn(kit, second, 1))

    assert rows(kit) == {
        first: (first, None, 0, False),
        second: (first, first, 1, False),
        third: (first, second, 2, False),
    }


def test_what_may_have_been_trained_on_makes_its_session_no_exam(kit: Kit) -> None:
    first, second, third, fourth = HELD_OUT[0], HELD_OUT[1], TRAINED[0], HELD_OUT[2]
    sessions = Sessions(held_out_rate=RATE)
    take(kit, sessions, turn(kit, first, 0), turn(kit, third, 2))
    assert [held for *_, held in rows(kit).values()] == [True, True]

    take(kit, sessions, turn(kit, second, 1), turn(kit, fourth, 3))
    assert {held for *_, held in rows(kit).values()} == {True}


def test_joining_a_trained_session_ends_the_exam_of_the_other(kit: Kit) -> None:
    first, late, orphan = HELD_OUT[0], HELD_OUT[1], TRAINED[0]
    sessions = Sessions(held_out_rate=RATE)
    take(kit, sessions, turn(kit, orphan, 1))  # a session of its own, which may be trained on
    assert rows(kit)[orphan] == (orphan, None, 0, False)

    take(kit, sessions, turn(kit, first, 0))
    take(kit, sessions, turn(kit, late, 2))

    assert rows(kit) == {
        first: (first, None, 0, False),
        orphan: (first, first, 1, False),
        late: (first, orphan, 2, False),
    }
    after_restart = Sessions(held_out_rate=RATE)
    after_restart.restore(kit.database, now=6.0)
    take(kit, after_restart, turn(kit, HELD_OUT[2], 3), now=6.0)
    assert rows(kit)[HELD_OUT[2]] == (first, late, 3, False)


def test_a_restart_goes_on_with_the_same_sessions(kit: Kit) -> None:
    first, second, third = TRAINED[:3]
    take(kit, Sessions(held_out_rate=RATE), turn(kit, first, 0), turn(kit, third, 2))
    sessions = Sessions(held_out_rate=RATE)

    assert sessions.restore(kit.database, now=6.0) == 2
    take(kit, sessions, turn(kit, second, 1), now=6.0)

    assert rows(kit)[second] == (first, first, 1, False)
    assert rows(kit)[third] == (first, second, 2, False)


DAMAGE = {
    "turn": "'x'",
    "branch": "'x'",
    "segment": "x'00'",
    "started_at": "'x'",
    "stored_at": "'x'",
    "held_out": "'x'",
    "placed_by": "'guessed'",
    "session_id": "CAST(x'ff80' AS TEXT)",
    "exchange_id": "CAST(x'ff80' AS TEXT)",
    "parent_id": "x'ff80'",
    "request_body": "x'00'",
    "timings": "'{'",
    "status": "'x'",
}


@pytest.mark.parametrize("column", DAMAGE)
def test_a_damaged_exchange_costs_a_restart_only_itself(kit: Kit, column: str) -> None:
    first, second, third, other = TRAINED[:4]
    take(kit, Sessions(held_out_rate=RATE), turn(kit, first, 0), turn(kit, second, 1))
    with closing(kit.database.engine.raw_connection()) as raw:
        raw.execute("PRAGMA foreign_keys=OFF")
        raw.execute(f"UPDATE exchange SET {column} = {DAMAGE[column]} WHERE seq = 1")
        raw.execute("PRAGMA foreign_keys=ON")
    sessions = Sessions(held_out_rate=RATE)

    restored = sessions.restore(kit.database, now=6.0)
    take(kit, sessions, turn(kit, third, 2), turn(kit, other, 1), now=6.0)

    # `started_at` is stored a second time, with the other times; SQLAlchemy reads any text in
    # `held_out` as true.
    readable = column in ("started_at", "held_out")
    assert restored == 1 + readable
    assert kit.counts("sessions") == ({} if readable else {"unreadable": 1})
    with kit.database.read() as session:
        columns = (ExchangeRow.session_id, ExchangeRow.parent_id, ExchangeRow.turn)
        found = session.execute(select(*columns).where(ExchangeRow.exchange_id == third)).one()
    assert tuple(found) == (first, second, 2)


def test_a_choice_that_is_damaged_costs_a_restart_only_its_exchange(kit: Kit) -> None:
    first, second = TRAINED[:2]
    take(kit, Sessions(held_out_rate=RATE), turn(kit, first, 0), turn(kit, second, 1))
    with kit.database.write() as session:
        session.execute(
            update(ChoiceRow).where(ChoiceRow.exchange_id == first).values(logprobs=b"x")
        )

    assert Sessions(held_out_rate=RATE).restore(kit.database, now=6.0) == 1


def test_a_restart_reads_the_newest_exchanges_within_its_bounds(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "RESTORED", 5)
    monkeypatch.setattr(store, "PAGE", 2)
    names = TRAINED[:7]
    for at, name in enumerate(names):
        take(kit, Sessions(held_out_rate=RATE), turn(kit, name, 0), now=float(at))

    with kit.database.read() as session:
        pages = list(store.newest_exchanges(session, since=3.0, limit=5, limit_bytes=2**20))

    assert [[one.exchange.exchange_id for one in page] for page, _ in pages] == [
        names[3:5],
        names[5:7],
    ]
    assert Sessions(held_out_rate=RATE).restore(kit.database, now=7.0) == 5
    assert Sessions(held_out_rate=RATE).restore(kit.database, now=TTL_S + 5.5) == 1


def test_an_exchange_that_comes_twice_keeps_its_place(kit: Kit) -> None:
    first, second = TRAINED[:2]
    sessions = Sessions(held_out_rate=RATE)
    take(kit, sessions, turn(kit, first, 0), turn(kit, second, 1))
    before = rows(kit)
    take(kit, sessions, turn(kit, second, 1), turn(kit, first, 0))
    take(kit, Sessions(held_out_rate=RATE), turn(kit, second, 1))

    assert rows(kit) == before


def test_a_request_that_is_no_json_is_a_session_of_its_own(kit: Kit) -> None:
    name = TRAINED[0]
    take(kit, Sessions(held_out_rate=RATE), kit.exchange(name, request=b"\xff not json"))

    assert rows(kit)[name] == (name, None, 0, False)
