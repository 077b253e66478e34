"""The lease of a run, and the groups it claims and gives back."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, text, update
from structlog.testing import capture_logs

from learner.errors import RunInProgressError, RunStoppedError
from learner.resume import present_holder
from learner.runs import source
from learner.runs.runs import LEASE_S, Heartbeat, abandon, end_run, open_run, report_place
from learner.runs.selection import select_groups
from learner.runs.source import (
    claim,
    count_fresh,
    drop,
    give_back,
    load,
    mark_trained,
    waiting_groups,
)
from sidecar.lines import Line
from sidecar.store.codec import pack_ids
from sidecar.store.database import Database
from sidecar.store.models import AnswerRow, ExchangeRow, GroupRow, RunRow
from support.clock import Clock
from tests.learner.conftest import PutGroup, PutVersion, counters, make_scored_group


def statuses(database: Database) -> dict[str, str]:
    with database.read() as session:
        return {row.group_id: row.status for row in session.scalars(select(GroupRow))}


def begin(database: Database, run_id: str, now: float, model: str = "m") -> None:
    with database.write() as session:
        open_run(session, run_id=run_id, model=model, parent="base", settings={}, now=now)


@pytest.mark.parametrize("value", ["9e999", "-9e999", "132.0"])
def test_a_run_whose_heartbeat_is_damaged_keeps_no_other_out(
    database: Database, value: str
) -> None:
    begin(database, "one", now=100.0)
    with database.write() as session:
        session.execute(text(f"UPDATE training_run SET heartbeat_at = {value}"))

    begin(database, "two", now=101.0)

    with database.read() as session:
        assert session.get_one(RunRow, "one").status == "failed"


def test_a_heartbeat_by_a_clock_that_is_a_little_ahead_keeps_the_lease(database: Database) -> None:
    begin(database, "one", now=100.0)
    with database.write() as session:
        session.execute(text("UPDATE training_run SET heartbeat_at = 131.0"))

    with pytest.raises(RunInProgressError):
        begin(database, "two", now=101.0)


@pytest.mark.both_stores
def test_only_the_process_that_holds_a_run_says_where_it_is(database: Database) -> None:
    holder = present_holder()
    with database.write() as session:
        open_run(
            session,
            run_id="one",
            model="m",
            parent="base",
            settings={},
            now=1.0,
            holder=holder,
        )

    report_place(database, "one", "a", token=holder.token)
    report_place(database, "one", "b", token="another")
    with database.read() as session:
        assert session.get_one(RunRow, "one").place == "a"

    with database.write() as session:
        end_run(session, "one", "finished", now=2.0)
    report_place(database, "one", "c", token=holder.token)
    with database.read() as session:
        assert session.get_one(RunRow, "one").place == "a"


@pytest.mark.both_stores
def test_two_runs_of_one_model_never_overlap(database: Database) -> None:
    begin(database, "one", now=100.0)

    with pytest.raises(RunInProgressError) as caught:
        begin(database, "two", now=100.0 + LEASE_S - 1)

    assert (caught.value.run_id, caught.value.heartbeat_at) == ("one", 100.0)
    begin(database, "other", now=101.0, model="n")


@pytest.mark.both_stores
def test_a_dead_run_gives_its_groups_to_the_next(database: Database, put_group: PutGroup) -> None:
    put_group(make_scored_group([0.0, 1.0], group_id="a"))
    begin(database, "dead", now=100.0)
    with database.write() as session:
        claim(session, "dead", ["a"])

    begin(database, "next", now=100.0 + LEASE_S)

    with database.read() as session:
        dead = session.get_one(RunRow, "dead")
        assert (dead.status, dead.reason) == ("failed", "it died: its heartbeat stood still")
        assert session.get_one(RunRow, "next").status == "running"
        assert session.scalar(select(GroupRow.run_id)) is None
    assert statuses(database) == {"a": "scored"}


@pytest.mark.both_stores
def test_an_end_is_final(database: Database) -> None:
    begin(database, "one", now=1.0)
    with database.write() as session:
        assert abandon(session, "one", "killed", now=2.0)
        assert not abandon(session, "one", "again", now=3.0)

    with database.write() as session, pytest.raises(RunStoppedError, match="lost its lease"):
        end_run(session, "one", "finished", now=4.0)

    with database.read() as session:
        row = session.get_one(RunRow, "one")
        assert (row.status, row.reason, row.ended_at) == ("failed", "killed", 2.0)


@pytest.mark.both_stores
def test_the_heartbeat_keeps_the_lease_and_notices_its_loss(
    database: Database, clock: Clock
) -> None:
    begin(database, "one", now=clock.now)
    clock.now += 500

    with Heartbeat(database, "one", clock=clock, period_s=0.005) as heartbeat:
        wait_until(lambda: heartbeat_of(database, "one") == clock.now)
        assert not heartbeat.lost.is_set()
        with database.write() as session:
            abandon(session, "one", "taken over", now=clock.now)
        assert heartbeat.lost.wait(5)


def heartbeat_of(database: Database, run_id: str) -> float:
    with database.read() as session:
        return session.get_one(RunRow, run_id).heartbeat_at


def wait_until(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if true():
            return
        pause.wait(0.005)
    raise AssertionError("it never came true")


@pytest.mark.both_stores
def test_groups_wait_newest_first_and_old_ones_are_stale(
    database: Database, put_group: PutGroup, put_version: PutVersion
) -> None:
    first = put_version(1)
    second = put_version(2, first)
    third = put_version(3, second, champion=True)
    for group_id, adapter in [
        ("old", "base"),
        ("one", first),
        ("ghost", "m--v9-gone"),
        ("two", second),
        ("new", third),
    ]:
        put_group(make_scored_group([0.0, 1.0], group_id=group_id, adapter=adapter))

    with database.read() as session:
        waiting = waiting_groups(session, line=Line(name="m"), parent=third, max_age=2)
        fresh = count_fresh(session, line=Line(name="m"), parent=third, max_age=2)

    assert waiting.fresh == ("new", "two", "one")
    assert waiting.stale == {"old": "stale", "ghost": "unknown_adapter"}
    assert fresh == 3


@pytest.mark.both_stores
def test_of_many_waiting_groups_the_newest_are_looked_at(
    database: Database, put_group: PutGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked every few seconds, and groups of best-of-N answers wait without a limit."""
    monkeypatch.setattr(source, "LOOKED_AT", 2)
    for group_id in ("a", "b", "c"):
        put_group(make_scored_group([0.0, 1.0], group_id=group_id))

    with database.read() as session:
        assert count_fresh(session, line=Line(name="m"), parent="base", max_age=2) == 2


