"""Prompts of the gate and the shadow: one turn of each session, wherever it stands."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st
from sqlalchemy import func, select

from deploy.canary.gate_store import SETTLED_S, drawn_turn, held_out_prompts, live_prompts
from sidecar.lines import Line
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import ExchangeRow, GateComparisonRow
from support.adapter_endpoints import MODEL
from support.made_canary import made_canary
from tests.deploy.conftest import World

LINE = Line(name=MODEL)


def prompts(world: World, *, salt: str = "", until: float | None = None) -> dict[str, str]:
    """Return session -> exchange."""
    with world.database.read() as session:
        found = held_out_prompts(session, LINE, limit=100, salt=salt, until=until)
    return {prompt.session_id: prompt.exchange_id for prompt in found}


def test_each_turn_is_drawn_with_the_same_chance_over_the_salts() -> None:
    turns = [f"x{number}" for number in range(6)]

    drawn = Counter(drawn_turn(f"salt-{number}", "s", turns) for number in range(6_000))

    # A turn has a mean of 1,000 and a standard deviation of 29.
    assert min(drawn[turn] for turn in turns) > 1_000 - 4 * 29
    assert max(drawn[turn] for turn in turns) < 1_000 + 4 * 29


@given(st.text(), st.text(), st.lists(st.text(), min_size=2, unique=True))
def test_the_order_of_the_turns_and_one_that_is_added_do_not_move_the_others(
    salt: str, session_id: str, turns: list[str]
) -> None:
    before, after = drawn_turn(salt, session_id, turns[:-1]), drawn_turn(salt, session_id, turns)

    assert after in (before, turns[-1])
    assert drawn_turn(salt, session_id, reversed(turns)) == after


def test_a_held_out_session_gives_one_turn_which_the_canary_decides(world: World) -> None:
    with world.together():
        for number in range(30):
            for _ in range(6):
                world.serve(f"h{number}", held_out=True)

    first, again = prompts(world, salt="one"), prompts(world, salt="one")

    assert len(first) == 30
    assert first == again
    assert list(first) == [f"h{number}" for number in reversed(range(30))], "the newest first"
    places = Counter((int(name[1:]) - 1) % 6 for name in first.values())
    assert places == {0: 7, 1: 5, 2: 9, 4: 5, 5: 4}, "with this salt; the mean is 5 of each"
    assert prompts(world, salt="two") != first


def test_a_session_that_goes_on_waits_until_it_has_ended(world: World) -> None:
    world.serve("ended", held_out=True)
    world.serve("goes-on", held_out=True)
    world.clock.now += SETTLED_S
    world.serve("goes-on", held_out=True)

    assert set(prompts(world, until=world.clock.now - SETTLED_S)) == {"ended"}
    assert set(prompts(world)) == {"ended", "goes-on"}
    world.clock.now += SETTLED_S
    assert set(prompts(world, until=world.clock.now - SETTLED_S)) == {"ended", "goes-on"}


def test_a_users_session_gives_one_of_the_champions_good_turns(world: World) -> None:
    """Whichever it is: a cut turn, and one that nobody decided, is none of them."""
    good = {world.serve("s") for _ in range(4)}
    world.serve("s", outcome="cut")
    with world.database.write() as session:
        session.query(ExchangeRow).update({"selection": "rate"})
    world.serve("s")
    drawn = set()
    with world.database.read() as session:
        for number in range(60):
            canary = made_canary(champion="base", salt=f"salt-{number}")
            found = live_prompts(
                session, canary, LINE, after=0.0, until=world.clock.now, limit=9, known=()
            )
            drawn |= {prompt.exchange_id for prompt in found}

    assert drawn == good


# The gate judges more prompts while something speaks against a candidate without proving harm.


PROMPTS = 10


@pytest.fixture
def rules() -> CanarySettings:
    return CanarySettings(
        gate_prompts=PROMPTS,
        gate_answers=1,
        gate_min_prompts=PROMPTS,
        steps=(2_000,),
        step_min_s=10.0,
        turn_wait_s=0.0,
    )


async def gated(world: World, *, held_out: int, worse_by: float) -> tuple[str, int]:
    """Play until the gate is left. Returns: the candidate, and the prompts that were judged."""
    name = world.register(1)
    world.judge.scores = {f"says {name}": 0.5 - worse_by / 2, "says m": 0.5 + worse_by / 2}
    world.hold_out(held_out)
    controller = world.controller(gate=world.gate())
    for _ in range(60):
        await controller.tick()
        world.clock.now += 1.0
        if world.canary(name).phase not in ("loading", "gating"):
            break
    with world.database.read() as session:
        judged = session.scalar(select(func.count()).select_from(GateComparisonRow)) or 0
    return name, judged


@pytest.mark.both_stores
async def test_a_bad_candidate_that_few_prompts_do_not_prove_bad_meets_no_user(
    world: World,
) -> None:
    name, judged = await gated(world, held_out=60, worse_by=0.4)

    canary = world.canary(name)
    assert (canary.phase, world.table().canary) == ("rolled_back", None)
    assert (canary.reason or "").startswith("gate: worse than the champion in ")
    assert PROMPTS < judged <= 2 * PROMPTS


async def test_a_candidate_that_nothing_speaks_against_is_judged_on_no_more(world: World) -> None:
    name, judged = await gated(world, held_out=60, worse_by=0.1)

    assert (world.canary(name).phase, judged) == ("ramping", PROMPTS)


async def test_it_goes_on_when_there_is_no_further_prompt(world: World) -> None:
    """The ramp judges prompts of users' sessions too."""
    name, judged = await gated(world, held_out=PROMPTS, worse_by=0.4)

    assert (world.canary(name).phase, judged) == ("ramping", PROMPTS)


async def test_a_doubt_that_further_prompts_clear_up_lets_it_pass(world: World) -> None:
    name = world.register(1)
    world.sampler.finish_reasons[name] = "length"
    world.hold_out(60)
    controller = world.controller(gate=world.gate())
    for _ in range(60):
        await controller.tick()
        world.clock.now += 1.0
        doubted = "more than usual: more cut short" in (world.canary(name).reason or "")
        if doubted and name in world.sampler.finish_reasons:
            del world.sampler.finish_reasons[name]
            world.sampler.finish_reasons["m"] = "length"
        if world.canary(name).phase not in ("loading", "gating"):
            break

    assert world.canary(name).phase == "ramping"
    assert name not in world.sampler.finish_reasons, "it was never doubted"
