"""The controller over a real store and fakes of vLLM and the judge: whole canaries, and
restarts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from deploy.errors import TransitionError
from deploy.registry import bans, transitions, versions
from deploy.registry.canary_rule import Move
from deploy.registry.rollback import rollback
from ingest.errors import (
    AdapterGoneError,
    EngineBusyError,
    EngineDownError,
    NoRoomError,
    SamplingError,
)
from ingest.grouping.request import candidate_body
from ingest.vllm.sampler import SampleRequest
from sidecar.routing.breaker_rule import FEW_CALLERS
from sidecar.store.models import (
    BannedDigestRow,
    BreakerTripRow,
    CounterRow,
    GateComparisonRow,
    GroupRow,
    JudgeCallRow,
)
from tests.deploy.conftest import World


def prompt_of(request: SampleRequest) -> str:
    return str(request.chat["messages"][-1]["content"])


FULL_STORY = [
    "canary.loading",
    "canary.gating",
    "canary.ramping",
    "canary.ramping",
    "alias.champion",
    "canary.promoted",
]


NONE_BAD = {"errors": 0, "short": 0, "cuts": 0, "looked_at": None}


async def tick(world: World, times: int = 1) -> None:
    """Each tick by a controller of its own: nothing may live in its memory."""
    for _ in range(times):
        await world.controller().tick()


def serve_step(world: World, name: str, canary: int = 3, champion: int = 3, **reply: Any) -> None:
    for number in range(canary):
        world.serve(f"c{number}", adapter=name, arm="canary", **reply)
    for number in range(champion):
        world.serve(f"b{number}", adapter="base", arm="champion")


@pytest.mark.both_stores
async def test_a_good_candidate_goes_all_the_way(world: World) -> None:
    name = world.register(1)
    first_start = world.actions()

    await world.to_ramp(name)
    assert world.table().canary_weight_bp == 2_000
    for weight in (5_000, 0):
        serve_step(world, name)
        world.clock.now += 10.0
        await tick(world)
        assert world.table().canary_weight_bp == weight

    assert world.canary(name).phase == "promoted"
    assert world.aliases() == {"champion": name, "previous": "base"}
    assert world.table().champion == name
    assert world.adapter(name).state == "champion"
    assert world.actions()[len(first_start) :] == FULL_STORY


async def test_every_decision_keeps_what_it_rests_on(world: World) -> None:
    name = await world.to_ramp()
    serve_step(world, name)
    world.clock.now += 10.0
    await tick(world)

    evidence = world.evidence(name)

    assert evidence["probe"]["live"] is True
    assert evidence["probe"]["mean_difference"] == 0.25
    assert evidence["gate"]["scored"] == 4
    assert evidence["gate"]["mean_difference"] == 0.0
    assert evidence["step_1"] == {
        "weight_bp": 2_000,
        "candidate": {"replies": 3, **NONE_BAD},
        "champion": {"replies": 3, **NONE_BAD},
        "champion_before": {"replies": 0, **NONE_BAD},
        "seen": 3,
        "sessions": 3,
        "missing_in_a_row": 0,
        "conversations": 6,
        "in_both_arms": 0,
    }
    assert evidence["guards"]["sessions"] == {"canary": 3, "champion": 3}
    assert evidence["quality"]["groups"] == 4
    assert evidence["ramp"] == {"began_at": 1_001.0, "after_seq": 4, "after_told": 0}


async def test_the_newest_waiting_adapter_is_tried_and_older_ones_retired(world: World) -> None:
    older, newer = world.register(1), world.register(2)

    await tick(world)

    assert world.canary(newer).phase == "gating"
    assert (world.adapter(older).state, world.adapter(older).reason) == (
        "retired",
        f"superseded by {newer}",
    )


async def test_a_child_of_a_rolled_back_adapter_is_not_tried(world: World) -> None:
    bad = world.register(1)
    world.promote(bad)
    child = world.register(2, parent=bad)
    rollback(world.database, "m", reason="bad", actor="me", now=1.0)

    await tick(world)

    assert world.adapter(child).state == "retired"
    assert world.adapter(child).reason == f"descends from {bad}, which was rolled back"


async def test_learning_goes_on_from_a_champion_below_which_one_was_rolled_back(
    world: World,
) -> None:
    """As stores are in which a rollback was taken back before the first one was left unmarked."""
    first = world.register(1)
    world.promote(first)
    second = world.register(2, parent=first, values=(0.3, 0.1))
    world.promote(second)
    with world.database.write() as session:
        versions.set_state(session, first, "rolled_back", "long ago")
        bans.ban(session, first, now=1.0, actor="me", reason="long ago")
    child = world.register(3, parent=second, values=(0.2, 0.2))

    await tick(world)

    assert world.canary(child).active


async def test_an_adapter_that_changes_nothing_is_rejected(world: World) -> None:
    name = world.register(1)
    world.control.reach[name] = 0.0

    await tick(world)

    assert world.adapter(name).state == "rejected"
    assert (world.adapter(name).reason or "").startswith("not live")
    assert world.evidence(name)["probe"]["mean_difference"] == 0.0


async def test_an_absent_vllm_is_waited_for(world: World) -> None:
    name = world.register(1)
    world.control.away = True
    await tick(world)
    world.clock.now += 86_400.0
    await tick(world, 9)
    assert world.canary(name).phase == "loading"
    assert world.canary(name).reason == "waiting for vLLM: vLLM gave no reply"

    world.control.away = False
    await tick(world)

    assert world.canary(name).phase == "gating"


@pytest.mark.parametrize("refuses", [False, True])
async def test_eight_failed_loads_are_inconclusive_also_over_restarts(
    world: World, refuses: bool
) -> None:
    """Its folder is valid: vLLM may be full, or lack the mount, or a flag."""
    name = world.register(1)
    if refuses:
        world.control.refuses[name] = "no adapter found for that path"
    world.control.fails_to_load = 8

    for failures in range(1, 8):
        await tick(world, 3)  # the next try is not due: the waits double from 2 s
        assert refuses or world.control.fails_to_load == 8 - failures
        assert world.canary(name).phase == "loading"
        world.clock.now += 2.0**failures
    await tick(world)

    assert world.canary(name).phase == "inconclusive"
    assert world.adapter(name).state == "retired"
    why = "no adapter found for that path" if refuses else "500 out of memory"
    assert world.canary(name).reason == f"vLLM failed to load it 8 times: {why}"
    assert world.rows(BannedDigestRow) == []


@pytest.mark.parametrize("garbled", [1, 2, 3])
async def test_a_probe_that_vllm_answers_wrongly_is_repeated(world: World, garbled: int) -> None:
    """One such answer in hundreds rejected a sound adapter."""
    name = world.register(1)
    world.control.garbles = garbled

    await tick(world)
    assert world.canary(name).phase == "loading"
    assert "decides nothing" in (world.canary(name).reason or "")
    world.clock.now += 2.0
    await tick(world)

    assert world.canary(name).phase == "gating"


async def test_a_worse_candidate_is_rejected_by_the_gate(world: World) -> None:
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.25, "says m": 0.75}
    world.hold_out(4)

    await tick(world, 3)

    assert world.canary(name).phase == "rolled_back"
    assert world.adapter(name).state == "rejected"
    assert world.evidence(name)["gate"]["mean_difference"] == -0.5
    assert world.table().canary is None
    assert world.aliases()["champion"] == "base"


async def test_the_gate_waits_for_held_out_prompts(world: World) -> None:
    name = world.register(1)
    world.hold_out(1)
    await tick(world, 2)
    world.clock.now += 1_000.0
    await tick(world)
    assert world.canary(name).phase == "gating"
    assert world.canary(name).reason == "gate waits for held-out prompts: 1 of the 2 it needs"
    assert world.sampler.requests == []

    world.serve("held-late", held_out=True)
    await tick(world)

    assert world.canary(name).phase == "ramping"


@pytest.mark.both_stores
async def test_only_good_exchanges_of_held_out_sessions_are_prompts(world: World) -> None:
    name = world.register(1)
    world.serve("a")
    world.serve("b", held_out=True, outcome="cut")
    world.serve("c", held_out=True, status=400)
    older = world.serve("d", held_out=True)
    newest = world.serve("d", held_out=True)
    other = world.serve("e", held_out=True)

    await tick(world, 2)

    asked = {row.exchange_id for row in world.comparisons()}
    assert len(asked) == 2
    assert asked < {older, newest, other}, "one turn of each session"
    assert world.canary(name).phase == "ramping"


@pytest.mark.both_stores
async def test_a_killed_control_makes_only_the_missing_comparisons(world: World) -> None:
    name = world.register(1)
    world.hold_out(4)
    await tick(world, 2)
    done = {row.comparison_id for row in world.comparisons()}
    assert len(done) == 2
    asked = len(world.sampler.requests)
    assert asked == 4

    await tick(world)

    assert world.canary(name).phase == "ramping"
    assert len(world.comparisons()) == 4
    assert done <= {row.comparison_id for row in world.comparisons()}
    assert len(world.sampler.requests) == 8
    prompts = [prompt_of(one) for one in world.sampler.requests]
    assert all(prompts.count(prompt) == 2 for prompt in prompts)


async def test_gate_answers_are_fresh_blind_and_limited(world: World) -> None:
    name = world.register(1)
    world.serve("a", held_out=True, max_tokens=5)
    world.serve("b", held_out=True)

    await tick(world, 2)

    asked = {(prompt_of(one), one.upstream_model): one for one in world.sampler.requests}
    assert {model for _, model in asked} == {name, "m"}
    assert {one.temperature for one in asked.values()} == {1.0}
    assert asked[("ask x1", name)].max_tokens == 5
    assert asked[("ask x2", name)].max_tokens == 256
    assert not any("candidate" in prompt or "champion" in prompt for prompt in world.judge.prompts)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MASKED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"tools": [TOOL], "tool_choice": "required"},
    {"logit_bias": {"5": -100}},
]
"""Fields by which a request forbids tokens: its answers cannot be trained on."""


@pytest.mark.parametrize("masked", MASKED, ids=lambda fields: "-".join(fields))
async def test_a_held_out_prompt_that_cannot_be_trained_on_is_asked_and_judged_by_the_gate(
    world: World, masked: dict[str, Any]
) -> None:
    name = world.register(1)
    world.serve("a", held_out=True, **masked)
    world.serve("b", held_out=True)

    await tick(world, 2)

    asked = [one for one in world.sampler.requests if prompt_of(one) == "ask x1"]
    assert {one.upstream_model for one in asked} == {name, "m"}
    for one in asked:
        body = candidate_body(one.chat, upstream_model="m", temperature=1.0, max_tokens=9)
        assert {field: body[field] for field in masked} == masked
    with world.database.read() as session:
        made = session.scalars(select(GateComparisonRow.status)).all()
        groups = session.scalars(select(GroupRow.group_id)).all()
    assert made == ["scored", "scored"]
    assert groups == []


@pytest.mark.both_stores
async def test_comparisons_and_judge_calls_are_stored(world: World) -> None:
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.75, "says m": 0.5}
    world.hold_out(2)

    await tick(world, 2)

    rows = world.comparisons()
    assert [row.difference for row in rows] == [0.25, 0.25]
    assert {(one["arm"], one["adapter"], one["score"]) for one in rows[0].answers} == {
        ("candidate", name, 0.75),
        ("champion", "base", 0.5),
    }
    calls = world.rows(JudgeCallRow)
    assert {call.group_id for call in calls} == {row.comparison_id for row in rows}
    assert all(call.ok and call.judge_model == "fake-judge" for call in calls)


async def test_an_absent_judge_costs_vllm_no_second_answers(world: World) -> None:
    name = world.register(1)
    world.hold_out(4)
    world.judge.away = True
    controller = world.controller()
    await controller.tick()
    for _ in range(10):
        await controller.tick()
        world.clock.now += 100.0
    assert world.canary(name).reason == "gate waits: judge is down"
    assert world.comparisons() == []
    assert len(world.sampler.requests) == 4, "two prompts, one answer of each arm"

    world.judge.away = False
    for _ in range(3):
        await controller.tick()
        world.clock.now += 0.5

    assert world.canary(name).phase == "ramping"
    assert len(world.sampler.requests) == 8


async def test_whoever_is_away_is_asked_again_after_longer_and_longer(world: World) -> None:
    world.register(1)
    world.hold_out(4)
    controller = world.controller()
    await controller.tick()
    world.sampler.errors = {"m": EngineDownError("down")}
    asked: list[float] = []
    for _ in range(70):
        before = len(world.sampler.requests)
        await controller.tick()
        if len(world.sampler.requests) > before:
            asked.append(world.clock.now - 1_000.0)
        world.clock.now += 1.0

    assert asked == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0]
    # The first try is of two prompts with two answers each, the others of one prompt.
    assert len(world.sampler.requests) == 4 + 6 * 2


async def test_the_gate_yields_to_users(world: World) -> None:
    name = world.register(1)
    world.hold_out(4)
    world.room.open = False
    await tick(world, 3)
    assert world.canary(name).reason == "gate waits: vLLM is busy with users"
    assert world.sampler.requests == []

    world.room.open = True
    await tick(world, 2)

    assert world.canary(name).phase == "ramping"


async def test_a_load_that_cannot_be_told_makes_the_gate_wait(world: World) -> None:
    name = world.register(1)
    world.hold_out(4)
    world.room.error = SamplingError("no metrics")

    await tick(world, 2)

    assert world.canary(name).reason == "gate waits: no metrics"


async def test_without_a_judge_the_gate_says_so(world: World) -> None:
    name = world.register(1)
    world.hold_out(4)
    world.judge.model = ""

    await tick(world, 2)

    assert world.canary(name).reason == "gate waits: no judge is set: name one in judge.model"
    assert world.sampler.requests == []


@pytest.mark.both_stores
async def test_rubbish_is_set_aside_and_ends_inconclusive_in_time(world: World) -> None:
    name = world.register(1)
    world.hold_out(20)
    world.judge.rubbish = True
    await tick(world, 8)
    assert world.canary(name).phase == "gating"
    set_aside = world.comparisons()
    assert len(set_aside) == 8, "at most twice the wanted prompts are tried"
    assert {row.status for row in set_aside} == {"set_aside"}
    assert {row.difference for row in set_aside} == {None}

    world.clock.now += 3_600.0
    await tick(world)

    assert world.canary(name).phase == "inconclusive"
    assert world.adapter(name).state == "retired"
    assert world.aliases()["champion"] == "base"
    calls = world.rows(JudgeCallRow)
    assert len(calls) == 16, "each group is retried once"
    assert not any(call.ok for call in calls)


@pytest.mark.parametrize(
    "error",
    [
        EngineDownError("down"),
        AdapterGoneError("gone"),
        EngineBusyError("429"),
        NoRoomError("users"),
    ],
)
async def test_a_vllm_that_is_away_full_or_lost_the_adapter_makes_the_gate_wait(
    world: World, error: Exception
) -> None:
    name = world.register(1)
    world.hold_out(4)
    world.sampler.errors[name] = error

    await tick(world, 4)

    assert world.canary(name).phase == "gating"
    assert world.comparisons() == []


async def test_a_prompt_that_vllm_cannot_answer_is_set_aside(world: World) -> None:
    name = world.register(1)
    world.hold_out(2)
    world.sampler.errors["m"] = SamplingError("status 400: too long")

    await tick(world, 2)

    assert [row.status for row in world.comparisons()] == ["set_aside", "set_aside"]
    assert {row.fault for row in world.comparisons()} == {"champion"}
    assert world.canary(name).phase == "gating"
    counts = {(row.stage, row.reason): row.count for row in world.rows(CounterRow)}
    assert counts[("gate", "sampling_failed")] == 2


async def test_a_ramp_goes_on_where_a_killed_control_left_it(world: World) -> None:
    name = await world.to_ramp()
    serve_step(world, name)
    world.clock.now += 10.0
    await tick(world)
    before = (world.canary(name), world.table(), world.actions())

    await tick(world, 3)

    after = (world.canary(name), world.table(), world.actions())
    assert after[1:] == before[1:]
    assert (after[0].step, after[0].step_started_at) == (1, 1_011.0)


async def test_replies_of_an_earlier_step_do_not_count(world: World) -> None:
    name = await world.to_ramp()
    serve_step(world, name)
    world.clock.now += 10.0
    await tick(world)
    world.clock.now += 50.0

    await tick(world)

    assert world.canary(name).step == 1
    assert world.canary(name).reason == "step 2 of 2 at 50%: 0 of 3 exchanges, 0 of 1 session"


async def test_failing_replies_roll_back(world: World) -> None:
    """At a weight of 20% five sessions of the canary and none of the champion's are no chance."""
    name = await world.to_ramp()
    serve_step(world, name, canary=4, outcome="upstream_error", content=None)
    await tick(world)
    assert world.canary(name).phase == "ramping"

    world.serve("c4", adapter=name, arm="canary", outcome="upstream_error", content=None)
    await tick(world)

    assert world.canary(name).phase == "rolled_back"
    assert world.adapter(name).state == "rolled_back"
    assert world.table().canary is None
    assert (world.canary(name).reason or "").startswith(
        "5 of the canary's sessions and 0 of the champion's failed: evidence from 5 callers: "
    )