@pytest.mark.both_stores
def test_a_group_goes_its_way_once(database: Database, put_group: PutGroup) -> None:
    for group_id in ("a", "b", "c", "d"):
        put_group(make_scored_group([0.0, 1.0], group_id=group_id))

    with database.write() as session:
        session.execute(update(GroupRow).values(detail="an earlier run failed"))
        claim(session, "r", ["a", "b", "c"])
        mark_trained(session, ["a"])
        drop(session, "r", {"b": "no_spread"}, before="claimed", texts={"b": "x" * 501})
        mark_trained(session, ["b", "d"])  # not claimed any more, and never claimed
        assert give_back(session, "r") == 1

    assert statuses(database) == {"a": "trained", "b": "dropped", "c": "scored", "d": "scored"}
    assert counters(database) == {"trained": 1, "no_spread": 1}
    with database.read() as session:
        trained, dropped = session.scalars(select(GroupRow).order_by(GroupRow.seq).limit(2)).all()
        assert trained.detail is None
        assert (dropped.reason, dropped.run_id) == ("no_spread", "r")
        assert dropped.detail == "x" * 500


@pytest.mark.both_stores
def test_a_claimed_group_is_read_back_as_it_was_scored(
    database: Database, put_group: PutGroup
) -> None:
    original = make_scored_group([0.25, 1.0])
    put_group(original)

    with database.read() as session:
        groups, broken = load(session, ["g", "nowhere"], pack_tokens=100)

    assert groups == [original]
    assert {group_id: fault.reason for group_id, fault in broken.items()} == {
        "nowhere": "no_scores"
    }


