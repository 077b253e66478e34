"""What judged groups decide: Kayenta's classifier suite and TensorZero's, asked of our rule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deploy.canary.gate import Gate
from deploy.evidence.live import Live, Turn
from deploy.evidence.quality import Fault, Group, Quality, add_group
from deploy.registry import proof_rule
from deploy.registry.canary_rule import ArmCounts, Decision, Hold, Move, RampEvidence, decide
from deploy.registry.proof_rule import limits_of, ratios_of
from sidecar.settings import Canary as CanarySettings
from sidecar.store.models import GateComparisonRow
from support.made_canary import made_canary

if TYPE_CHECKING:
    from tests.deploy.conftest import World
    from tests.deploy.scenarios.conftest import Stage

RULES = CanarySettings(
    steps=(5_000,),
    step_min_s=10.0,
    turn_wait_s=0.0,
    step_min_exchanges=3,
    step_min_sessions=3,
    max_groups=600,
)
CANARY = made_canary()


def groups(
    *differences: float | None, fault: Fault | None = None, rules: CanarySettings = RULES
) -> Quality:
    """Each group's mean score of the candidate minus the champion's, who is the anchor too."""
    quality = Quality()
    for one in differences:
        group = Group(champion=one, anchor=one, fault=fault if one is None else None)
        quality = add_group(quality, group, limits_of(rules))
    return quality


def ends(quality: Quality, *, rules: CanarySettings = RULES, live: Live | None = None) -> Decision:
    """What is decided after the last step."""
    counts = ArmCounts(replies=50, errors=0, short=0)
    seen = Live(ratios_of()) if live is None else live
    evidence = RampEvidence(
        candidate=counts, champion=counts, sessions=50, quality=quality, guards=seen.guards
    )
    return decide(CANARY, evidence, rules, 20.0)


def phase(decision: Decision) -> str:
    return decision.to if isinstance(decision, Move) else "held"


def noise(mean: float, count: int, *, seed: int = 3) -> list[float]:
    rng = random.Random(seed)
    return [max(-1.0, min(1.0, rng.gauss(mean, 0.35))) for _ in range(count)]


# Kayenta


def test_identical_data_is_neither_worse_nor_better() -> None:
    quality = groups(*[0.0] * 200)

    assert proof_rule.harm(quality) is None
    assert phase(ends(quality)) == "promoted"
    better = RULES.model_copy(update={"promote_on": "better"})
    assert phase(ends(quality, rules=better)) == "held"


def test_tied_groups_are_counted_and_not_dropped() -> None:
    """Without them five wins would be all that is known."""
    wins, tied = [0.5] * 5, [0.0] * 300

    assert groups(*wins, *tied).groups == 305
    better = RULES.model_copy(update={"promote_on": "better"})
    assert phase(ends(groups(*wins, *tied), rules=better)) == "held"


def test_scores_of_zero_are_scores() -> None:
    """Both arms get 0 from the judge in every group: Kayenta divides by the mean."""
    quality = groups(*[0.0 - 0.0] * 200)

    assert (quality.groups, quality.unknown) == (200, 0)
    assert phase(ends(quality)) == "promoted"


@pytest.mark.parametrize(
    ("fault", "ended"), [("unknown", "held"), ("candidate", "rolled_back"), ("champion", "held")]
)
def test_half_of_the_groups_missing(fault: Fault, ended: str) -> None:
    """Missing because of the candidate is evidence against it; of anybody else, no evidence."""
    scored, missing = [0.05] * 60, [None] * 61
    mixed = [one for pair in zip([*scored, 0.05], missing, strict=True) for one in pair]

    assert phase(ends(groups(*mixed[1:], fault=fault))) == ended


def test_a_quarter_missing_holds_nobody_up() -> None:
    assert phase(ends(groups(*[0.2, 0.2, 0.2, None] * 40, fault="unknown"))) == "promoted"


def test_a_champion_without_errors_is_a_baseline() -> None:
    """Spinnaker's issue 5622: 0 against some came out as "not available", and passed."""
    live = Live(ratios_of())
    for number in range(40):
        bad = frozenset({"failed"}) if number % 2 else frozenset()
        live.read([Turn(unit=f"c{number}", canary=True, weight=0.5, bad=bad)])
        live.read([Turn(unit=f"b{number}", canary=False, weight=0.5)])

    decision = ends(groups(*[0.2] * 100), live=live)

    assert phase(decision) == "rolled_back"
    assert "20 of the canary's sessions and 0 of the champion's failed" in decision.reason


