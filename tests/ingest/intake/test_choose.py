from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import update

from ingest.grouping.features import share_of
from ingest.grouping.selection import group_id_of, live_adapters, rules_of
from ingest.intake.choose import choose_backlog, choose_new
from ingest.store.groups import set_aside
from sidecar.records import Timings
from sidecar.settings import Learner, Settings
from sidecar.store.models import AliasRow, ExchangeRow, RoutingRow
from support.ingest_kit import Kit


def new(kit: Kit, *, limit: int = 100, **rules: Any) -> int:
    return choose_new(kit.database, kit.rules(**rules), model="smollm", limit=limit, now=2.0)


def backlog(kit: Kit, **rules: Any) -> int:
    return choose_backlog(kit.database, kit.rules(**rules), model="smollm", now=3.0)


def selections(kit: Kit, *names: str) -> list[str]:
    return [kit.stored(name).selection for name in names]


@pytest.mark.both_stores
def test_decisions_groups_and_counts_are_stored_together(kit: Kit) -> None:
    kit.store(kit.exchange("good"), kit.exchange("cut", outcome="upstream_error"))
    kit.store(kit.exchange("kept"), held_out=True)

    assert new(kit) == 3

    assert selections(kit, "good", "cut", "kept") == ["chosen", "outcome", "held_out"]
    assert kit.counts("selection") == {"chosen": 1, "outcome": 1, "held_out": 1}
    row = kit.row(group_id_of("good"))
    assert (row.status, row.created_at) == ("sampling", 2.0)
    assert [answer.origin for answer in kit.group(row.group_id).answers] == ["served"]


def test_an_exchange_waits_for_its_decision_until_it_has_settled(kit: Kit) -> None:
    def choose(now: float, settle_s: float = 5.0) -> int:
        rules = kit.rules(settle_s=settle_s)
        return choose_new(kit.database, rules, model="smollm", limit=2, now=now)

    for at, name in enumerate(("a", "b", "c", "d")):
        kit.store(kit.exchange(name), now=10.0 + at)

    assert choose(13.0) == choose(14.9) == 0
    assert choose(15.0) == 1
    assert selections(kit, "a", "b") == ["chosen", "new"]
    assert choose(17.5) == 2
    assert choose(17.5) == 0
    assert choose(17.5, settle_s=0.0) == 1


def test_an_exchange_of_a_clock_that_was_fast_holds_up_nothing(kit: Kit) -> None:
    for name, stored_at in (("a", 1e6), ("b", 10.0)):
        kit.store(kit.exchange(name), now=stored_at)

    assert choose_new(kit.database, kit.rules(settle_s=5.0), model="smollm", limit=1, now=20.0) == 1
    assert choose_new(kit.database, kit.rules(settle_s=5.0), model="smollm", limit=1, now=20.0) == 1


def test_a_decision_goes_by_where_a_late_parent_has_moved_the_exchange(kit: Kit) -> None:
    rules = kit.rules(settle_s=5.0)
    kit.store(kit.exchange("a"), held_out=True, now=10.0)
    assert choose_new(kit.database, rules, model="smollm", limit=9, now=12.0) == 0
    with kit.database.write() as session:
        session.execute(update(ExchangeRow).values(held_out=False, session_id="of the parent"))

    assert choose_new(kit.database, rules, model="smollm", limit=9, now=15.0) == 1

    assert selections(kit, "a") == ["chosen"]
    assert kit.row(group_id_of("a")).session_id == "of the parent"


def test_a_session_cap_counts_groups_of_earlier_batches_whatever_became_of_them(kit: Kit) -> None:
    (first,) = kit.choose(kit.exchange("a", session_key="m:s"), max_groups_per_session=1)
    with kit.database.write() as session:
        set_aside(session, first, "why")
    kit.store(kit.exchange("b", session_key="m:s"))

    new(kit, max_groups_per_session=1)

    assert selections(kit, "b") == ["session_cap"]