BROKEN: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "request": (ExchangeRow, {"request_body": b"\x00" * 9}, "unreadable"),
    "prompt": (ExchangeRow, {"prompt_token_ids": pack_ids([1] * 300_000)}, "too_long"),
    "ids": (AnswerRow, {"token_ids": b"\x01\x02\x03"}, "unreadable"),
    "answers": (AnswerRow, {"token_ids": bytes(4 * 600_000)}, "too_long"),
    "scores": (AnswerRow, {"score": None}, "no_scores"),
}


def test_a_damaged_group_is_told_by_its_reason(database: Database, put_group: PutGroup) -> None:
    for kind, (table, values, _) in BROKEN.items():
        put_group(make_scored_group([1.0, 0.0], group_id=kind))
        mine = table.exchange_id == f"x-{kind}" if table is ExchangeRow else table.group_id == kind
        with database.write() as session:
            session.execute(update(table).where(mine).values(**values))

    with database.read() as session:
        groups, broken = load(session, list(BROKEN), pack_tokens=100)

    assert groups == []
    assert {one: fault.reason for one, fault in broken.items()} == {
        kind: reason for kind, (_, _, reason) in BROKEN.items()
    }


RULE = json.dumps({"verifiers": [], "combine": "weights", "judge_weight": 1.0})
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"token_ids": b"\x01\x02\x03"}, "unreadable"),
    "message": ({"message_body": b"{}"}, "unreadable"),
    "origin": ({"origin": "heaven"}, "unreadable"),
    "checks": ({"checks": "{"}, "unreadable"),
    "reward": ({"reward": None}, "unreadable"),
    "independent reward": ({"independent_reward": None}, "unreadable"),
    "log-probabilities": ({"logprobs": b"\x00" * 7}, "tokens_without_logprobs"),
    "no score": ({"score": None}, "non_finite_score"),
    "infinite score": ({"score": math.inf}, "non_finite_score"),
    "score": ({"score": 1.5, "reward": 1.5}, "score_out_of_range"),
}


@pytest.mark.parametrize("verified", [False, True])
def test_a_damaged_answer_costs_itself_alone(
    verified: bool, database: Database, put_group: PutGroup
) -> None:
    verifiers = {"checks", "reward", "independent reward"}
    kinds = [kind for kind in DAMAGED if verified or kind not in verifiers]
    for kind in kinds:
        put_group(make_scored_group([1.0, 0.0, 0.5], group_id=kind))
    with database.write() as session:
        if verified:
            rewards = {"reward": AnswerRow.score, "independent_reward": 0.5, "checks": "[]"}
            session.execute(update(AnswerRow).values(**rewards))
            session.execute(update(GroupRow).values(reward_rule=RULE))
        for kind in kinds:
            bad = (AnswerRow.group_id == kind, AnswerRow.index == 2)
            session.execute(update(AnswerRow).where(*bad).values(**DAMAGED[kind][0]))

    with database.read() as session, capture_logs() as logs:
        groups, broken = load(session, kinds, pack_tokens=100)
    selection = select_groups(groups, pack_tokens=100)

    assert (broken, selection.dropped) == ({}, {})
    assert selection.masked_answers == Counter(DAMAGED[kind][1] for kind in kinds)
    for group in selection.groups:
        assert [row.trainable for row in group.rows] == [True, True, False]
        assert [row.advantage for row in group.rows] == [0.5, -0.5, 0.0]
        assert group.scores == (1.0, 0.0, 0.5)
    unreadable = [kind for kind in kinds if DAMAGED[kind][1] == "unreadable"]
    assert [(line["group_id"], line["index"]) for line in logs] == [(k, 2) for k in unreadable]
