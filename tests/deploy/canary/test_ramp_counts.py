"""What counts for and against each arm of a ramp: turns, retries, adapters that were missing."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from deploy.canary import live_turns
from deploy.canary.gate_store import held_out_prompts
from deploy.canary.live_turns import asks_for_one, count_ramp
from deploy.records import Canary
from deploy.registry.canary_rule import BREAKER_FAILURES, ArmCounts, RampEvidence
from sidecar.lines import Line
from sidecar.relay.best_of import BestOfPlan, plan_best_of
from sidecar.relay.peek import peek_request
from sidecar.store.database import compress
from sidecar.store.models import ChoiceRow, ExchangeRow
from support.made_canary import made_canary

if TYPE_CHECKING:
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
        return count_ramp(session, ramping(champion), step_min_exchanges=step_min_exchanges)


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


@pytest.mark.parametrize(
    ("finish_reasons", "returned_index", "short"),
    [
        (("length", "stop", "length"), 1, 0),
        (("stop", "length", "stop"), 1, 1),
        (("stop", "length"), 0, 0),  # the judge chose the first one, or nobody chose
        (("length", "stop"), 0, 1),
    ],
)
def test_of_best_of_n_only_the_returned_answer_counts(
    world: World, finish_reasons: Sequence[str], returned_index: int, short: int
) -> None:
    canary_choices(world, *finish_reasons, returned_index=returned_index)

    assert counted(world).candidate == ArmCounts(replies=1, errors=0, short=short)


@pytest.mark.parametrize(
    ("finish_reasons", "short"),
    [(("stop", "stop"), 0), (("stop", "length"), 1), (("length", "length"), 1)],
)
def test_of_choices_that_the_client_asked_for_all_count(
    world: World, finish_reasons: Sequence[str], short: int
) -> None:
    canary_choices(world, *finish_reasons, n=2)

    assert counted(world).candidate == ArmCounts(replies=1, errors=0, short=short)


def test_of_several_prompts_of_one_completions_request_all_answers_count(world: World) -> None:
    canary_choices(world, "stop", "length", surface="completions", prompt=["a", "b"])

    assert counted(world).candidate == ArmCounts(replies=1, errors=0, short=1)


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
        later = Canary(**{**_as_dict(ramping()), "step_started_at": 1_005.0})
        evidence = count_ramp(session, later, step_min_exchanges=3)

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


def _as_dict(one: Canary) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Canary.__dataclass_fields__}


async def ramp(world: World, tick: Callable[[], Awaitable[None]]) -> str:
    name = str(world.register(1))
    world.hold_out(4)
    world.clock.now += 1.0
    for _ in range(3):
        await tick()
    assert world.canary(name).phase == "ramping"
    return name


async def test_many_requests_for_which_vllm_lost_the_canary_roll_it_back(world: World) -> None:
    async def tick() -> None:
        await world.controller().tick()

    name = await ramp(world, tick)
    for number in range(BREAKER_FAILURES):
        world.serve(f"b{number}")
        world.serve(f"c{number}", adapter="base", arm="champion", fallback_from=name)

    await tick()

    assert world.canary(name).phase == "rolled_back"
    assert (world.canary(name).reason or "").startswith(
        "5 of the canary's sessions and 0 of the champion's failed: evidence from 5 callers: "
    )
    assert world.table().canary is None


@pytest.mark.parametrize("back", [True, False])
async def test_a_step_does_not_end_while_vllm_has_lost_the_canary(world: World, back: bool) -> None:
    """One session that fails proves nothing; but nobody gets the canary's answers now."""

    async def tick() -> None:
        await world.controller().tick()

    name = await ramp(world, tick)
    for number in range(100):
        world.serve(f"c{number}", adapter=name, arm="canary", propensity=0.5)
        world.serve(f"b{number}", propensity=0.5)
    for _ in range(BREAKER_FAILURES):
        world.serve("c", adapter="base", arm="champion", fallback_from=name)
    world.clock.now += 10.0
    await tick()
    assert world.canary(name).step == 0
    assert world.canary(name).reason == (
        "step 1 stands: vLLM did not know the adapter for its last 5 requests"
    )

    if back:
        world.serve("c", adapter=name, arm="canary")
    else:
        world.clock.now += 1_000.0
    await tick()

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
            found = count_ramp(session, ramping(), step_min_exchanges=3, step_min_sessions=wanted)
        return found.sessions

    assert (sessions(2), sessions(5), sessions(100)) == (3, 5, 12)
    monkeypatch.setattr(live_turns, "MOST_FOR_SESSIONS", 100)
    assert sessions(100) == 5, "so much is read and no more"
