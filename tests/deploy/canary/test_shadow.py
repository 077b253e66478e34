"""Judged groups as evidence in whole canaries: gate, ramp, restarts, outages, by a rule that asks
for proof."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import select

from deploy.canary import gate_store, live_turns
from deploy.canary.controller import Controller
from deploy.canary.gate import Gate, Shadow
from deploy.canary.gate_answers import MOST_ANSWERS, arms_of
from deploy.canary.gate_store import Judged
from deploy.canary.live_turns import LiveTurns
from deploy.registry import canary_rule, proof_rule
from deploy.registry.canary_rule import quality_of
from deploy.registry.proof_rule import limits_of
from ingest.errors import JudgeRefusalError, RequestRefusedError, SamplingError
from ingest.vllm.sampler import SampledAnswer, SampleRequest
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import AliasRow, ExchangeRow, GateComparisonRow
from support.adapter_endpoints import MODEL
from support.fake_judge import FakeJudge
from support.made_canary import made_canary
from tests.deploy.conftest import World


@pytest.fixture
def rules() -> CanarySettings:
    """Wide margins: an equal candidate needs 25 groups, each of a difference of 0."""
    return CanarySettings(
        margin=0.18,
        gate_prompts=4,
        gate_answers=1,
        gate_min_prompts=2,
        groups_per_hour=3_600,
        max_groups=60,
        steps=(2_000, 5_000),
        step_min_s=10.0,
        turn_wait_s=0.0,
        step_min_exchanges=3,
        step_min_sessions=3,
        step_max_s=1_000.0,
    )


async def play(world: World, gate: Gate, ticks: int, *, traffic: str = "", first: int = 0) -> None:
    """Both loops of control, one tick each a second. traffic: the candidate that answers users.
    first: number of the first sessions."""
    controller, shadow = world.controller(gate=gate), Shadow(world.database, gate, MODEL)
    for number in range(first, first + ticks):
        await controller.tick()
        await shadow.tick()
        if traffic:
            serve(world, traffic, number)
        world.clock.now += 1.0


def serve(world: World, name: str, number: int, **reply: Any) -> None:
    """One session of the canary and four of the champion, as a weight of 20% gives."""
    with world.together():
        world.serve(f"c{number}", adapter=name, arm="canary", **reply)
        for other in range(4):
            world.serve(f"b{number}-{other}")


def anchored(world: World, adapter: str) -> None:
    with world.database.write() as session:
        session.add(AliasRow(model=MODEL, alias="anchor", adapter=adapter, generation=1))


def judged(world: World) -> list[GateComparisonRow]:
    with world.database.read() as session:
        statement = select(GateComparisonRow).order_by(GateComparisonRow.place)
        return list(session.scalars(statement))


async def ramping(world: World, *, held_out: int = 60) -> tuple[str, Gate]:
    name = world.register(1)
    world.hold_out(held_out)
    gate = world.gate()
    await play(world, gate, 4)
    assert world.canary(name).phase == "ramping"
    return name, gate


async def test_no_prompt_is_of_a_session_that_the_candidate_answered(world: World) -> None:
    """One that its champion answered last, because the canary paused, is none either."""
    name = world.register(1)
    asked = [world.serve(f"held-{number}", held_out=True) for number in range(3)]
    world.serve("its", held_out=True, adapter=name, arm="canary")
    world.serve("its", held_out=True)
    world.serve("its-last", held_out=True)
    world.serve("its-last", held_out=True, adapter=name, arm="canary")
    gate = world.gate()
    await play(world, gate, 4)
    assert world.canary(name).phase == "ramping"
    world.serve("in-the-ramp", held_out=True, adapter=name, arm="canary")
    await play(world, gate, 2)

    assert {row.exchange_id for row in judged(world)} == set(asked)


@pytest.mark.both_stores
async def test_an_equal_candidate_is_promoted_when_enough_groups_prove_it(world: World) -> None:
    name, gate = await ramping(world)
    await play(world, gate, 8, traffic=name)
    assert world.canary(name).phase == "ramping"
    await play(world, gate, 22, traffic=name)

    canary = world.canary(name)
    assert canary.phase == "promoted"
    assert (canary.reason or "").startswith("passed all 2 steps of the ramp; it scored 0.000")
    evidence = world.evidence(name)["quality"]
    assert 25 <= evidence["groups"] <= 32
    assert evidence["proven"] == ["anchored", "no_worse"]
    assert [row.place for row in judged(world)] == list(range(1, len(judged(world)) + 1))


async def test_a_harmful_candidate_loses_its_users_though_all_its_replies_look_well(
    world: World,
) -> None:
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.25, "says m": 0.75}
    world.hold_out(60)
    gate = world.gate()

    await play(world, gate, 30, traffic=name)

    assert world.canary(name).phase == "rolled_back"
    assert "worse than the champion in " in (world.canary(name).reason or "")
    assert world.table().canary is None


@pytest.mark.both_stores
async def test_the_anchor_is_asked_in_the_same_blind_group(world: World) -> None:
    first, second = world.register(1), world.register(2)
    world.promote(first)
    world.promote(second)
    anchored(world, first)
    name = world.register(3, parent=second)
    world.judge.scores = {f"says {name}": 0.5, f"says {second}": 0.75, f"says {first}": 1.0}
    world.hold_out(4)

    await play(world, world.gate(), 2)

    row = judged(world)[0]
    assert {one["arm"]: one["adapter"] for one in row.answers} == {
        "candidate": name,
        "champion": second,
        "anchor": first,
    }
    assert (row.difference, row.anchor_difference) == (-0.25, -0.5)
    assert len(world.judge.prompts) == 2 * len(judged(world)), "one group, one call a pass"


@pytest.mark.parametrize(
    ("asked", "anchor", "shown"),
    [
        (1, "base", (1, 1, 1)),
        (2, "base", (2, 2, 2)),
        (3, "base", (3, 3, 2)),
        (4, "base", (3, 3, 2)),
        (4, "m--v1", (4, 4, 0)),
    ],
)
def test_a_judge_is_never_shown_more_than_eight_answers(
    rules: CanarySettings, asked: int, anchor: str, shown: tuple[int, ...]
) -> None:
    canary = made_canary(candidate="m--v2", champion="m--v1", anchor=anchor)

    arms = arms_of(canary, rules.model_copy(update={"gate_answers": asked}))

    counts = Counter(arm for arm, _ in arms)
    assert tuple(counts[arm] for arm in ("candidate", "champion", "anchor")) == shown
    assert len(arms) <= MOST_ANSWERS == 8


async def test_the_anchor_of_a_canary_stays_the_one_that_it_began_with(world: World) -> None:
    first = world.register(1)
    world.promote(first)
    name = world.register(2, parent=first)
    await world.controller().tick()
    anchored(world, first)

    assert world.canary(name).anchor == "base"


async def test_a_champion_that_is_the_anchor_is_asked_once(world: World) -> None:
    name = world.register(1)
    world.hold_out(4)

    await play(world, world.gate(), 2)

    row = judged(world)[0]
    assert {one["arm"] for one in row.answers} == {"candidate", "champion"}
    assert row.anchor_difference is None
    assert world.canary(name).anchor == "base"


async def test_prompts_of_users_follow_when_no_session_is_held_out(world: World) -> None:
    name = world.register(1)
    world.serve("before")
    world.hold_out(4)
    world.clock.now += 1.0
    gate = world.gate()
    await play(world, gate, 4)
    assert world.canary(name).phase == "ramping"
    chosen = world.serve("after")
    further = world.serve("before")
    rejected = world.serve("cut", outcome="cut")
    world.serve("its", adapter=name, arm="canary")
    its = world.serve("its")
    world.clock.now += gate_store.SETTLED_S
    world.serve("goes-on")
    with world.database.write() as session:
        for row in session.query(ExchangeRow).filter_by(held_out=False):
            row.selection = "chosen"

    await play(world, gate, 3)

    asked = {row.exchange_id for row in judged(world)}
    assert len(asked) == 4 + 1, "another user's session goes on"
    assert chosen in asked
    assert rejected not in asked
    assert "x1" not in asked, "it began before the canary: the candidate may have learned from it"
    assert further not in asked, "its session began before the canary"
    assert its not in asked, "the candidate answered in its session"


async def test_no_more_groups_are_judged_than_an_hour_may_have(world: World) -> None:
    world.rules = world.rules.model_copy(update={"groups_per_hour": 360})
    name, gate = await ramping(world)

    await play(world, gate, 36, traffic=name)

    assert len(judged(world)) == 4 + 3, "40 s at 360 an hour, and the four of the gate"


class Hanging(FakeJudge):
    """A judge that answers nobody any more once `hangs` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = False

    async def complete(self, *arguments: Any) -> Any:
        if self.hangs:
            await asyncio.sleep(3_600.0)
        return await super().complete(*arguments)