async def test_failing_replies_roll_back_also_after_the_clock_was_set_back(world: World) -> None:
    name = await world.to_ramp()
    serve_step(world, name, canary=3, outcome="upstream_error", content=None)
    await tick(world)
    generation = world.canary(name).generation
    world.clock.now -= 86_400.0

    for number in range(3, 9):
        world.serve(
            f"c{number}", adapter=name, arm="canary", outcome="upstream_error", content=None
        )
        await tick(world)

    assert world.canary(name).phase == "rolled_back"
    assert "of the canary's sessions and 0 of the champion's failed" in (
        world.canary(name).reason or ""
    )
    assert world.canary(name).generation == generation + 1


async def test_a_clock_that_another_control_has_a_little_ahead_changes_no_mark(
    world: World,
) -> None:
    name = await world.to_ramp()
    before = world.canary(name)
    world.clock.now = before.step_started_at - 4.0

    await tick(world)

    assert world.canary(name).step_started_at == before.step_started_at


@pytest.mark.parametrize("reply", [{"finish_reason": "length"}, {"content": ""}, {"content": None}])
async def test_replies_cut_short_or_empty_roll_back(world: World, reply: dict[str, Any]) -> None:
    name = await world.to_ramp()
    serve_step(world, name, canary=6, **reply)

    await tick(world)

    assert world.canary(name).phase == "rolled_back"
    assert "had a reply that was cut short or empty" in (world.canary(name).reason or "")


