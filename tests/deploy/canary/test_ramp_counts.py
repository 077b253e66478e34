"""What counts for and against each arm of a ramp: turns, retries, adapters that were missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deploy.canary import live_turns
from deploy.canary.controller import count_conversations
from deploy.canary.gate_store import held_out_prompts, live_prompts
from deploy.canary.live_turns import LiveTurns, asks_for_one, count_ramp
from deploy.doctor.collect import read_recent
from deploy.records import Canary
from deploy.registry.canary_rule import BREAKER_FAILURES, ArmCounts, RampEvidence
from deploy.registry.candidates import sessions_a_day
from ingest.intake.choose import recent_demand
from sidecar.lines import Line
from sidecar.relay.best_of import BestOfPlan, plan_best_of
from sidecar.relay.peek import peek_request
from sidecar.store.database import compress, count
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.adapter_endpoints import MODEL
from support.made_canary import made_canary
from tests.deploy.conftest import World

CANARY = "m--v1-aaaa"
CHAMPION = "m--v0-bbbb"
FAILED: dict[str, Any] = {"outcome": "upstream_error", "status": 502, "content": None}


def ramping(champion: str = "base") -> Canary:
    return made_canary(
        candidate=CANARY,
        champion=champion,
        steps=(2_000,),
        created_at=900.0,
        step_started_at=1_000.0,
    )


def counted(world: World, champion: str = "base", step_min_exchanges: int = 3) -> RampEvidence:
    with world.database.read() as session:
        return count_ramp(
            session, ramping(champion), line=world.line, step_min_exchanges=step_min_exchanges
        )


def canary(world: World, **reply: Any) -> None:
    world.serve("s", adapter=CANARY, arm="canary", **reply)


def fallback(world: World, **reply: Any) -> None:
    """vLLM did not know the canary: the champion answered, and well."""
    world.serve("s", adapter="base", arm="champion", fallback_from=CANARY, **reply)


@pytest.mark.both_stores
def test_a_turn_and_its_retries_count_once(world: World) -> None:
    for _ in range(3):
        canary(world, turn_id="t1")
    canary(world, turn_id="t2")
    for _ in range(2):
        canary(world)  # without a turn id: a turn each

    assert counted(world).candidate == ArmCounts(replies=4, errors=0, short=0)


def test_a_turn_failed_when_any_of_its_requests_did_and_only_once(world: World) -> None:
    canary(world, turn_id="t1", outcome="upstream_error", status=502, content=None)
    canary(world, turn_id="t1", outcome="upstream_error", status=502, content=None)
    canary(world, turn_id="t1")

    assert counted(world).candidate == ArmCounts(replies=1, errors=1, short=0)


@pytest.mark.both_stores
def test_of_a_turn_that_was_answered_twice_the_newer_answer_counts(world: World) -> None:
    canary(world, turn_id="t1", finish_reason="length")
    canary(world, turn_id="t1")
    canary(world, turn_id="t2")
    canary(world, turn_id="t2", finish_reason="length")

    assert counted(world).candidate == ArmCounts(replies=2, errors=0, short=1)


def canary_choices(
    world: World,
    *finish_reasons: str,
    returned_index: int = 0,
    surface: str = "chat",
    **request: Any,
) -> None:
    """One reply of the canary with several choices, to a request with these fields."""
    exchange_id = world.serve(
        "s", adapter=CANARY, arm="canary", surface=surface, finish_reason=finish_reasons[0]
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **request}
    with world.database.write() as session:
        row = session.query(ExchangeRow).filter_by(exchange_id=exchange_id).one()
        row.request_body = compress(json.dumps(body).encode())
        row.returned_index = returned_index
        for index, finish_reason in enumerate(finish_reasons[1:], start=1):
            session.add(
                ChoiceRow(
                    exchange_id=exchange_id,
                    index=index,
                    message_body=compress(b'{"role":"assistant","content":"An answer."}'),
                    finish_reason=finish_reason,
                    token_ids=b"",
                    logprobs=b"",
                )
            )


ASKED: dict[str, Any] = {"n": 2}
PROMPTS: dict[str, Any] = {"surface": "completions", "prompt": ["a", "b"]}


@pytest.mark.parametrize(
    ("finish_reasons", "request_", "short"),
    [
        (("length", "stop", "length"), {"returned_index": 1}, 0),
        (("stop", "length", "stop"), {"returned_index": 1}, 1),
        (("stop", "length"), {}, 0),  # the judge chose the first one, or nobody chose
        (("length", "stop"), {}, 1),
        (("stop", "stop"), ASKED, 0),
        (("stop", "length"), ASKED, 1),
        (("length", "length"), ASKED, 1),
        (("stop", "length"), PROMPTS, 1),
    ],
)
def test_of_best_of_n_the_returned_answer_counts_and_of_choices_asked_for_all(
    world: World, finish_reasons: Sequence[str], request_: dict[str, Any], short: int
) -> None:
    canary_choices(world, *finish_reasons, **request_)

    assert counted(world).candidate == ArmCounts(replies=1, errors=0, short=short)


@pytest.mark.both_stores
def test_best_of_n_and_ordinary_replies_are_told_apart_side_by_side(world: World) -> None:
    canary_choices(world, "length", "stop", returned_index=1)
    canary_choices(world, "length", "stop", n=2)
    canary(world, finish_reason="length")
    canary(world)

    assert counted(world).candidate == ArmCounts(replies=4, errors=0, short=2)


@pytest.mark.parametrize(
    "n", ["null", "1", "1.0", "0", "2", "2.0", "true", '"1"', '"2"', "[1]", "NaN"]
)
def test_who_asks_for_one_answer_is_whom_the_relay_may_give_the_best_of_n(n: str) -> None:
    request = b'{"model":"m","messages":[],"n":%s}' % n.encode()

    plan = plan_best_of(peek_request(request), 3, captured=True)

    assert asks_for_one(request) == isinstance(plan, BestOfPlan)


def test_who_stands_in_for_a_missing_canary_leaves_the_failure_with_it(world: World) -> None:
    canary(world)
    fallback(world)
    fallback(world, outcome="cut")  # that the client left later does not mend it
    world.serve("s")

    evidence = counted(world, step_min_exchanges=1)

    assert evidence.candidate == ArmCounts(replies=3, errors=2, short=0)
    assert evidence.champion == ArmCounts(replies=1, errors=0, short=0)
    assert evidence.missing_in_a_row == 2


def test_a_champion_that_is_missing_fails_as_a_canary_does(world: World) -> None:
    world.serve("s", adapter=CHAMPION)
    world.serve("s", adapter="base", fallback_from=CHAMPION)

    evidence = counted(world, CHAMPION, step_min_exchanges=1)

    assert evidence.champion == ArmCounts(replies=2, errors=1, short=0)


@pytest.mark.both_stores
def test_one_good_reply_ends_the_row_of_missing_ones(world: World) -> None:
    for _ in range(4):
        fallback(world)
    canary(world)

    assert counted(world).missing_in_a_row == 0


def test_a_missing_canary_of_an_earlier_step_is_forgotten(world: World) -> None:
    fallback(world)
    world.clock.now += 10.0
    with world.database.read() as session:
        later = replace(ramping(), step_started_at=1_005.0)
        evidence = count_ramp(session, later, line=world.line, step_min_exchanges=3)

    assert evidence.candidate == ArmCounts(replies=0, errors=0, short=0)
    assert evidence.missing_in_a_row == 0


@pytest.mark.both_stores
def test_too_few_turns_of_the_champion_are_accompanied_by_earlier_turns(world: World) -> None:
    world.clock.now = 500.0
    for number in range(4):
        for _ in range(2):
            world.serve("s", turn_id=f"old{number}", finish_reason="length")
    world.clock.now = 1_000.0
    for _ in range(3):
        world.serve("s", turn_id="now")

    evidence = counted(world)

    assert evidence.champion == ArmCounts(replies=1, errors=0, short=0)
    assert evidence.champion_before == ArmCounts(replies=2, errors=0, short=2)


def test_a_turn_that_the_client_left_counts_as_cut(world: World) -> None:
    canary(world, turn_id="t1", outcome="cut", status=0, content=None)
    canary(world, turn_id="t1")  # the client's retry is answered: one turn, cut once
    canary(world, outcome="cut", status=200, content=None)
    canary(world)
    world.serve("s", outcome="cut", status=0, content=None)

    evidence = counted(world, step_min_exchanges=1)

    assert evidence.candidate == ArmCounts(replies=3, errors=0, short=0, cuts=2)
    assert evidence.champion == ArmCounts(replies=1, errors=0, short=0, cuts=1)


def test_a_request_that_failed_on_both_arms_is_a_failure_of_the_canary(world: World) -> None:
    """In an outage the champion's turns count as failures too."""
    fallback(world, outcome="upstream_error", status=503, content=None)
    canary(world)

    assert counted(world).candidate == ArmCounts(replies=2, errors=1, short=0)