async def test_a_judge_that_hangs_keeps_no_guard_waiting(world: World) -> None:
    world.judge = Hanging()
    name, gate = await ramping(world)
    world.judge.hangs = True
    controller = world.controller(gate=gate)
    shadow = asyncio.create_task(Shadow(world.database, gate, MODEL).tick())
    await asyncio.sleep(0.1)
    for number in range(6):
        serve(world, name, number, outcome="upstream_error", content=None)

    await asyncio.wait_for(controller.tick(), timeout=20.0)

    assert world.canary(name).phase == "rolled_back"
    shadow.cancel()
    await asyncio.gather(shadow, return_exceptions=True)


async def test_a_judge_that_is_away_holds_the_promotion_and_its_clock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_rule, "EVIDENCE_MAX_S", 60.0)
    name, gate = await ramping(world)
    await play(world, gate, 4, traffic=name)
    world.judge.away = True
    await play(world, gate, 30, traffic=name)
    world.clock.now += 10_000.0
    await play(world, gate, 2)

    assert world.canary(name).phase == "ramping"
    assert world.canary(name).reason == "the evidence waits: judge is down"

    world.judge.away = False
    await play(world, gate, 45, traffic=name)

    assert world.canary(name).phase == "promoted"


class Refusing(FakeJudge):
    """A judge that refuses every group with a certain text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    async def complete(self, messages: Any, schema: Any) -> Any:
        if self.text in messages[1]["content"]:
            raise JudgeRefusalError("filtered")
        return await super().complete(messages, schema)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("says {candidate}", "candidate"), ('"says m"', "champion"), ("ask x", "unknown")],
)
async def test_it_is_found_whose_answers_the_judge_refuses(
    world: World, text: str, fault: str
) -> None:
    name = world.register(1)
    world.judge = Refusing(text.format(candidate=name))
    world.hold_out(4)

    await play(world, world.gate(), 2)

    assert {row.fault for row in judged(world)} == {fault}
    assert {row.difference for row in judged(world)} == {None}


async def test_one_failure_of_vllm_costs_no_group(world: World) -> None:
    """A 500 or a timeout that passes is nobody's fault: the answer is asked for once more."""
    name = world.register(1)
    world.hold_out(4)
    sample, failed = world.sampler.sample, set[str]()

    async def fail_once(request: SampleRequest) -> SampledAnswer:
        if request.upstream_model not in failed:
            failed.add(request.upstream_model)
            raise SamplingError("status 500")
        return await sample(request)

    world.sampler.sample = fail_once  # type: ignore[method-assign]
    await play(world, world.gate(), 2)

    assert failed == {name, MODEL}
    assert {row.fault for row in judged(world)} == {None}