async def test_requests_that_vllm_refused_say_nothing_of_the_candidate(world: World) -> None:
    name = await world.to_ramp()
    serve_step(world, name, status=400, content=None)

    await tick(world)

    assert world.canary(name).reason == "step 1 of 2 at 20%: 0 of 3 exchanges, 0 of 1 session"


async def test_a_lost_adapter_s_404_counts_as_a_failure(world: World) -> None:
    name = await world.to_ramp()
    serve_step(world, name, canary=5, status=404, content=None)

    await tick(world)

    assert world.canary(name).phase == "rolled_back"


async def test_a_rollback_during_a_gate_wins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    name = world.register(1)
    world.hold_out(4)
    await tick(world)
    controller = world.controller()
    original = world.judge.complete

    async def judged_too_late(*arguments: Any) -> Any:
        rollback(world.database, "m", reason="stop", actor="me", now=1.0)
        return await original(*arguments)

    monkeypatch.setattr(world.judge, "complete", judged_too_late)
    await controller.tick()

    assert world.canary(name).phase == "rolled_back"
    assert world.comparisons() == []
    await tick(world)
    assert world.actions().count("canary.rolled_back") == 1


async def test_a_change_is_told_and_a_hold_is_not(world: World) -> None:
    world.register(1)
    told: list[int] = []
    controller = world.controller(on_change=lambda: told.append(1))

    await controller.tick()
    assert len(told) == 1
    await controller.tick()

    assert len(told) == 1


