"""Steps that are likely to show a spread are preferred; each has a propensity above 0."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from ingest.feedback.deriving import save_feedback
from ingest.feedback.signals import Signal
from ingest.feedback.store import save_signals
from ingest.grouping.features import (
    Features,
    features_of,
    load_choice,
    near_key,
    opening_key,
    surprisals,
)
from ingest.grouping.same_prompt import chance_of_spread, draw, propensity
from ingest.grouping.selection import group_id_of
from ingest.intake.choose import choose_new
from support.ingest_kit import Kit, make_choice, make_exchange, make_feedback

GOOD = Features(recorded=True, earlier=32, earlier_spread=30)
BAD = Features(recorded=True, earlier=32, earlier_spread=0)


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_features_are_worked_by_hand() -> None:
    choice = make_choice(logprobs=(-0.5, -0.25, -1.5), finish_reason="length")
    tools = [{"type": "function", "function": {"name": "look"}}]

    found = features_of(
        make_exchange(choices=(choice,)),
        {**said("hi"), "tools": tools},
        signals={"correction"},
        negative=True,
        earlier=(4, 3),
    )

    assert found == Features(
        surprisal=0.75,
        forks=1 / 3,
        recorded=True,
        cut=True,
        tokens=3,
        tool_choice=True,
        final_answer=True,
        corrected=True,
        negative=True,
        earlier=4,
        earlier_spread=3,
    )
    assert surprisals(()) == surprisals((-math.inf,)) == (0.0, 0.0)
    assert features_of(make_exchange(choices=()), {}) == Features()


@pytest.mark.parametrize("better", [GOOD, Features(corrected=True), Features(negative=True)])
def test_what_promises_a_spread_is_likelier_to_be_drawn(better: Features) -> None:
    worse = BAD if better is GOOD else Features()

    assert chance_of_spread(better) > chance_of_spread(worse)
    assert propensity(better, rate=0.5, uniform_share=0.1) >= propensity(
        worse, rate=0.5, uniform_share=0.1
    )


@pytest.mark.parametrize("decides", [Features(tool_choice=True), Features(final_answer=True)])
def test_a_first_tool_and_a_final_answer_are_preferred_to_steps_between(decides: Features) -> None:
    odds = [one / (1 - one) for one in map(chance_of_spread, (decides, Features()))]

    assert math.log(odds[0] / odds[1]) == pytest.approx(0.5)


def test_a_step_that_promises_nothing_keeps_the_uniform_share() -> None:
    assert 0.05 <= propensity(BAD, rate=0.5, uniform_share=0.1) < 0.06
    assert propensity(GOOD, rate=0.5, uniform_share=0.1) == 0.5


@pytest.mark.parametrize("features", [GOOD, BAD, Features()])
def test_steps_are_drawn_with_the_probability_that_is_stored(features: Features) -> None:
    draws = [
        draw(f"e{at}", features, choose="prefer", rate=0.8, uniform_share=0.25)
        for at in range(4_000)
    ]

    wanted = propensity(features, rate=0.8, uniform_share=0.25)
    assert {one.propensity for one in draws} == {wanted}
    drawn = sum(one.drawn for one in draws) / len(draws)
    assert drawn == pytest.approx(wanted, abs=4 * math.sqrt(wanted / len(draws)))


def test_near_identical_prompts_share_a_key_and_others_do_not() -> None:
    one = near_key("p", said("Order 4711 of 2026-01-02: where is it?"))

    assert near_key("p", said("order 12, of 2025-11-30 - where is it")) == one
    assert near_key("q", said("Order 4711 of 2026-01-02: where is it?")) != one
    assert near_key("p", said("Order 4711 of 2026-01-02: cancel it")) != one
    assert opening_key("p", {}) == opening_key("p", said("a"))


def test_a_prompt_has_a_cap_of_its_own(kit: Kit) -> None:
    def store(name: str, text: str, project: str = "p") -> None:
        kit.store(kit.exchange(name, request=said(text), project=project))

    for at in range(3):
        store(f"a{at}", f"Order {at}")
    store("other", "Something else")
    store("elsewhere", "Order 1", project="q")
    rules = kit.rules(max_groups_per_near_prompt=2)
    choose_new(kit.database, rules, model="smollm", limit=100, now=2.0)
    store("late", "Anything")
    choose_new(kit.database, rules, model="smollm", limit=100, now=3.0)
    store("after", "Anything at all")
    choose_new(kit.database, rules, model="smollm", limit=100, now=4.0 + rules.session_window_s)

    assert kit.counts("selection") == {"chosen": 6, "near_prompt_cap": 1}


@pytest.mark.both_stores
def test_reason_features_and_propensity_are_stored_with_the_group(kit: Kit) -> None:
    (group_id,) = kit.choose(kit.exchange("a"), choose="prefer", uniform_share=1.0)

    row = kit.row(group_id)
    assert row.propensity == 1.0
    because = load_choice(row.chosen_because)
    assert because is not None
    assert because["reason"] == "uniform_share"
    assert because["features"]["surprisal"] == pytest.approx(1.75 / 3, abs=1e-4)


def test_earlier_groups_of_an_opening_tell_of_the_next_one(kit: Kit) -> None:
    for at, (status, reason) in enumerate(
        [("trained", None), ("dropped", "no_spread"), ("set_aside", "identical_answers")]
    ):
        (group_id,) = kit.choose(kit.exchange(f"e{at}"))
        with kit.database.write() as session:
            row = session.merge(kit.row(group_id))
            row.status, row.reason = status, reason

    (group_id,) = kit.choose(kit.exchange("next"), choose="prefer", uniform_share=1.0)

    features = json.loads(kit.row(group_id).chosen_because or "")["features"]
    assert (features["earlier"], features["earlier_spread"]) == (3, 1)
    assert group_id == group_id_of("next")


@pytest.mark.both_stores
@pytest.mark.parametrize("shown", ["feedback", "session", "signal"])
def test_discontent_after_the_decision_draws_the_step_again(kit: Kit, shown: str) -> None:
    rules = kit.rules(choose="prefer", rate=0.5, uniform_share=0.1)
    served = make_choice(logprobs=(-0.1, -0.1, -0.1), finish_reason="length")
    likely, unlikely = luck_between(features_of(make_exchange(choices=(served,)), {}))
    for name in (likely, unlikely):
        kit.store(kit.exchange(name, choices=(served,)))

    def decide(now: float) -> dict[str, int]:
        choose_new(kit.database, rules, model="smollm", limit=100, now=now)
        return kit.counts("selection")

    assert decide(2.0) == {"rate": 2}

    with kit.database.write() as session:
        for name in (likely, unlikely):
            if shown == "signal":
                save_signals(session, [corrected(name)])
            else:
                kind = "exchange" if shown == "feedback" else "session"
                told = make_feedback(f"f-{name}", target=name, target_kind=kind, score=-1.0)
                save_feedback(session, [told], now=3.0)

    assert kit.counts("selection") == {}
    assert decide(4.0) == {"rate": 1, "chosen": 1}
    row = kit.row(group_id_of(likely))
    because = json.loads(row.chosen_because or "")["features"]
    assert because["corrected" if shown == "signal" else "negative"] is True


@pytest.mark.parametrize(
    ("kind", "negative"), [("session", [True, True]), ("exchange", [True, False])]
)
def test_negative_feedback_on_a_session_is_on_each_step(
    kit: Kit, kind: str, negative: list[bool]
) -> None:
    steps = [kit.exchange(name, session_key="m:s") for name in ("a", "b")]
    kit.store(*steps)
    with kit.database.write() as session:
        told = make_feedback("f", target="a", target_kind=kind, score=-0.5)
        save_feedback(session, [told], now=1.5)
    rules = kit.rules(choose="prefer", uniform_share=1.0)
    choose_new(kit.database, rules, model="smollm", limit=9, now=2.0)

    because = [kit.row(group_id_of(one.exchange_id)).chosen_because or "" for one in steps]
    assert [json.loads(one)["features"]["negative"] for one in because] == negative


@pytest.mark.parametrize("shown", ["praise", "retry", "twice", "chosen"])
def test_what_shows_no_new_discontent_draws_nothing_again(kit: Kit, shown: str) -> None:
    kit.store(kit.exchange("a"))
    rate = 1.0 if shown == "chosen" else 0.0
    choose_new(kit.database, kit.rules(rate=rate), model="smollm", limit=9, now=2.0)
    with kit.database.write() as session:
        if shown == "praise":
            save_feedback(session, [make_feedback("f", target="a", score=0.0)], now=3.0)
        elif shown == "retry":
            save_signals(session, [replace(corrected("a"), kind="retry")])
        else:
            save_signals(session, [corrected("a")])
    if shown == "twice":
        choose_new(kit.database, kit.rules(rate=0.0), model="smollm", limit=9, now=4.0)
        with kit.database.write() as session:
            save_signals(session, [replace(corrected("a"), at=1.0)])  # the same, seen earlier

    assert kit.counts("selection") == ({"chosen": 1} if shown == "chosen" else {"rate": 1})


def luck_between(features: Features) -> tuple[str, str]:
    """Two ids that are not drawn: the first one would be, had its user been discontent."""

    def drawn(name: str, one: Features) -> bool:
        return draw(name, one, choose="prefer", rate=0.5, uniform_share=0.1).drawn

    told = replace(features, corrected=True)
    names = [f"e{at}" for at in range(1_000)]
    left_out = [one for one in names if not drawn(one, features)]
    return (
        next(one for one in left_out if drawn(one, told)),
        next(one for one in left_out if not drawn(one, told)),
    )


def corrected(name: str) -> Signal:
    return Signal(
        kind="correction", exchange_id=name, by_id="b", session_id="s", at=2.5, evidence={}
    )
