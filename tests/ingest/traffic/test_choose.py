from __future__ import annotations

from typing import Any

from ingest.choose import choose_backlog, choose_new, live_adapters
from ingest.selection import group_id_of
from ingest.store.exchanges import load_exchange
from ingest.store.groups import load_group, mark_sampled, set_aside


def new(kit, *, limit: int = 100, **rules: Any) -> int:
    return choose_new(kit.database, kit.rules(**rules), model="smollm", limit=limit, now=2.0)


def backlog(kit, **rules: Any) -> int:
    return choose_backlog(kit.database, kit.rules(**rules), model="smollm", now=3.0)


def selections(kit, *names: str) -> list[str]:
    with kit.database.read() as session:
        return [load_exchange(session, name).selection for name in names]


def test_decisions_groups_and_counts_are_stored_together(kit) -> None:
    kit.store(kit.exchange("good"), kit.exchange("cut", outcome="cut"))
    kit.store(kit.exchange("kept"), held_out=True)

    assert new(kit) == 3

    assert selections(kit, "good", "cut", "kept") == ["chosen", "outcome", "held_out"]
    assert kit.counts("selection") == {"chosen": 1, "outcome": 1, "held_out": 1}
    row = kit.row(group_id_of("good"))
    assert (row.status, row.created_at) == ("sampling", 2.0)
    with kit.database.read() as session:
        assert [a.origin for a in load_group(session, row.group_id).answers] == ["served"]


def test_an_exchange_is_decided_once(kit) -> None:
    kit.store(kit.exchange("a"))

    assert new(kit) == 1
    assert new(kit) == 0
    assert kit.counts("selection") == {"chosen": 1}


def test_a_session_cap_counts_groups_of_earlier_batches_whatever_became_of_them(kit) -> None:
    (first,) = kit.choose(kit.exchange("a", session_key="m:s"), max_groups_per_session=1)
    with kit.database.write() as session:
        set_aside(session, first, "why")
    kit.store(kit.exchange("b", session_key="m:s"))

    new(kit, max_groups_per_session=1)

    assert selections(kit, "b") == ["session_cap"]


def test_the_base_is_live_until_there_is_a_champion(kit) -> None:
    with kit.database.read() as session:
        assert live_adapters(session, "smollm") == {"base"}
    kit.route(champion="v2", canary="v3")
    with kit.database.read() as session:
        assert live_adapters(session, "smollm") == {"v2", "v3"}
        assert live_adapters(session, "another-model") == {"base"}


def test_the_newest_of_the_backlog_is_taken_up_when_there_is_room(kit) -> None:
    names = ("a", "b", "c", "d")
    group_ids = kit.choose(*(kit.exchange(name) for name in names), max_pending_groups=1)
    assert selections(kit, *names) == ["chosen", "backlog", "backlog", "backlog"]
    assert backlog(kit, max_pending_groups=1) == 0  # no room: nobody is looked at

    with kit.database.write() as session:
        set_aside(session, group_ids[0], "why")
    assert backlog(kit, max_pending_groups=1) == 1

    assert selections(kit, *names) == ["chosen", "backlog", "backlog", "chosen"]
    assert kit.counts("selection") == {"chosen": 2, "backlog": 2}


def test_groups_that_wait_for_the_judge_take_places_too(kit) -> None:
    (group_id, _) = kit.choose(kit.exchange("a"), kit.exchange("b"), max_pending_groups=1)
    with kit.database.write() as session:
        mark_sampled(session, group_id)

    assert backlog(kit, max_pending_groups=1) == 0


def test_an_exchange_that_went_stale_in_the_backlog_leaves_it(kit) -> None:
    kit.choose(kit.exchange("a"), max_pending_groups=0)
    kit.route(champion="v2")

    backlog(kit)

    assert selections(kit, "a") == ["stale_adapter"]
    assert kit.counts("selection") == {"stale_adapter": 1}


def test_each_exchange_is_counted_in_exactly_one_place(kit) -> None:
    kit.choose(*(kit.exchange(f"e{n}") for n in range(10)), max_pending_groups=3, rate=0.7)
    backlog(kit, max_pending_groups=5, rate=0.7)

    assert sum(kit.counts("selection").values()) == 10