async def test_an_unchanged_hold_takes_no_write_lock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.register(1)
    world.control.away = True
    controller = world.controller()
    await controller.tick()
    writes: list[int] = []
    original = world.database.write

    def counted() -> AbstractContextManager[Session]:
        writes.append(1)
        return original()

    monkeypatch.setattr(world.database, "write", counted)

    await controller.tick()

    assert writes == []


# What control makes of a trip of the proxy's breaker, and of outages and hanging canaries.


@pytest.fixture
async def name(world: World) -> str:
    """A candidate in the first step of its ramp."""
    return await world.to_ramp()


def trip(world: World, name: str, reason: str = "8 of 8 were empty") -> None:
    """What a proxy writes."""
    canary = world.canary(name)
    with world.database.write() as session:
        session.add(
            BreakerTripRow(
                model=canary.model,
                canary=name,
                salt=canary.salt,
                at=1.0,
                reason=reason,
            )
        )


async def test_a_canary_that_the_breaker_took_out_is_rolled_back(world: World, name: str) -> None:
    trip(world, name)

    await tick(world)

    canary = world.canary(name)
    assert canary.phase == "rolled_back"
    assert canary.reason == "the proxy's breaker took it out: 8 of 8 were empty"
    assert world.table().canary is None
    assert world.adapter(name).state == "rolled_back"