def test_the_base_is_live_until_there_is_a_champion(kit: Kit) -> None:
    with kit.database.read() as session:
        assert live_adapters(session, "smollm") == {"base"}
    kit.route(champion="v2", canary="v3")
    with kit.database.read() as session:
        assert live_adapters(session, "smollm") == {"v2", "v3"}
        assert live_adapters(session, "another-model") == {"base"}


def test_a_damaged_routing_table_holds_up_no_selection(kit: Kit) -> None:
    kit.route(champion="v2", canary="v3")
    with kit.database.write() as session:
        session.add(AliasRow(model="smollm", alias="champion", adapter="v2", generation=1))
        session.get_one(RoutingRow, "smollm").body = "{"

    kit.choose(kit.exchange("a", adapter="v2"))

    assert selections(kit, "a") == ["chosen"]


@pytest.mark.both_stores
def test_a_day_of_a_nightly_run_gives_as_many_groups_as_the_run_takes(kit: Kit) -> None:
    """With the README's `cron` and no other setting, 64 groups were the most of a whole day."""
    nightly = Settings(learner=Learner(schedule="cron", cron="0 3 * * *"))
    most = rules_of(nightly).max_pending_groups
    kit.store(*(kit.exchange(f"e{n}", session_key=f"s{n}") for n in range(257)))

    new(kit, limit=257, max_pending_groups=most)

    assert most == nightly.learner.max_groups
    assert kit.counts("selection") == {"chosen": 256, "backlog": 1}


def test_the_newest_of_the_backlog_is_taken_up_when_there_is_room(kit: Kit) -> None:
    names = ("a", "b", "c", "d")
    group_ids = kit.choose(*(kit.exchange(name) for name in names), max_pending_groups=1)
    assert selections(kit, *names) == ["chosen", "backlog", "backlog", "backlog"]
    assert backlog(kit, max_pending_groups=1) == 0  # no room: nobody is looked at

    with kit.database.write() as session:
        set_aside(session, group_ids[0], "why")
    assert backlog(kit, max_pending_groups=1) == 1

    assert selections(kit, *names) == ["chosen", "backlog", "backlog", "chosen"]
    assert kit.counts("selection") == {"chosen": 2, "backlog": 2}


@pytest.mark.both_stores
def test_a_robot_holds_a_fifth_of_the_places_and_the_backlog_is_taken_up_fairly(kit: Kit) -> None:
    robots = [f"r{n}" for n in range(40)]
    users = [f"u{n}" for n in range(20)]
    kit.choose(*(kit.exchange(name, user="robot") for name in robots[:1]), max_pending_groups=20)
    many = [*(kit.exchange(name, user=name) for name in users)]
    many += [kit.exchange(name, user="robot") for name in robots[1:]]
    kit.choose(*many[::-1], max_pending_groups=20)

    while backlog(kit, max_pending_groups=20):
        pass

    assert selections(kit, *robots).count("chosen") == 4
    assert selections(kit, *users).count("chosen") == 16


