"""Guards over judged groups that need no judge: planted candidates, and one that is no worse."""

from __future__ import annotations

import random
from typing import Any

import pytest

from deploy.canary import loading
from deploy.canary.gate_store import fits_format, lengthening, narrowing
from deploy.evidence.quality import Group, Quality, add_group
from deploy.registry import proof_rule
from sidecar.settings import Canary as CanarySettings
from tests.deploy.conftest import World

RULES = CanarySettings()
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"schema": {"type": "object", "required": ["city"]}},
}


def after(excesses: list[float]) -> Quality:
    quality, limits = Quality(), proof_rule.limits_of(RULES)
    for one in excesses:
        group = Group(champion=0.0, anchor=0.0, flaws={"narrow": one})
        quality = add_group(quality, group, limits)
    return quality


def test_an_answer_is_narrow_when_it_is_nearly_certain_and_was_not() -> None:
    assert narrowing([0.04, 0.06], [0.12, 0.1]) == {"narrow": 1.0}
    assert narrowing([1.2, 1.0], [0.04, 0.06]) == {"narrow": -1.0}
    assert narrowing([0.055], [0.11]) == {"narrow": 0.0}, "just half"
    assert narrowing([0.001], [0.009]) == {"narrow": 0.0}, "neither is uncertain"
    assert narrowing([None], [1.0]) == narrowing([], []) == {}


def test_a_candidate_that_learned_to_be_surer_is_not_narrow() -> None:
    """As supervised adapters of the shipped model are: 3 nats a token before, 0.3 after."""
    assert narrowing([0.11, 0.3], [3.1, 2.9]) == {"narrow": 0.0}
    assert narrowing([0.1], [3.0]) == {"narrow": 0.0}
    assert narrowing([0.099], [3.0]) == {"narrow": 1.0}


def test_a_collapsed_candidate_is_proven_so_within_the_gate() -> None:
    harm = proof_rule.harm(after([1.0] * 40))

    assert harm is not None
    assert harm.startswith("more answers that are nearly certain than the champion in ")
    at = next(n for n in range(1, 41) if proof_rule.harm(after([1.0] * n)) is not None)
    assert at <= 25


@pytest.mark.tier_2
def test_equal_candidates_are_rolled_back_by_it_within_its_level() -> None:
    """Answers of two tokens: half of all prompts look narrow in one direction or the other."""
    rng, fired = random.Random(7), 0
    for _ in range(300):
        excesses = [rng.choice((-1.0, 0.0, 0.0, 1.0)) for _ in range(200)]
        fired += proof_rule.harm(after(excesses)) is not None

    assert fired <= 300 * proof_rule.GUARD_LEVEL + 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"city": "Ulm"}', True),
        ('{"town": "Ulm"}', False),
        ('["city"]', False),
        ("Ulm", False),
    ],
)
def test_a_reply_fits_the_schema_that_its_request_names(content: str, expected: bool) -> None:
    assert fits_format({"content": content}, SCHEMA) is expected


async def test_a_candidate_far_from_the_base_is_rejected_before_anybody_meets_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = world.register(1)
    monkeypatch.setattr(loading, "MAX_BASE_KL", 0.001)

    await world.controller().tick()

    canary = world.canary(name)
    assert (canary.phase, world.adapter(name).state) == ("rolled_back", "rejected")
    assert canary.reason is not None
    assert canary.reason.startswith("runaway KL: ")
    assert world.evidence(name)["probe"]["kl"] > 0.001


async def gated(world: World, *, logprobs: tuple[float, ...]) -> str:
    """Play a gate of 40 prompts for a candidate whose tokens have these log-probabilities."""
    name = world.register(1)
    world.rules = world.rules.model_copy(
        update={"promote_on": "no_worse", "gate_prompts": 40, "gate_min_prompts": 40}
    )
    world.sampler.logprobs[name] = logprobs
    world.hold_out(40)
    for _ in range(40):
        await world.controller().tick()
    return name


async def test_a_collapsed_candidate_is_rejected_at_the_gate(world: World) -> None:
    name = await gated(world, logprobs=(-0.001,) * 5)

    assert world.adapter(name).state == "rejected"
    reason = world.canary(name).reason
    assert reason is not None
    assert "nearly certain" in reason


@pytest.mark.both_stores
async def test_live_replies_that_break_the_schema_of_their_request_roll_back(
    world: World,
) -> None:
    name = await world.to_ramp()
    asked: dict[str, Any] = {"response_format": SCHEMA}
    for number in range(12):
        world.serve(f"c{number}", adapter=name, arm="canary", content='{"town": "Ulm"}', **asked)
    for number in range(12):
        world.serve(f"b{number}", adapter="base", content='{"city": "Ulm"}', **asked)

    await world.controller().tick()

    assert world.canary(name).phase == "rolled_back"
    assert "does not fit the request" in (world.canary(name).reason or "")


def test_an_answer_is_long_at_more_than_twice_the_length() -> None:
    assert lengthening([100, 120], [50, 50]) == {"long": 1.0}
    assert lengthening([50], [101]) == {"long": -1.0}
    assert lengthening([100], [50]) == {"long": 0.0}, "just twice"
    assert lengthening([15], [2]) == {"long": 0.0}, "13 tokens more"
    assert lengthening([18], [2]) == {"long": 1.0}
    assert lengthening([None], [2]) == lengthening([], []) == {}


async def test_a_candidate_that_says_twice_as_much_is_rejected_at_the_gate(world: World) -> None:
    """The judge finds no fault in it."""
    name = await gated(world, logprobs=(-1.0,) * 60)

    assert world.adapter(name).state == "rejected"
    assert "more answers of twice the length than" in (world.canary(name).reason or "")