async def test_a_trip_that_few_callers_may_have_caused_is_inconclusive_and_bans_nothing(
    world: World, name: str
) -> None:
    trip(world, name, f"8 of 8 were cut{FEW_CALLERS}")

    await tick(world)

    assert world.canary(name).phase == "inconclusive"
    assert world.table().canary is None
    assert world.adapter(name).state == "retired"
    assert "adapter.banned" not in world.actions()


async def test_a_paused_canary_loses_its_traffic_and_stays_paused(world: World, name: str) -> None:
    world.act("pause", name)
    assert world.table().canary == name
    trip(world, name)

    await tick(world, 3)

    canary = world.canary(name)
    assert (canary.phase, canary.paused, canary.weight_bp) == ("ramping", True, 0)
    assert canary.reason == "paused; the proxy's breaker took it out: 8 of 8 were empty"
    assert world.table().canary is None
    assert world.actions().count("canary.taken_out") == 1


@pytest.mark.parametrize("seen", [True, False])
async def test_a_resume_gives_the_canary_its_traffic_under_a_new_salt(
    world: World, name: str, seen: bool
) -> None:
    world.act("pause", name)
    before = world.table().salt
    trip(world, name)
    await tick(world, int(seen))

    world.act("resume", name)
    await tick(world, 2)

    assert world.canary(name).phase == "ramping"
    assert world.canary(name).weight_bp == 2_000
    assert world.table().canary == name
    assert world.table().salt not in ("", before)