def test_both_arms_are_counted_over_the_same_span_of_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The champion answers four times as much, so its window reaches back less far: what the
    canary did before that (an outage of both) is not held against it."""
    monkeypatch.setattr("deploy.canary.live_turns.WINDOW", 8)
    monkeypatch.setattr("deploy.canary.live_turns.CHAMPION_WINDOW", 8)
    for second in range(4):
        world.clock.now = 1_000.0 + second
        outage = FAILED if second == 1 else {}
        for _ in range(4):
            world.serve("s", **outage)
        canary(world, **outage)
        canary(world, **outage)

    evidence = counted(world, step_min_exchanges=2)

    assert evidence.champion == ArmCounts(replies=8, errors=0, short=0)
    assert evidence.candidate == ArmCounts(replies=4, errors=0, short=0)
    assert evidence.seen == 8


def test_a_long_request_that_ends_last_stretches_no_span(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of both arms is older than what both windows hold. One request of the champion
    began before it."""
    monkeypatch.setattr("deploy.canary.live_turns.WINDOW", 4)
    monkeypatch.setattr("deploy.canary.live_turns.CHAMPION_WINDOW", 4)
    for _ in range(3):
        canary(world, **FAILED)
        world.serve("s", **FAILED)
    world.clock.now = 1_100.0
    for _ in range(3):
        world.serve("s")
    canary(world)
    world.clock.now = 1_001.0
    world.serve("s")

    evidence = counted(world, step_min_exchanges=1)

    assert evidence.champion == ArmCounts(replies=4, errors=0, short=0)
    assert evidence.candidate == ArmCounts(replies=1, errors=0, short=0)


