"""Requests and prompt ids stored as differences: what comes back, what damage costs, what stays."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest
from sqlalchemy import delete, event, select, update

from ingest.errors import UnreadableExchangesError
from ingest.grouping.selection import group_id_of
from ingest.store import bases as store_bases
from ingest.store.bases import encode_children, store_children
from ingest.store.exchanges import load_by_selection, load_exchange, save_exchange, stored_tokens
from ingest.store.groups import load_group
from sidecar.records import Exchange
from sidecar.store.codec import pack_ids
from sidecar.store.contents import MAX_LINKS, load_contents
from sidecar.store.database import Database
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.ingest_kit import Kit, make_place, rebase_children

SYSTEM = " ".join(f"rule {Random(1).getrandbits(20)} {number}" for number in range(200))
SYSTEM_IDS = tuple(Random(1).choices(range(49_000), k=1_500))


def turns(kit: Kit, name: str, count: int, **changes: object) -> list[Exchange]:
    """The exchanges of one conversation, each of which repeats the one before it."""
    rng = Random(name)
    messages: list[dict[str, object]] = [{"role": "system", "content": SYSTEM}]
    ids = SYSTEM_IDS
    found = []
    for turn in range(count):
        asked = f"{name} asks {rng.getrandbits(64):x}"
        messages.append({"role": "user", "content": asked})
        ids = (*ids, *rng.choices(range(49_000), k=20))
        reply = f"{name} is told {rng.getrandbits(64):x}"
        answer = tuple(rng.choices(range(49_000), k=10))
        choice = kit.choice(reply, token_ids=answer, logprobs=(-0.5,) * 10)
        found.append(
            kit.exchange(
                f"{name}{turn}",
                request=json.dumps({"model": "m", "messages": messages}).encode(),
                prompt_token_ids=ids,
                choices=(choice,),
                **changes,
            )
        )
        messages.append({"role": "assistant", "content": reply})
        ids = (*ids, *answer)
    return found


def store(kit: Kit, exchanges: Sequence[Exchange], parent: str | None = None) -> None:
    """Store exchanges, each as the continuation of the one before it."""
    for exchange in exchanges:
        kit.store(exchange, place=make_place(exchange.exchange_id, parent))
        parent = exchange.exchange_id


def bases(kit: Kit) -> dict[str, str | None]:
    with kit.database.read() as session:
        rows = session.execute(select(ExchangeRow.exchange_id, ExchangeRow.base_id))
        return {row.exchange_id: row.base_id for row in rows}


def stored_bytes(kit: Kit, exchange_id: str) -> int:
    with kit.database.read() as session:
        row = session.scalars(
            select(ExchangeRow).where(ExchangeRow.exchange_id == exchange_id)
        ).one()
        return len(row.request_body) + len(row.prompt_token_ids)


def load(database: Database, exchange_id: str) -> Exchange | None:
    with database.read() as session:
        found = load_exchange(session, exchange_id)
        return None if found is None else found.exchange


@pytest.fixture
def open_again(kit: Kit) -> Iterator[Callable[[], Database]]:
    """Open the same store, as a process does that has just begun."""
    opened: list[Database] = []

    def open_one() -> Database:
        opened.append(Database(kit.database.url))
        return opened[-1]

    yield open_one
    for database in opened:
        database.close()


@pytest.fixture
def cold(open_again: Callable[[], Database]) -> Database:
    return open_again()


def test_a_turn_takes_the_bytes_of_what_is_new(kit: Kit) -> None:
    talk = turns(kit, "a", 10)
    store(kit, talk)

    assert bases(kit) == {"a0": None} | {f"a{n}": f"a{n - 1}" for n in range(1, 10)}
    raw = len(talk[9].request) + 4 * len(talk[9].prompt_token_ids)
    assert raw > 9_000
    assert stored_bytes(kit, "a9") < 400
    assert [load(kit.database, one.exchange_id) for one in talk] == talk


def test_a_new_process_reads_them_too(
    kit: Kit, cold: Database, open_again: Callable[[], Database]
) -> None:
    talk = turns(kit, "a", 2 * MAX_LINKS + 5)
    store(kit, talk)

    assert load(cold, talk[-1].exchange_id) == talk[-1]
    with open_again().read() as session:
        batch = load_by_selection(session, "new", limit=100)
    assert [one.exchange for one in batch] == talk
    # It also continues them.
    more = turns(kit, "a", 2 * MAX_LINKS + 6)[-1]
    store(Kit(cold), [more], parent=talk[-1].exchange_id)
    assert bases(kit)[more.exchange_id] == talk[-1].exchange_id
    assert load(kit.database, more.exchange_id) == more


def test_a_chain_has_a_limited_length(kit: Kit) -> None:
    store(kit, turns(kit, "a", 2 * MAX_LINKS + 5))

    found = bases(kit)
    for name in found:
        links = 0
        one = found[name]
        while one is not None:
            links, one = links + 1, found[one]
        assert links <= MAX_LINKS


@pytest.mark.both_stores
def test_a_batch_is_read_in_a_few_queries(kit: Kit, cold: Database) -> None:
    store(kit, turns(kit, "a", 30))
    queries: list[str] = []
    event.listen(
        cold.engine, "before_cursor_execute", lambda *arguments: queries.append(arguments[2])
    )

    with cold.read() as session:
        assert len(load_by_selection(session, "new", limit=100)) == 30
    assert len(queries) <= 8

    queries.clear()
    assert load(cold, "a29") is not None
    assert len(queries) <= 8


def test_conversations_of_one_user_share_their_opening_and_others_do_not(kit: Kit) -> None:
    owners = [
        {"user": "u"},
        {"user": "v"},
        {"user": "u", "key_id": "k"},
        {"user": "u", "project": "p"},
    ]
    for number, owner in enumerate(owners):
        store(kit, turns(kit, f"first{number}-", 1, **owner))
    for number, owner in enumerate(owners):
        talk = turns(kit, f"second{number}-", 1, **owner)
        store(kit, talk)
        assert load(kit.database, talk[0].exchange_id) == talk[0]

    assert bases(kit) == {f"first{n}-0": None for n in range(4)} | {
        f"second{n}-0": f"first{n}-0" for n in range(4)
    }


def test_what_shares_nothing_with_its_parent_is_stored_whole(kit: Kit) -> None:
    other = kit.exchange(
        "b", request=zlib.compress(SYSTEM.encode()) * 9, prompt_token_ids=tuple(range(500))
    )
    store(kit, [*turns(kit, "a", 1), other])

    assert bases(kit) == {"a0": None, "b": None}
    assert load(kit.database, "b") == other


@pytest.mark.parametrize("column", ["request_body", "prompt_token_ids", "reply"])
def test_a_damaged_base_costs_what_stands_on_it(kit: Kit, cold: Database, column: str) -> None:
    store(kit, turns(kit, "a", 6))
    other = turns(kit, "b", 3, user="v")
    store(kit, other)
    branch = turns(kit, "a", 2)[1]
    branch = kit.exchange("c", request=branch.request, prompt_token_ids=branch.prompt_token_ids)
    store(kit, [branch], parent="a0")
    with kit.database.write() as session:
        if column == "reply":
            at_a2 = update(ChoiceRow).where(ChoiceRow.exchange_id == "a2")
            session.execute(at_a2.values(message_body=b"damaged"))
        else:
            at_a2 = update(ExchangeRow).where(ExchangeRow.exchange_id == "a2")
            session.execute(at_a2.values({column: b"\x28\xb5\x2f\xfddamaged"}))

    with cold.read() as session, pytest.raises(UnreadableExchangesError) as raised:
        load_by_selection(session, "new", limit=100)

    with cold.read() as session:
        rows = session.execute(select(ExchangeRow.seq, ExchangeRow.exchange_id))
        names = {row.seq: row.exchange_id for row in rows}
    why = {names[seq]: told for seq, told in raised.value.damage.items()}
    assert sorted(why) == ["a2", "a3", "a4", "a5"]
    assert "a2" in why["a5"]
    assert [load(cold, one.exchange_id) for one in [*other, branch]] == [*other, branch]


@pytest.mark.parametrize("base", ["nobody", "a1", "a3"])
def test_a_damaged_base_id_is_damage(kit: Kit, cold: Database, base: str) -> None:
    """It leads nowhere, to itself, or in a circle."""
    store(kit, turns(kit, "a", 4))
    with kit.database.write() as session:
        session.execute(
            update(ExchangeRow).where(ExchangeRow.exchange_id == "a1").values(base_id=base)
        )

    with cold.read() as session:
        contents = load_contents(session, ["a0", "a3"])

    assert list(contents.found) == ["a0"]
    assert contents.damage["a3"]
    with pytest.raises(ValueError, match="base"):
        contents["a3"]


def test_rows_without_deltas_are_continued(kit: Kit, open_again: Callable[[], Database]) -> None:
    talk = turns(kit, "a", 3)
    store(kit, talk[:2])
    with kit.database.write() as session:
        for one in talk[:2]:
            session.execute(
                update(ExchangeRow)
                .where(ExchangeRow.exchange_id == one.exchange_id)
                .values(
                    request_body=zlib.compress(one.request, 1),
                    prompt_token_ids=pack_ids(one.prompt_token_ids),
                    base_id=None,
                )
            )
    cold = Kit(open_again())

    store(cold, talk[2:], parent="a1")

    assert bases(kit)["a2"] == "a1"
    assert stored_bytes(kit, "a2") < 400
    assert [load(cold.database, one.exchange_id) for one in talk] == talk


def test_the_length_of_a_prompt_is_known_without_reading_it(kit: Kit) -> None:
    talk = turns(kit, "a", 2)
    store(kit, talk)
    kit.choose(*turns(kit, "b", 1))
    group_id = group_id_of("a1")

    with kit.database.read() as session:
        prompt, _ = stored_tokens(session, group_id)
        group = load_group(session, group_id)

    assert prompt == len(talk[1].prompt_token_ids) == 1_550
    assert group is not None
    assert group.prompt_token_ids == talk[1].prompt_token_ids
    assert group.request == talk[1].request


def remove(kit: Kit, names: Sequence[str]) -> None:
    with kit.database.write() as session:
        while rebase_children(session, names, limit=2):
            pass
        session.execute(delete(ChoiceRow).where(ChoiceRow.exchange_id.in_(names)))
        session.execute(delete(ExchangeRow).where(ExchangeRow.exchange_id.in_(names)))


@pytest.mark.both_stores
@pytest.mark.parametrize("gone", [["a0"], ["a3"], ["a2", "a3", "a4"], ["a0", "a1"]])
def test_children_outlive_an_exchange(
    kit: Kit, gone: list[str], open_again: Callable[[], Database]
) -> None:
    talk = turns(kit, "a", 7)
    store(kit, talk)
    branches = [
        kit.exchange(f"c{n}", request=talk[3].request, prompt_token_ids=talk[3].prompt_token_ids)
        for n in range(5)
    ]
    for branch in branches:
        store(kit, [branch], parent="a2")

    remove(kit, gone)

    left = [one for one in [*talk, *branches] if one.exchange_id not in gone]
    for database in (kit.database, open_again()):
        assert [load(database, one.exchange_id) for one in left] == left
    found = bases(kit)
    assert set(found) == {one.exchange_id for one in left}
    assert {name for name in found.values() if name} <= set(found)
    later = turns(kit, "b", 1)
    store(kit, later)  # nothing remembered leads to what is gone
    assert load(open_again(), "b0") == later[0]


def branches_of(kit: Kit, count: int) -> list[Exchange]:
    """Store a0, and so many exchanges that each continue it: b0, b1, ..."""
    first, second = turns(kit, "a", 2)
    store(kit, [first])
    found = [
        kit.exchange(
            f"b{number}",
            request=second.request.replace(b"a asks", b"b%d asks" % number),
            prompt_token_ids=(*second.prompt_token_ids, number),
        )
        for number in range(count)
    ]
    for branch in found:
        store(kit, [branch], parent="a0")
    assert set(bases(kit).values()) == {None, "a0"}
    return found


def test_branches_of_a_deleted_exchange_are_stored_on_the_youngest_of_them(
    kit: Kit, open_again: Callable[[], Database]
) -> None:
    branches = branches_of(kit, 9)
    whole = stored_bytes(kit, "a0")
    before = sum(stored_bytes(kit, name) for name in bases(kit))
    heirs: dict[str, str] = {}

    for _ in range(3):  # a few at a time
        with kit.database.write() as session:
            rebased = encode_children(session, ["a0"], heirs, limit=3)
            assert store_children(session, rebased, ["a0"]) == 3
    remove(kit, ["a0"])

    assert bases(kit) == {**{f"b{number}": "b8" for number in range(8)}, "b8": None}
    assert sum(stored_bytes(kit, name) for name in bases(kit)) < before
    assert stored_bytes(kit, "b7") < whole / 10
    cold = open_again()
    assert [load(cold, one.exchange_id) for one in branches] == branches


def test_what_would_stand_on_an_heir_stays_while_the_heir_does(kit: Kit, cold: Database) -> None:
    branches = branches_of(kit, 3)
    with kit.database.read() as session:
        rebased = encode_children(session, ["a0"], {})
    assert rebased.rows["b0"]["base_id"] == "b2"
    with kit.database.write() as session:  # it could not be stored: its own new base had gone
        rebased.rows["b2"]["base_id"] = "nobody"
        assert store_children(session, rebased, ["a0"]) == 0

    assert bases(kit) == {"a0": None, "b0": "a0", "b1": "a0", "b2": "a0"}
    with kit.database.write() as session:
        again = encode_children(session, ["a0"], {"a0": "b2"}, limit=1)
        assert again.rows["b2"]["base_id"] is None
        assert store_children(session, again, ["a0"]) == 1
    remove(kit, ["a0"])
    assert [load(cold, one.exchange_id) for one in branches] == branches


def test_a_branch_whose_chain_would_grow_by_much_is_not_stored_on_the_heir(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches_of(kit, 2)
    monkeypatch.setattr(store_bases, "GROWTH_BYTES", 10)

    remove(kit, ["a0"])

    assert bases(kit) == {"b0": None, "b1": None}


def test_branches_that_cannot_be_read_lose_their_base_and_no_more(kit: Kit, cold: Database) -> None:
    branches = branches_of(kit, 3)
    with kit.database.write() as session:
        damage = update(ExchangeRow).where(ExchangeRow.exchange_id == "b2")
        session.execute(damage.values(request_body=b"\x28\xb5\x2f\xfddamaged"))

    with cold.write() as session:
        while rebase_children(session, ["a0"]):
            continue
    remove(kit, ["a0"])

    found = bases(kit)
    assert found["b2"] is None
    assert (found["b0"], found["b1"]) in (("b1", None), (None, "b0"))
    with cold.read() as session:
        assert list(load_contents(session, ["b0", "b1", "b2"]).damage) == ["b2"]
    assert [load(cold, one.exchange_id) for one in branches[:2]] == branches[:2]


def test_a_deleted_conversation_leaves_no_byte_in_one_that_began_alike(
    kit: Kit, cold: Database
) -> None:
    marker = "".join(Random(2).choices("abcdefghijklmnopqrstuvwxyz", k=40))
    first = turns(kit, "a", 3)
    spoken = [
        kit.exchange(
            one.exchange_id,
            request=one.request.replace(b"a asks", marker.encode()),
            prompt_token_ids=one.prompt_token_ids,
        )
        for one in first
    ]
    store(kit, spoken)
    store(kit, turns(kit, "b", 3))
    assert bases(kit)["b0"] == "a0"

    remove(kit, ["a0", "a1", "a2"])

    with cold.read() as session:
        contents = load_contents(session, ["b0", "b1", "b2"])
        kept = session.scalars(select(ExchangeRow.request_body)).all()
    assert all(marker.encode() not in contents[f"b{n}"].request for n in range(3))
    assert all(marker.encode() not in body for body in kept)
    assert not contents.damage


def test_a_base_deleted_elsewhere_is_not_used(kit: Kit, open_again: Callable[[], Database]) -> None:
    talk = turns(kit, "a", 3)
    store(kit, talk[:2])
    other = Kit(open_again())
    remove(other, ["a0", "a1"])

    store(kit, talk[2:], parent="a1")  # its cache still has a1

    assert bases(kit) == {"a2": None}
    assert load(other.database, "a2") == talk[2]


def test_a_base_that_was_not_stored_is_not_used(
    kit: Kit, open_again: Callable[[], Database]
) -> None:
    talk = turns(kit, "a", 2)
    broken = kit.exchange("broken", prompt_token_ids=(-(2**40),))

    def fail() -> None:
        with kit.database.write() as session:
            save_exchange(session, talk[0], held_out=False, now=1.0, place=make_place("a0"))
            save_exchange(session, broken, held_out=False, now=1.0)

    with pytest.raises(OverflowError):
        fail()
    store(kit, talk[1:], parent="a0")

    assert bases(kit) == {"a1": None}
    assert load(open_again(), "a1") == talk[1]