async def test_the_replies_that_tripped_the_breaker_are_not_judged_again_after_a_resume(
    world: World, name: str
) -> None:
    world.act("pause", name)
    for number in range(8):
        world.serve(f"c{number}", adapter="base", fallback_from=name)
        world.serve(f"b{number}")
    trip(world, name)
    await tick(world)
    world.clock.now += 60.0

    world.act("resume", name)
    await tick(world, 3)

    assert world.canary(name).phase == "ramping"
    assert world.canary(name).weight_bp == 2_000


async def test_a_pause_and_resume_without_a_trip_keep_the_sessions_where_they_are(
    world: World, name: str
) -> None:
    before = world.table().salt
    world.act("pause", name)
    world.act("resume", name)

    assert world.table().salt == before


@pytest.mark.parametrize(("paused", "seen"), [(False, False), (True, False), (True, True)])
async def test_what_the_breaker_took_out_is_not_promoted_by_hand(
    world: World, name: str, paused: bool, seen: bool
) -> None:
    if paused:
        world.act("pause", name)
    trip(world, name)
    await tick(world, int(seen))

    with pytest.raises(TransitionError, match="resume the canary before promoting it"):
        world.act("promote", name)


async def test_a_trip_that_comes_while_the_ramp_decides_wins(world: World, name: str) -> None:
    canary = world.canary(name)
    move = Move(to="promoted", candidate_state="champion", reason="passed")
    trip(world, name)

    with world.database.write() as session:
        applied = transitions.apply(session, canary, move, evidence={}, now=1.0)

    assert not applied
    assert world.aliases()["champion"] == "base"