def test_no_data_promotes_nobody_and_rolls_nobody_back() -> None:
    """Kayenta scores a group without data 100."""
    assert phase(ends(groups())) == "held"
    assert phase(ends(groups(*[None] * 100, fault="unknown"))) == "held"


def test_the_sign_decides() -> None:
    up, down = noise(0.2, 200), [-one for one in noise(0.2, 200)]

    assert phase(ends(groups(*up))) == "promoted"
    assert phase(ends(groups(*down))) == "rolled_back"
    assert groups(*down).harm.peak == pytest.approx(groups(*up).better.peak), "one bet, mirrored"


# TensorZero


def test_few_samples_decide_nothing_however_good_they_are() -> None:
    assert phase(ends(groups(1.0, 1.0, 1.0))) == "held"


def test_a_smaller_margin_takes_more_groups() -> None:
    strict = RULES.model_copy(update={"margin": 0.02})

    assert needed(strict) > needed(RULES)


def needed(rules: CanarySettings) -> int:
    """Groups of an equal candidate until it is promoted."""
    quality = Quality()
    for number, difference in enumerate(noise(0.0, 5_000), 1):
        group = Group(champion=difference, anchor=difference)
        quality = add_group(quality, group, limits_of(rules))
        if proof_rule.lacking(quality, frozenset(), rules) is None:
            return number
    raise AssertionError("never")


async def test_who_has_won_or_lost_takes_part_no_more(world: World, stage: Stage) -> None:
    won, lost = world.register(1), world.register(2, values=(0.25, 0.5))
    world.promote(won)
    assert (world.table().champion, world.table().canary) == (won, None)
    await stage.to_ramp(lost)

    stage.act("abort", lost)

    assert (world.table().champion, world.table().canary) == (won, None)


async def test_a_control_that_starts_after_the_end_decides_nothing_again(
    world: World, stage: Stage
) -> None:
    """TensorZero's cold start with a finished experiment."""
    name = world.register(1)
    await stage.to_ramp(name)
    await stage.pass_step(name)
    await stage.pass_step(name)
    ended, events = world.canary(name), stage.events

    world.clock.now += 1_000.0
    await stage.tick(5)

    assert ended.phase == "promoted"
    assert world.canary(name) == ended
    assert stage.events == events


@pytest.mark.parametrize("ended", ["promoted", "rolled_back"])
async def test_a_late_score_flips_no_verdict(world: World, stage: Stage, ended: str) -> None:
    """TensorZero's PR 4163: there, new data bring a stopped experiment back."""
    name = world.register(1)
    await stage.to_ramp(name)
    if ended == "promoted":
        await stage.pass_step(name)
        await stage.pass_step(name)
    else:
        stage.act("abort", name)
    events = stage.events
    with world.database.write() as session:
        for row in session.query(GateComparisonRow):
            row.difference = -1.0 if ended == "promoted" else 1.0
    for number in range(50):
        world.serve(
            f"late-{number}", adapter=name, arm="canary", status=500, outcome="upstream_error"
        )

    await stage.tick(5)

    assert world.canary(name).phase == ended
    assert world.aliases()["champion"] == (name if ended == "promoted" else "base")
    assert stage.events == events


async def test_a_group_that_ends_after_the_verdict_is_of_no_consequence(
    world: World, stage: Stage
) -> None:
    """The judge answers a shadow's group when an operator has ended the canary meanwhile."""
    name = world.register(1)
    await stage.to_ramp(name)
    gate: Gate = world.gate()
    canary = world.canary(name)
    stage.act("abort", name)
    events = stage.events

    await gate.shadow(canary)
    await stage.tick(3)

    assert world.canary(name).phase == "rolled_back"
    assert stage.events == events


# the split of traffic


def test_traffic_that_is_not_split_by_the_weight_holds_the_canary_within_4000_sessions() -> None:
    """The weight says 50%, and 45% arrive."""
    rng, live = random.Random(1), Live(ratios_of())
    limit = proof_rule.threshold(proof_rule.SPLIT_LEVEL)
    sessions = 0
    while live.mismatch < limit:
        live.read([Turn(unit=str(sessions), canary=rng.random() < 0.45, weight=0.5)])
        sessions += 1
        assert sessions <= 4_000
    counts = ArmCounts(replies=50, errors=0, short=0)
    evidence = RampEvidence(
        candidate=counts, champion=counts, sessions=50, quality=groups(*[0.5] * 100)
    )

    decision = decide(CANARY, replace(evidence, mismatch=live.mismatch), RULES, 20.0)

    assert phase(decide(CANARY, evidence, RULES, 20.0)) == "promoted"
    assert isinstance(decision, Hold)
    assert "sessions are not split by the weight" in decision.reason