def test_a_flood_at_night_takes_only_a_fifth(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills the newest exchanges, of all and of the backlog; the day's others asked before."""
    monkeypatch.setattr("ingest.intake.choose.LOOKED_AT", 50)
    people, robots = [f"u{n}" for n in range(60)], [f"r{n}" for n in range(200)]
    for number, name in enumerate((*people, *robots)):
        user = name if name in people else "robot"
        kit.store(kit.exchange(name, user=user), now=10.0 * number)
    with kit.database.write() as session:
        session.execute(update(ExchangeRow).values(selection="backlog"))
    rules = kit.rules(max_pending_groups=20)

    for look in range(10):
        choose_backlog(kit.database, rules, model="smollm", now=3_000.0 + 2.0 * look)

    assert selections(kit, *robots).count("chosen") == 4
    assert selections(kit, *people).count("chosen") == 16


def test_an_exchange_that_went_stale_in_the_backlog_leaves_it(kit: Kit) -> None:
    kit.choose(kit.exchange("a"), max_pending_groups=0)
    kit.route(champion="v2")

    backlog(kit)

    assert selections(kit, "a") == ["stale_adapter"]
    assert kit.counts("selection") == {"stale_adapter": 1}


def asked(kit: Kit, name: str, place: int = 0, **changes: Any) -> Any:
    """An exchange of turn "t", begun `place` seconds after the turn's first."""
    timings = Timings(started_at=1_000.0 + place)
    turn = {"turn_id": "t", "retry_count": place, "session_key": "m:s", "timings": timings}
    return kit.exchange(name, **(turn | changes))


def test_a_turn_that_was_asked_twice_has_one_group_of_its_last_answer(kit: Kit) -> None:
    kit.store(asked(kit, "first"), asked(kit, "second", 1))

    new(kit)

    assert selections(kit, "first", "second") == ["retried_turn", "chosen"]
    assert kit.counts("selection") == {"chosen": 1, "retried_turn": 1}


@pytest.mark.both_stores
def test_a_retry_takes_the_place_of_an_original_in_the_backlog(kit: Kit) -> None:
    kit.choose(asked(kit, "first"), max_pending_groups=0)
    assert kit.counts("selection") == {"backlog": 1}

    kit.choose(asked(kit, "second", 1), max_pending_groups=0)

    assert selections(kit, "first", "second") == ["retried_turn", "backlog"]
    assert kit.counts("selection") == {"backlog": 1, "retried_turn": 1}


@pytest.mark.both_stores
@pytest.mark.parametrize("other", [{"project": "p2"}, {"turn_id": ""}])
def test_a_turn_is_of_a_project_and_has_an_id(kit: Kit, other: dict[str, Any]) -> None:
    first = asked(kit, "first", **(other if "turn_id" in other else {}))

    kit.choose(first, asked(kit, "other", 1, **other))

    assert selections(kit, "first", "other") == ["chosen", "chosen"]


OUTCOMES = st.sampled_from(["ok", "failed", "untrainable", "surface"])


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_order_and_batches_in_which_a_turn_arrives_do_not_matter(kit: Kit, data: Any) -> None:
    """Whatever arrives first, and whether there is room: one group at most, and equal counts."""
    outcomes = data.draw(st.lists(OUTCOMES, min_size=1, max_size=4), label="outcomes")
    order = data.draw(st.permutations(range(len(outcomes))), label="order")
    cuts = data.draw(st.lists(st.booleans(), min_size=len(outcomes), max_size=len(outcomes)))
    rate = data.draw(st.sampled_from([0.0, 0.5, 1.0]), label="rate")
    room = data.draw(st.sampled_from([0, 64]), label="room")
    cap = data.draw(st.sampled_from([0, 4]), label="cap")
    of_outcome: dict[str, dict[str, Any]] = {
        "ok": {},
        "failed": {"outcome": "upstream_error"},
        "untrainable": {"untrainable_reason": "ids_missing"},
        "surface": {"surface": "completions"},
    }
    turn = [
        asked(kit, f"e{place}", place, **of_outcome[outcome])
        for place, outcome in enumerate(outcomes)
    ]
    rules = {"rate": rate, "max_pending_groups": room, "max_groups_per_session": cap}
    with kit.emptied():
        for place, cut in zip(order, cuts, strict=True):
            kit.store(turn[place])
            if cut:
                new(kit, **rules)
        new(kit, **rules)
        counts = kit.counts("selection")
        groups = kit.group_count()

    fit = outcomes.count("ok")
    one = "rate" if rate <= share_of("rate\x00t") else "session_cap" if cap == 0 else None
    one = one or ("backlog" if room == 0 else "chosen")
    expected = {
        "outcome": outcomes.count("failed"),
        "untrainable:ids_missing": outcomes.count("untrainable"),
        "surface": outcomes.count("surface"),
        one: min(fit, 1),
        "retried_turn": max(fit - 1, 0),
    }
    assert counts == {reason: number for reason, number in expected.items() if number}
    assert groups == (1 if fit and one == "chosen" else 0)