async def test_a_request_that_vllm_refuses_is_not_sent_again(world: World) -> None:
    name = world.register(1)
    world.hold_out(2)
    world.sampler.errors[name] = RequestRefusedError("status 400: too long")

    await play(world, world.gate(), 2)

    asked = [request for request in world.sampler.requests if request.upstream_model == name]
    assert len(asked) == len(judged(world)) == 2
    assert {row.fault for row in judged(world)} == {"candidate"}


@pytest.mark.both_stores
async def test_a_control_that_starts_again_has_the_same_evidence_to_the_last_bit(
    world: World,
) -> None:
    name, gate = await ramping(world)
    controller, shadow = world.controller(gate=gate), Shadow(world.database, gate, MODEL)
    for number in range(9):
        world.judge.scores = {"says m": 0.1 * number}
        await controller.tick()
        await shadow.tick()
        serve(world, name, number, **({"finish_reason": "length"} if number % 3 == 0 else {}))
        world.clock.now += 1.0
    before = _state(controller, world, name)

    after = _state(world.controller(gate=gate), world, name)

    assert after == before
    quality = before[0]
    assert quality.groups > 4
    with world.database.read() as session:
        rows = gate_store.judged_since(session, world.canary(name).canary_id, place=0)
    assert quality_of(rows, limits_of(world.rules), anchored=False) == quality


async def test_a_proof_that_too_many_missing_groups_spoil_waits_for_groups_that_can_be_scored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_rule, "MAX_MISSING", 0.2)
    world.rules = world.rules.model_copy(update={"max_groups": 200})
    name, gate = await ramping(world, held_out=200)
    gate._judge = refusing = Refusing("ask x")
    await play(world, gate, 10, traffic=name)
    refusing.text = "nobody says this"
    await play(world, gate, 60, traffic=name, first=10)

    assert world.canary(name).phase == "promoted"
    quality = world.evidence(name)["quality"]
    assert (quality["unknown"], quality["groups"]) == (10, 40), "the proof alone needs 25"