def test_texts_of_both_arms_are_read_in_the_same_span(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The champion answers four times as much. Both were cut short at first, and are not now."""
    monkeypatch.setattr("deploy.canary.live_turns.WINDOW", 8)
    for number in range(8):
        finish = "length" if number < 5 else "stop"
        canary(world, finish_reason=finish)
        for _ in range(4):
            world.serve("s", finish_reason=finish)

    evidence = counted(world, step_min_exchanges=1)

    assert (evidence.champion.short, evidence.candidate.short) == (0, 0)
    assert (evidence.champion.looked_at, evidence.candidate.looked_at) == (8, 1)


def test_a_step_that_needs_many_turns_ends_although_some_were_sent_again(world: World) -> None:
    for number in range(30):
        for _ in range(1 + number % 3):
            canary(world, turn_id=f"t{number}")

    assert counted(world, step_min_exchanges=30).seen == 30


@pytest.mark.parametrize("back", [True, False])
async def test_a_step_does_not_end_while_vllm_has_lost_the_canary(world: World, back: bool) -> None:
    """One session that fails proves nothing; but nobody gets the canary's answers now."""

    name = await world.to_ramp()
    for number in range(100):
        world.serve(f"c{number}", adapter=name, arm="canary", propensity=0.5)
        world.serve(f"b{number}", propensity=0.5)
    for _ in range(BREAKER_FAILURES):
        world.serve("c", adapter="base", arm="champion", fallback_from=name)
    world.clock.now += 10.0
    await world.controller().tick()
    assert world.canary(name).step == 0
    assert world.canary(name).reason == (
        "step 1 stands: vLLM did not know the adapter for its last 5 requests"
    )

    if back:
        world.serve("c", adapter=name, arm="canary")
    else:
        world.clock.now += 1_000.0
    await world.controller().tick()

    canary_now = world.canary(name)
    assert (canary_now.phase, canary_now.step) == (("ramping", 1) if back else ("inconclusive", 0))


def test_only_chat_requests_feed_the_gate(world: World) -> None:
    world.serve("a", held_out=True, surface="completions")
    world.serve("b", held_out=True, surface="messages")
    kept = world.serve("c", held_out=True)
    world.serve("c", held_out=True, surface="completions")

    with world.database.read() as session:
        prompts = held_out_prompts(session, Line(name="m"), limit=10)

    assert [prompt.exchange_id for prompt in prompts] == [kept]


@pytest.mark.both_stores
def test_a_step_sees_its_sessions_beyond_the_newest_exchanges(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve sessions of 40 requests, one after the other, of which the newest 90 are looked at."""
    monkeypatch.setattr(live_turns, "WINDOW", 90)
    monkeypatch.setattr(live_turns, "SESSIONS_PAGE", 100)
    world.clock.now = 990.0
    world.serve("before the step", adapter=CANARY, arm="canary")
    world.clock.now = 1_010.0
    with world.together():
        for number in range(12):
            for _ in range(40):
                world.serve(f"s{number}", adapter=CANARY, arm="canary")

    def sessions(wanted: int) -> int:
        with world.database.read() as session:
            found = count_ramp(
                session, ramping(), line=world.line, step_min_exchanges=3, step_min_sessions=wanted
            )
        return found.sessions

    assert (sessions(2), sessions(5), sessions(100)) == (3, 5, 12)
    monkeypatch.setattr(live_turns, "MOST_FOR_SESSIONS", 100)
    assert sessions(100) == 5, "so much is read and no more"


# Which conversations of a ramp count as having met both arms.


def serve_turn(
    world: World,
    session: str,
    parent: str | None = None,
    *,
    canary: bool = False,
    placed_by: str = "answered",
    weight: float = 0.2,
    fallback_from: str = "",
) -> str:
    arm = "canary" if canary else "champion"
    name = world.serve(
        session,
        adapter=CANARY if canary else "base",
        arm=arm,
        propensity=weight if canary else 1.0 - weight,
        fallback_from=fallback_from,
    )
    with world.database.write() as opened:
        row = opened.query(ExchangeRow).filter_by(exchange_id=name).one()
        row.parent_id, row.placed_by = parent, placed_by if parent else "root"
    return name


def met_both(world: World, after_seq: int = 0) -> tuple[int, int]:
    canary = ramping()
    object.__setattr__(canary, "ramp_after_seq", after_seq)
    with world.database.read() as session:
        return count_conversations(session, canary, Line(name=canary.model))


@pytest.mark.both_stores
def test_a_conversation_whose_turns_met_both_arms_counts_once(world: World) -> None:
    first = serve_turn(world, "flips")
    second = serve_turn(world, "flips", first, canary=True)
    serve_turn(world, "flips", second)
    stays = serve_turn(world, "stays", canary=True)
    serve_turn(world, "stays", stays, canary=True)
    serve_turn(world, "single")

    assert met_both(world) == (3, 1)


def test_a_larger_weight_and_a_sub_agent_are_no_flip(world: World) -> None:
    grows = serve_turn(world, "grows", weight=0.05)
    serve_turn(world, "grows", grows, canary=True, weight=0.2)
    agent = serve_turn(world, "agent")
    serve_turn(world, "agent", agent, canary=True, placed_by="called")

    assert met_both(world) == (2, 0)


def test_what_was_before_the_ramp_or_taken_over_is_no_flip(world: World) -> None:
    before = serve_turn(world, "before")
    after = serve_turn(world, "before", before, canary=True)
    assert met_both(world, after_seq=1) == (1, 0)
    assert met_both(world) == (1, 1)

    lost = serve_turn(world, "before", after, fallback_from=CANARY)
    serve_turn(world, "before", lost, canary=True)
    assert met_both(world, after_seq=2) == (1, 0)


def test_only_the_newest_exchanges_of_each_arm_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.canary.controller.NEWEST", 2)
    first = serve_turn(world, "flips")
    serve_turn(world, "flips", first, canary=True)
    assert met_both(world) == (1, 1)
    for session in ("a", "b"):
        serve_turn(world, session)
        serve_turn(world, session + "c", canary=True)

    assert met_both(world) == (4, 0)


# Rehearsals beside users' traffic while a canary runs: no figure of users counts them.


LINE = Line(name=MODEL)


def serve_beside(world: World, attempts: int) -> None:
    """40 sessions of two turns, a quarter of them the canary's; so many attempts between them."""
    world.clock.now = 2_000.0
    with world.together():
        for number in range(40):
            canary = {"adapter": CANARY, "arm": "canary"} if number % 4 == 0 else {}
            for _ in range(2):
                world.serve(f"s{number}", propensity=0.75 if not canary else 0.25, **canary)  # type: ignore[arg-type]
            for attempt in range(attempts // 40):
                failed = FAILED if attempt % 2 else {}
                name = f"h:rehearsal-{number}-{attempt}"
                world.serve(name, arm="rehearsal", origin="rehearsal", propensity=1.0, **failed)
    world.clock.now += 600.0


@pytest.mark.both_stores
def test_no_figure_of_users_counts_attempts(world: World) -> None:
    serve_beside(world, 400)
    with world.database.write() as session:
        count(session, "selection", "rehearsal", 400)

    with world.database.read() as session:
        evidence = count_ramp(
            session, ramping(), line=world.line, step_min_exchanges=30, step_min_sessions=20
        )
        live, behind = LiveTurns(world.rules, world.line).read(session, ramping(), world.clock.now)
        a_day = sessions_a_day(session, LINE, world.clock.now)
        recent = read_recent(session)
        prompts = live_prompts(
            session, ramping(), LINE, after=0.0, until=world.clock.now, limit=100, known=()
        )

    assert not behind
    assert (evidence.candidate.replies, evidence.champion.replies) == (20, 60)
    assert (evidence.candidate.errors, evidence.champion.errors) == (0, 0)
    assert (evidence.seen, evidence.sessions) == (20, 10)
    assert (live.canary_units, live.champion_units) == (10, 30)
    assert live.guards["failed"].champion == 0
    assert a_day == pytest.approx(40.0)
    assert recent.sessions == 40
    assert not any(one.session_id.startswith("h:rehearsal") for one in prompts)


def test_no_caller_gets_a_share_for_attempts(world: World) -> None:
    serve_beside(world, 400)
    with world.database.write() as session:
        from sqlalchemy import update

        from sidecar.store.models import ExchangeRow

        row = ExchangeRow
        session.execute(
            update(row).where(row.origin == "rehearsal").values(selection="rehearsal", user="agent")
        )

    with world.database.read() as session:
        demand, _ = recent_demand(session, now=world.clock.now)

    assert [caller.user for caller in demand] == [""]
