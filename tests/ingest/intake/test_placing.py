"""Sessions in the store: late exchanges, restarts, and what is held out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import select, update

from deploy.canary.gate_store import held_out_prompts
from ingest.grouping.features import is_held_out
from ingest.grouping.selection import group_id_of
from ingest.intake import choose
from ingest.intake.choose import Sessions, choose_new
from ingest.sessions.tree import COMMON, TTL_S
from ingest.store import sessions as store
from ingest.store.groups import load_group
from sidecar.lines import Line
from sidecar.records import Exchange
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.ingest_kit import Kit

RATE = 0.5
FIRST, SECOND, THIRD, FOURTH = "ex_1", "ex_2", "ex_3", "ex_4"


def turn(kit: type[Kit] | Kit, name: str, number: int, *, about: str, **changes: Any) -> Exchange:
    """The exchange of this name, at this turn of the one conversation about this."""
    messages = []
    for before in range(number):
        messages.append({"role": "user", "content": f"Question {before} about {about}"})
        messages.append({"role": "assistant", "content": f"Answer {before} about {about}"})
    messages.append({"role": "user", "content": f"Question {number} about {about}"})
    reply = {"role": "assistant", "content": f"Answer {number} about {about}"}
    request = json.dumps({"model": "smollm", "messages": messages}).encode()
    choices = (kit.choice(message=json.dumps(reply).encode()),)
    return kit.exchange(name, request=request, choices=choices, **changes)


def topics(held_out: bool) -> Iterator[str]:
    """Things that a conversation may be about, of which it is held out, or is not."""
    for number in range(200):
        topic = f"thing {number}"
        exchange = turn(Kit, "x", 0, about=topic)
        if Sessions(held_out_rate=RATE).place(exchange, now=1.0)[1] == held_out:
            yield topic


HELD_OUT, TRAINED = next(topics(True)), next(topics(False))


def take(kit: Kit, sessions: Sessions, *exchanges: Exchange, now: float = 5.0) -> None:
    kit.take(*exchanges, sessions=sessions, now=now)


def rows(kit: Kit) -> dict[str, tuple[str, str | None, int, bool]]:
    """Exchange id -> session, parent, turn, held out."""
    with kit.database.read() as session:
        return {
            row.exchange_id: (row.session_id, row.parent_id, row.turn, row.held_out)
            for row in session.scalars(select(ExchangeRow))
        }


SIDES = pytest.mark.parametrize(("about", "held_out"), [(TRAINED, False), (HELD_OUT, True)])


def linked(held_out: bool = False) -> dict[str, tuple[str, str | None, int, bool]]:
    """The rows of three turns of one session."""
    return {
        FIRST: (FIRST, None, 0, held_out),
        SECOND: (FIRST, FIRST, 1, held_out),
        THIRD: (FIRST, SECOND, 2, held_out),
    }


@SIDES
def test_a_conversation_is_one_session_held_out_as_a_whole(
    kit: Kit, about: str, held_out: bool
) -> None:
    turns = [turn(kit, name, at, about=about) for at, name in enumerate((FIRST, SECOND, THIRD))]
    take(kit, Sessions(held_out_rate=RATE), *turns)

    assert rows(kit) == linked(held_out)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_late_exchange_moves_those_below_it_in_the_store(kit: Kit, at_once: bool) -> None:
    """Also when the batch has a row that is refused, so that it is stored one by one."""
    sessions = Sessions(held_out_rate=RATE)
    turns = [turn(kit, name, at, about=TRAINED) for at, name in enumerate((FIRST, SECOND, THIRD))]
    late = (turns[2], turns[0], turns[1])

    if at_once:
        take(kit, sessions, kit.exchange("nan", propensity=math.nan), *late)
    else:
        for one in late:
            take(kit, sessions, one)

    assert rows(kit) == linked()


@SIDES
def test_what_comes_before_its_parent_is_on_the_right_side(
    kit: Kit, about: str, held_out: bool
) -> None:
    for at in range(1, 6):
        take(kit, Sessions(held_out_rate=RATE), turn(kit, f"ex_{at}", at, about=about))

    assert {held for *_, held in rows(kit).values()} == {held_out}


@SIDES
def test_sessions_that_begin_alike_are_on_one_side(kit: Kit, about: str, held_out: bool) -> None:
    sessions = Sessions(held_out_rate=RATE)
    take(kit, sessions, *(turn(kit, f"ex_{number}", 0, about=about) for number in range(5)))
    take(kit, Sessions(held_out_rate=RATE), turn(kit, "after_a_restart", 0, about=about))

    found = rows(kit)
    assert len({session for session, *_ in found.values()}) == 6
    assert {held for *_, held in found.values()} == {held_out}


@pytest.mark.parametrize("about", [TRAINED, HELD_OUT])
def test_sessions_with_a_common_opening_are_on_both_sides(kit: Kit, about: str) -> None:
    sessions = Sessions(held_out_rate=RATE)
    turns: list[Exchange] = []
    for number in range(40):
        names = (f"first_{number}", f"second_{number}")
        turns += [turn(kit, name, at, about=about) for at, name in enumerate(names)]
    take(kit, sessions, *turns)

    found = rows(kit)
    sides = [found[f"second_{number}"][3] for number in range(40)]
    assert set(sides[:COMMON]) == {about == HELD_OUT}
    assert set(sides[COMMON:]) == {True, False}
    with kit.database.read() as session:
        left_out = {
            row.exchange_id: row.untrainable_reason for row in session.scalars(select(ExchangeRow))
        }
    for number, held_out in enumerate(sides):
        first = f"first_{number}"
        assert found[f"second_{number}"][0] == first
        # The first request is the same prompt in all of them: it is asked on one side only.
        on_this_side = held_out == (about == HELD_OUT)
        assert left_out[first] == (None if on_this_side else "shared_opening")
        assert found[first][3] == (on_this_side and held_out)


@pytest.mark.both_stores
@pytest.mark.parametrize(
    ("reason", "stored"), [(None, {None, "shared_opening"}), ("ids_missing", {"ids_missing"})]
)
def test_a_restart_keeps_the_side_of_a_session_with_a_common_opening(
    kit: Kit, reason: str | None, stored: set[str | None]
) -> None:
    sessions = Sessions(held_out_rate=RATE)
    names = [f"first_{number}" for number in range(3 * COMMON)]
    openings = [turn(kit, name, 0, about=TRAINED, untrainable_reason=reason) for name in names]
    take(kit, sessions, *openings)
    with kit.database.read() as session:
        assert set(session.scalars(select(ExchangeRow.untrainable_reason))) == stored
    sides: dict[str, list[bool]] = {}
    for one, name in ((sessions, "before"), (restarted(kit), "after")):
        for number in range(3 * COMMON):
            exchange = turn(kit, f"{name}_{number}", 1, about=TRAINED)
            place, held_out = one.place(exchange, now=6.0)
            assert place.session == f"first_{number}"
            sides.setdefault(name, []).append(held_out)

    assert sides["before"] == sides["after"]
    assert set(sides["after"]) == {True, False}


def restarted(kit: Kit, *, held_out_rate: float = RATE) -> Sessions:
    """The sessions of the store; an operator may have changed the share that is held out."""
    sessions = Sessions(held_out_rate=held_out_rate)
    sessions.restore(kit.database, now=5.0)
    return sessions


def test_joining_a_trained_session_ends_the_exam_of_the_other(kit: Kit) -> None:
    about = "a ship"
    take(kit, Sessions(held_out_rate=0.0), turn(kit, SECOND, 1, about=about))
    assert rows(kit)[SECOND] == (SECOND, None, 0, False)  # it may be trained on
    choose_new(kit.database, kit.rules(), model="smollm", limit=9, now=5.0)
    assert kit.counts("selection") == {"chosen": 1}

    sessions = restarted(kit, held_out_rate=1.0)
    take(kit, sessions, turn(kit, "other", 1, about=HELD_OUT), turn(kit, FIRST, 0, about=about))
    take(kit, sessions, turn(kit, THIRD, 2, about=about))

    assert rows(kit) == linked() | {"other": ("other", None, 0, True)}
    assert kit.row(group_id_of(SECOND)).session_id == FIRST
    take(kit, restarted(kit), turn(kit, FOURTH, 3, about=about), now=6.0)
    assert rows(kit)[FOURTH] == (FIRST, THIRD, 3, False)


def test_an_exchange_that_was_held_out_is_never_trained_on_when_its_session_is(kit: Kit) -> None:
    about = "a ship"
    take(kit, Sessions(held_out_rate=1.0), turn(kit, SECOND, 1, about=about))
    with kit.database.read() as session:
        # It is not decided yet.
        assert held_out_prompts(session, Line(name="smollm"), limit=9) == []
    choose_new(kit.database, kit.rules(), model="smollm", limit=9, now=5.0)
    with kit.database.read() as session:
        assert len(held_out_prompts(session, Line(name="smollm"), limit=9)) == 1

    take(kit, restarted(kit, held_out_rate=0.0), turn(kit, FIRST, 0, about=about))
    choose_new(kit.database, kit.rules(), model="smollm", limit=9, now=5.0)

    assert {held for *_, held in rows(kit).values()} == {False}
    assert kit.counts("selection") == {"held_out": 1, "chosen": 1}
    with kit.database.read() as session:
        assert held_out_prompts(session, Line(name="smollm"), limit=9) == []
        assert load_group(session, group_id_of(SECOND)) is None


def test_after_a_restart_a_late_parent_moves_what_was_stored_before_its_parent(kit: Kit) -> None:
    before = Sessions(held_out_rate=RATE)
    take(kit, before, turn(kit, THIRD, 2, about=TRAINED), turn(kit, SECOND, 1, about=TRAINED))
    assert rows(kit)[THIRD] == (SECOND, SECOND, 1, False)

    take(kit, restarted(kit), turn(kit, FIRST, 0, about=TRAINED), now=6.0)

    assert rows(kit)[SECOND] == (FIRST, FIRST, 1, False)
    assert rows(kit)[THIRD] == (FIRST, SECOND, 2, False)


def test_parents_in_a_circle_which_only_damage_makes_stop_no_restart(kit: Kit) -> None:
    before = Sessions(held_out_rate=RATE)
    take(kit, before, turn(kit, SECOND, 1, about=TRAINED), turn(kit, THIRD, 2, about=TRAINED))
    with kit.database.write() as session:
        session.execute(
            update(ExchangeRow).where(ExchangeRow.exchange_id == SECOND).values(parent_id=THIRD)
        )
    sessions = Sessions(held_out_rate=RATE)

    assert sessions.restore(kit.database, now=6.0) == 2
    take(kit, sessions, turn(kit, "ex_5", 4, about=TRAINED), now=6.0)
    take(kit, sessions, turn(kit, FOURTH, 3, about=TRAINED), now=6.0)

    assert rows(kit)[FOURTH] == (SECOND, THIRD, 2, False)
    assert rows(kit)["ex_5"] == (SECOND, FOURTH, 3, False)


@pytest.mark.parametrize("rate", [0.0, 0.99])
def test_a_session_stays_on_its_side_when_the_rate_changes(kit: Kit, rate: float) -> None:
    for about, name in ((TRAINED, "trained"), (HELD_OUT, "held_out")):
        take(kit, Sessions(held_out_rate=RATE), turn(kit, name, 0, about=about))
    sessions = restarted(kit, held_out_rate=rate)

    for about, name in ((TRAINED, "trained"), (HELD_OUT, "held_out")):
        take(kit, sessions, turn(kit, f"{name}_2", 1, about=about), now=6.0)

    found = rows(kit)
    assert found["trained_2"] == ("trained", "trained", 1, False)
    assert found["held_out_2"] == ("held_out", "held_out", 1, True)


def test_a_choice_that_is_damaged_costs_a_restart_only_its_exchange(kit: Kit) -> None:
    turns = (turn(kit, name, at, about=TRAINED) for at, name in enumerate((FIRST, SECOND)))
    take(kit, Sessions(held_out_rate=RATE), *turns)
    with kit.database.write() as session:
        of_first = update(ChoiceRow).where(ChoiceRow.exchange_id == FIRST)
        session.execute(of_first.values(logprobs=b"x"))

    assert Sessions(held_out_rate=RATE).restore(kit.database, now=6.0) == 1


def test_a_restart_reads_the_newest_within_bounds(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "RESTORED", 5)
    monkeypatch.setattr("ingest.store.exchanges.PAGE", 2)
    names = [f"ex_{number}" for number in range(7)]
    for at, name in enumerate(names):
        take(kit, Sessions(held_out_rate=RATE), turn(kit, name, 0, about=TRAINED), now=float(at))

    with kit.database.read() as session:
        pages = list(store.newest_exchanges(session, since=3.0, limit=5, limit_bytes=2**20))

    assert [[one.exchange.exchange_id for one in page] for page, _ in pages] == [
        names[3:5],
        names[5:],
    ]
    assert Sessions(held_out_rate=RATE).restore(kit.database, now=7.0) == 5
    assert Sessions(held_out_rate=RATE).restore(kit.database, now=TTL_S + 5.5) == 1


def test_a_request_that_is_no_json_is_a_session_of_its_own(kit: Kit) -> None:
    names = [f"ex_{number}" for number in range(5)]
    requests = [kit.exchange(name, request=b"\xff not json") for name in names]
    take(kit, Sessions(held_out_rate=RATE), *requests)

    assert rows(kit) == {name: (name, None, 0, is_held_out(name, RATE)) for name in names}