async def test_groups_go_on_while_a_guard_of_theirs_is_not_quiet(world: World) -> None:
    world.rules = world.rules.model_copy(update={"max_groups": 200})
    name, gate = await ramping(world, held_out=200)
    world.sampler.finish_reasons[name] = "length"
    await play(world, gate, 9, traffic=name)
    del world.sampler.finish_reasons[name]
    await play(world, gate, 21, traffic=name, first=9)
    quality = world.evidence(name)["quality"]
    assert "no_worse" in quality["proven"]
    assert math.exp(quality["flaws"]["short"]["nats_now"]) > 5.0
    assert "waits for more groups: " in (world.canary(name).reason or "")
    suspected_at = len(judged(world))
    world.sampler.finish_reasons[MODEL] = "length"

    await play(world, gate, 20, traffic=name, first=30)

    assert world.canary(name).phase == "promoted"
    assert len(judged(world)) > suspected_at


class SlowFirst:
    """A sampler whose first prompt waits until it is let go."""

    def __init__(self, world: World) -> None:
        self._sample = world.sampler.sample
        self._first = ""
        self.go = asyncio.Event()
        world.sampler.sample = self.sample  # type: ignore[method-assign]

    async def sample(self, request: SampleRequest) -> SampledAnswer:
        asked = request.chat["messages"][-1]["content"]
        self._first = self._first or asked
        if asked == self._first:
            await self.go.wait()
        return await self._sample(request)


@pytest.mark.parametrize("drawn", ["before the look", "during it"])
async def test_a_place_that_is_stored_first_hides_no_earlier_one(
    world: World, monkeypatch: pytest.MonkeyPatch, drawn: str
) -> None:
    """Two prompts are drawn, and the second is stored while the first still waits."""
    name, gate = await ramping(world)
    controller, shadow = world.controller(gate=gate), Shadow(world.database, gate, MODEL)
    await controller.tick()
    world.clock.now += 10.0
    world.judge.scores = {f"says {name}": 0.25, "says m": 0.75}
    sampler, stored, loop = SlowFirst(world), len(judged(world)), asyncio.get_running_loop()
    batches: list[asyncio.Task[None]] = []

    async def second_is_stored() -> None:
        batches.append(asyncio.create_task(shadow.tick()))
        while len(judged(world)) == stored:
            await asyncio.sleep(0.01)

    if drawn == "before the look":
        await second_is_stored()
    else:
        count_ramp = live_turns.count_ramp

        def draw_meanwhile(*arguments: Any, **more: Any) -> Any:
            if not batches:
                asyncio.run_coroutine_threadsafe(second_is_stored(), loop).result(20.0)
            return count_ramp(*arguments, **more)

        monkeypatch.setattr(live_turns, "count_ramp", draw_meanwhile)
    await controller.tick()
    assert len(judged(world)) == stored + 1
    assert controller._judged._quality.groups == stored, "the second waits for the first"
    sampler.go.set()
    await batches[0]
    await controller.tick()

    quality = controller._judged._quality
    assert quality.groups == len(judged(world)) == stored + 2
    with world.database.read() as session:
        rows = gate_store.judged_since(session, world.canary(name).canary_id, place=0)
    assert quality_of(rows, limits_of(world.rules), anchored=False) == quality


def _state(controller: Controller, world: World, name: str) -> tuple[Any, Any, Any]:
    """What the controller's readers hold after reading all there is."""
    canary = world.canary(name)
    judged_state, turns = controller._judged, controller._turns
    assert isinstance(judged_state, Judged)
    assert isinstance(turns, LiveTurns)
    with world.database.read() as session:
        quality = judged_state.read(session, canary, open_from=None)
        live, behind = turns.read(session, canary, world.clock.now)
    assert not behind
    return quality, dict(live.guards), live.split


async def test_a_second_try_goes_on_with_the_groups_of_the_first(world: World) -> None:
    """An operator ended the first before the proof. No session is judged twice."""
    name, gate = await ramping(world)
    await play(world, gate, 8, traffic=name)
    world.act("abort", name)
    world.start(name)
    before = len(judged(world))
    gate = world.gate()
    await play(world, gate, 4)
    assert world.canary(name).phase == "ramping"
    assert world.evidence(name)["quality"]["groups"] >= before

    await play(world, gate, 30, traffic=name, first=100)

    assert world.canary(name).phase == "promoted"
    assert 25 <= world.evidence(name)["quality"]["groups"] <= 34, "of both tries"
    asked = [row.exchange_id for row in judged(world)]
    assert len(asked) == len(set(asked))
