"""Served answers and scored groups in the store, on both stores: looked at once, kept as sums."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import select, update

from ingest.retention.deletion import delete_exchanges
from ingest.reward_watch import store
from ingest.reward_watch.rules import Limits
from ingest.reward_watch.store import (
    BEHIND,
    INTERVAL_S,
    PAGE,
    REFRESH_S,
    AnswerWatch,
    Override,
    ask,
    current_profile,
    line_of,
    read_answers,
    read_override,
    refresh,
    stored_profile,
    write_override,
)
from ingest.reward_watch.traits import Profile, RateOf, write_body
from sidecar.settings import Watch
from sidecar.store.codec import pack_ids
from sidecar.store.database import Database, get_flag, set_flag
from sidecar.store.models import (
    AdapterProfileRow,
    AdapterRow,
    AliasRow,
    AnswerRow,
    CanaryRow,
    ChoiceRow,
    FeedbackRow,
    GroupRow,
    SignalRow,
    WatchedAnswerRow,
)
from support.ingest_kit import Kit

NOW = 10_000.0
MODEL = "smollm"
LIMITS = Limits(min_answers=50, min_groups=10)
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.fixture
def database(kit: Kit) -> Database:
    return kit.database


def served(kit: Kit, name: str, content: Any = "Paris.", **changes: Any) -> Any:
    message = json.dumps({"role": "assistant", "content": content, **changes.pop("message", {})})
    choice = kit.choice(message=message.encode(), finish_reason=changes.pop("finish", "stop"))
    fields = {"choices": (choice,), "session_key": f"h:{name}", "completion_tokens": 3, **changes}
    return kit.exchange(name, **fields)


def watched(database: Database) -> dict[str, set[str]]:
    kinds = ("refusal", "clarifying", "invalid_call", "repetition", "empty", "cut")
    with database.read() as session:
        rows = session.scalars(select(WatchedAnswerRow).order_by(WatchedAnswerRow.seq))
        return {row.exchange_id: {kind for kind in kinds if getattr(row, kind)} for row in rows}


def look(database: Database, window: int = 2_000) -> int:
    return read_answers(database, window=window, now=NOW)[0]


def profile(database: Database, adapter: str = "base", limits: Limits = LIMITS) -> Profile:
    with database.read() as session:
        return current_profile(session, MODEL, adapter, limits)


@pytest.mark.both_stores
def test_each_served_answer_is_looked_at_once(kit: Kit, database: Database) -> None:
    kit.store(
        served(kit, "fine"),
        served(kit, "refused", "I'm sorry, but I can't help with that."),
        served(kit, "asked", "Which city do you mean?"),
        served(kit, "nothing", "", finish="length"),
        served(kit, "loop", "and so on " * 200),
        served(kit, "valid", None, message={"tool_calls": [CALL]}, request={"tools": TOOLS}),
        served(kit, "invalid", None, message={"tool_calls": [CALL]}, request={"tools": []}),
    )

    assert look(database) == 7
    assert look(database) == 0

    assert watched(database) == {
        "fine": set(),
        "refused": {"refusal"},
        "asked": {"clarifying"},
        "nothing": {"empty", "cut"},
        "loop": {"repetition"},
        "valid": set(),
        "invalid": {"invalid_call"},
    }


def test_only_whole_chat_answers_count(kit: Kit, database: Database) -> None:
    kit.store(
        served(kit, "failed", status=500),
        served(kit, "left", outcome="cut"),
        served(kit, "other", surface="completions"),
        kit.exchange("none", choices=()),
    )

    assert look(database) == 4
    assert watched(database) == {}


def test_the_answer_that_the_user_got_counts(kit: Kit, database: Database) -> None:
    kit.store(
        kit.exchange(
            "best",
            choices=(kit.choice("Which one?"), kit.choice("Paris.", index=1)),
            returned_index=1,
        )
    )

    look(database)

    assert watched(database) == {"best": set()}


def test_what_was_just_stored_waits(kit: Kit, database: Database) -> None:
    kit.store(served(kit, "a"))

    assert read_answers(database, window=10, now=3.0)[0] == 0
    assert read_answers(database, window=10, now=7.0)[0] == 1


@pytest.mark.both_stores
def test_of_each_adapter_the_newest_answers_are_kept(kit: Kit, database: Database) -> None:
    kit.store(*(served(kit, f"a{n}") for n in range(5)))
    kit.store(*(served(kit, f"b{n}", adapter="v1") for n in range(2)))

    look(database, window=3)

    assert list(watched(database)) == ["a2", "a3", "a4", "b0", "b1"]


def test_far_behind_it_goes_to_the_newest_and_counts_the_others(
    kit: Kit, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BEHIND == 8 * PAGE
    monkeypatch.setattr(store, "PAGE", 5)
    monkeypatch.setattr(store, "BEHIND", 40)
    number = 41
    kit.store(*(served(kit, f"e{n:05d}") for n in range(number)))

    assert look(database) == 5

    assert min(watched(database)) == "e00036"
    assert kit.counts("watch") == {"skipped": 36}


def test_an_answer_that_cannot_be_read_costs_itself(kit: Kit, database: Database) -> None:
    kit.store(served(kit, "a"), served(kit, "b"))
    with database.write() as session:
        session.execute(
            update(ChoiceRow).where(ChoiceRow.exchange_id == "a").values(message_body=b"?")
        )

    look(database)

    assert list(watched(database)) == ["b"]
    assert kit.counts("watch") == {"unreadable": 1}


def test_what_is_deleted_is_watched_no_more(kit: Kit, database: Database) -> None:
    kit.store(served(kit, "a"), served(kit, "b"))
    look(database)

    delete_exchanges(database, ["a"], why="forgotten", now=NOW)

    assert list(watched(database)) == ["b"]


def test_the_pass_renews_the_sums_of_those_who_answered(kit: Kit, database: Database) -> None:
    watch = AnswerWatch(database, limits=LIMITS)
    kit.store(served(kit, "a", adapter="v1"))

    assert watch.step(NOW) == 1
    assert watch.step(NOW + 0.1) == 0  # it is not time
    with database.read() as session:
        first = stored_profile(session, MODEL, "v1")
    kit.store(served(kit, "b", adapter="v1"))
    watch.step(NOW + INTERVAL_S)
    with database.read() as session:
        second = stored_profile(session, MODEL, "v1")
    watch.step(NOW + REFRESH_S + 2 * INTERVAL_S)
    with database.read() as session:
        third = stored_profile(session, MODEL, "v1")

    assert [one and one.answers for one in (first, second, third)] == [1, 1, 2]


def fill(kit: Kit, database: Database, number: int = 60, adapter: str = "base") -> None:
    """Store answers, two a session, every tenth of them empty."""
    kit.store(
        *(
            served(
                kit,
                f"{adapter}-{n:03d}",
                "" if n % 10 == 0 else "Paris.",
                adapter=adapter,
                session_key=f"h:{adapter}-{n // 2}",
                completion_tokens=9,
            )
            for n in range(number)
        )
    )
    look(database)


def test_a_profile_sums_up_by_sessions(kit: Kit, database: Database) -> None:
    fill(kit, database)

    found = profile(database)

    assert (found.answers, found.sessions) == (60, 30)
    assert (found.rates["empty"].sessions, found.rates["empty"].hits) == (30, 6)
    assert (found.rates["empty"].n, found.rates["empty"].hits) == (60, 6)
    refused = found.rates["refusal"]
    assert (refused.n, refused.hits) == (60, 0)
    assert refused.weight == pytest.approx(60 / 1.2)
    assert found.log_tokens is not None
    assert found.log_tokens.mean == pytest.approx(2.302585, abs=1e-5)  # ln(1 + 9)


@pytest.mark.both_stores
def test_signals_and_feedback_are_those_of_its_answers(kit: Kit, database: Database) -> None:
    fill(kit, database)
    fill(kit, database, 4, adapter="v1")

    def told(name: str, score: float | None, at: float, **changes: Any) -> FeedbackRow:
        values = {"exchange_id": name, "target_kind": "exchange", "source": "u", **changes}
        return FeedbackRow(
            feedback_id=f"{name}-{at}",
            kind="feedback",
            target=name,
            project="default",
            key_id="",
            received_at=at,
            stored_at=at,
            score=score,
            label="",
            comment="",
            **values,
        )

    with database.write() as session:
        for name, kind in (
            ("base-001", "correction"),
            ("base-001", "retry"),
            ("base-004", "regeneration"),
            ("base-005", "tool_error"),
            ("v1-001", "correction"),
        ):
            session.add(
                SignalRow(exchange_id=name, kind=kind, session_id="h:s", at=1.0, evidence={})
            )
        session.add_all(
            [
                told("base-001", 1.0, 1.0),
                told("base-001", -1.0, 2.0),  # of the same source: the newest counts
                told("base-002", 1.0, 3.0),
                told("base-003", None, 4.0),
                told("base-006", 1.0, 5.0, target_kind="session"),
                told("v1-001", -1.0, 6.0),
            ]
        )

    found = profile(database)

    assert found.signals is not None
    assert (found.signals.n, found.signals.hits) == (60, 2)
    assert found.feedback is not None
    assert (found.feedback.n, found.feedback.mean, found.feedback.sessions) == (2, 0.0, 2)


def put_groups(kit: Kit, database: Database, number: int, *, slope: float) -> None:
    """Store scored groups of four answers of 10 to 80 tokens; slope: of score in log length."""
    kit.store(*(served(kit, f"g{n:03d}") for n in range(number)))
    with database.write() as session:
        for n in range(number):
            session.add(
                GroupRow(
                    group_id=f"g-{n:03d}",
                    exchange_id=f"g{n:03d}",
                    session_key="h:s",
                    adapter="base",
                    status="scored",
                    created_at=1.0,
                    scored_at=float(n),
                )
            )
            session.flush()
            for index in range(4):
                noise = 0.1 * ((n * 7 + index * 3) % 5 - 2)
                session.add(
                    AnswerRow(
                        group_id=f"g-{n:03d}",
                        index=index,
                        origin="sampled",
                        message_body=b"",
                        token_ids=pack_ids(range(10 * 2**index)),
                        logprobs=b"",
                        temperature=1.0,
                        score=0.5 + slope * (index - 1.5) + noise,
                    )
                )


@pytest.mark.both_stores
def test_the_correlation_is_that_of_scores_and_token_counts(kit: Kit, database: Database) -> None:
    put_groups(kit, database, 40, slope=0.1)

    found = profile(database)

    assert found.groups == 40
    assert found.correlation is not None
    assert 0.4 < found.correlation < 0.8
    assert 0.0 < found.correlation_error < 0.2
    assert profile(database, "v1").correlation is None


def test_where_verifiers_changed_the_reward_it_is_what_counts(kit: Kit, database: Database) -> None:
    put_groups(kit, database, 40, slope=0.1)
    with database.write() as session:
        session.execute(update(AnswerRow).values(reward=1.0 - AnswerRow.score))

    found = profile(database)

    assert found.correlation is not None
    assert found.correlation < -0.4


def test_sums_stay_when_the_answers_go(kit: Kit, database: Database) -> None:
    fill(kit, database)
    with database.write() as session:
        before = refresh(session, MODEL, "base", LIMITS, now=NOW)
    gone = [f"base-{n:03d}" for n in range(55)]
    delete_exchanges(database, gone, why="expired", now=NOW)

    assert profile(database) == before

    kit.store(served(kit, "newer"))
    look(database)
    assert profile(database).answers == 6  # it answers again: what is newest counts


def test_a_damaged_profile_is_made_anew_from_the_answers(kit: Kit, database: Database) -> None:
    fill(kit, database)
    with database.write() as session:
        session.add(AdapterProfileRow(model=MODEL, adapter="base", at=1.0, body="[]"))

    found = profile(database)

    assert found.answers == 60


def put_line(database: Database, *versions: str, gate: Any = None) -> None:
    """Register a chain of versions from the base; the last one is champion."""
    with database.write() as session:
        for number, name in enumerate(versions, start=1):
            session.add(
                AdapterRow(
                    name=name,
                    model=MODEL,
                    version=number,
                    digest=f"{number:064x}",
                    path="/p",
                    parent=versions[number - 2] if number > 1 else "base",
                    state="retired",
                    created_at=1.0,
                )
            )
            session.add(
                CanaryRow(
                    canary_id=f"c-{name}",
                    model=MODEL,
                    candidate=name,
                    champion="base",
                    state="promoted",
                    salt="",
                    created_at=1.0,
                    step_started_at=1.0,
                    evidence={"gate": gate} if gate is not None else {},
                )
            )
        session.merge(AliasRow(model=MODEL, alias="champion", adapter=versions[-1], generation=1))


GATE = {"mean_difference": 0.05, "low": 0.03, "high": 0.07, "scored": 60}


def test_the_line_goes_back_so_many_promotions(database: Database) -> None:
    put_line(database, "v1", "v2", "v3", "v4", gate=GATE)

    with database.read() as session:
        line = line_of(session, MODEL, LIMITS)

    assert (line.champion, line.parent, line.earlier) == ("v4", "v3", "v1")
    assert [one.mean for one in line.gains] == [0.05] * 3
    assert line.gains[0].error == pytest.approx(0.04 / 3.92, rel=1e-3)
    assert set(line.profiles) == {"v4", "v3", "v1", "base"}


@pytest.mark.parametrize(
    "gate",
    [None, {"mean_difference": "x", "low": 0, "high": 1}, {**GATE, "low": 0.9}],
)
def test_a_gain_that_is_not_known_leaves_out_the_sum(database: Database, gate: Any) -> None:
    put_line(database, "v1", "v2", gate=gate)

    with database.read() as session:
        assert line_of(session, MODEL, LIMITS).gains == ()


def test_a_store_without_a_champion_is_not_held(database: Database) -> None:
    with database.read() as session:
        answer = ask(session, MODEL, Watch(), LIMITS)

    assert (answer.verdict.champion, answer.holding) == ("base", ())


def put_profiles(database: Database, **shares: float) -> None:
    for adapter, share in shares.items():
        rates = {
            "refusal": RateOf(n=1_000, hits=round(1_000 * share), weight=1_000.0, sessions=1_000)
        }
        body = write_body(Profile(answers=1_000, sessions=1_000, newest=9, rates=rates))  # type: ignore[arg-type]
        with database.write() as session:
            session.merge(AdapterProfileRow(model=MODEL, adapter=adapter, at=1.0, body=body))


def test_an_override_waives_its_checks_for_its_champion_alone(database: Database) -> None:
    put_line(database, "v1", "v2")
    put_profiles(database, base=0.02, v1=0.02, v2=0.2)

    def holding(hold: bool = True) -> list[str]:
        with database.read() as session:
            answer = ask(session, MODEL, Watch(hold=hold), LIMITS)
        assert [one.check for one in answer.verdict.findings] == ["refusal"]
        return [one.check for one in answer.holding]

    def override(champion: str, *checks: str) -> None:
        with database.write() as session:
            write_override(session, MODEL, Override(champion=champion, checks=checks, at=NOW))

    assert holding() == ["refusal"]
    assert holding(hold=False) == [], "shown, and not held"
    override("v1", "refusal")
    assert holding() == ["refusal"]
    override("v2", "length")
    assert holding() == ["refusal"]
    override("v2", "refusal")
    assert holding() == []


@pytest.mark.parametrize("text", ["{", '{"champion": "v2"}'])
def test_a_damaged_override_waives_nothing(database: Database, text: str) -> None:
    with database.write() as session:
        set_flag(session, "watch_override", text, now=1.0)
        assert get_flag(session, "watch_override") == text

    with database.read() as session:
        assert read_override(session, MODEL) is None
