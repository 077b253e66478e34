"""The rule of a canary, by hand-made evidence for every transition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.records import Canary, Phase
from deploy.registry.canary_rule import (
    ArmCounts,
    GateEvidence,
    Hold,
    LoadEvidence,
    Move,
    RampEvidence,
    decide,
    elapsed_s,
)
from deploy.registry.gate_rule import GateVerdict
from sidecar.settings import Canary as CanarySettings

LOADING = Canary(
    canary_id="c1",
    model="m",
    candidate="m--v2",
    champion="m--v1",
    phase="loading",
    paused=False,
    reason=None,
    step=0,
    steps=(2_000, 5_000),
    salt="s",
    created_at=0.0,
    step_started_at=100.0,
    stopped_s=0.0,
    stopped_at=None,
    ended_at=None,
    generation=1,
)
GATING = replace(LOADING, phase="gating")
RAMPING = replace(LOADING, phase="ramping")


def verdict(*, passed: bool = True, scored: int, set_aside: int = 0) -> GateVerdict:
    return GateVerdict(
        passed=passed,
        reason="passed" if passed else "worse",
        scored=scored,
        set_aside=set_aside,
        mean_difference=0.0,
        low=0.0,
        high=0.0,
        candidate_short_share=0.0,
        champion_short_share=0.0,
    )


def gate(
    *, scored: int, prompts: int = 4, pending: int = 0, passed: bool = True, away: str | None = None
) -> GateEvidence:
    return GateEvidence(
        prompts=prompts, pending=pending, verdict=verdict(passed=passed, scored=scored), away=away
    )


def arm(replies: int, *, errors: int = 0, short: int = 0) -> ArmCounts:
    return ArmCounts(replies=replies, errors=errors, short=short)


def test_a_live_adapter_goes_to_the_gate(rules: CanarySettings) -> None:
    assert decide(LOADING, LoadEvidence(live=True), rules, 101) == Move(
        to="gating", candidate_state="gating", reason="loaded and live"
    )


def test_an_invalid_adapter_is_rejected(rules: CanarySettings) -> None:
    decision = decide(LOADING, LoadEvidence(invalid="holds NaN"), rules, 101)

    assert decision == Move(to="rolled_back", candidate_state="rejected", reason="holds NaN")


def test_loading_waits_for_vllm_with_the_clock_stopped(rules: CanarySettings) -> None:
    decision = decide(LOADING, LoadEvidence(away="no reply"), rules, 1e9)

    assert decision == Hold(reason="waiting for vLLM: no reply", stops_clock=True)


@pytest.mark.parametrize(("failures", "rejected"), [(7, False), (8, True)])
def test_the_eighth_failed_load_rejects(
    rules: CanarySettings, failures: int, rejected: bool
) -> None:
    evidence = LoadEvidence(away="500", load_failures=failures)

    assert isinstance(decide(LOADING, evidence, rules, 101), Move) is rejected


def test_a_passed_gate_starts_the_ramp_at_its_first_step(rules: CanarySettings) -> None:
    assert decide(GATING, gate(scored=4), rules, 101) == Move(
        to="ramping", candidate_state="ramping", reason="passed", step=0
    )


def test_a_lost_gate_rejects(rules: CanarySettings) -> None:
    assert decide(GATING, gate(scored=4, passed=False), rules, 101) == Move(
        to="rolled_back", candidate_state="rejected", reason="worse"
    )


def test_the_gate_goes_on_while_prompts_are_pending(rules: CanarySettings) -> None:
    assert decide(GATING, gate(scored=3, pending=1), rules, 101) == Hold(
        reason="gate: 3 of 4 prompts judged"
    )


def test_the_gate_decides_on_what_there_is_when_no_prompt_is_left(rules: CanarySettings) -> None:
    decision = decide(GATING, gate(scored=2, prompts=3, pending=0), rules, 101)

    assert isinstance(decision, Move)
    assert decision.to == "ramping"


def test_the_gate_waits_for_held_out_prompts_without_end(rules: CanarySettings) -> None:
    decision = decide(GATING, gate(scored=0, prompts=1, pending=1), rules, 1e9)

    assert decision == Hold(
        reason="gate waits for held-out prompts: 1 of the 2 it needs", stops_clock=True
    )


def test_an_absent_judge_neither_passes_nor_fails_whatever_the_time(rules: CanarySettings) -> None:
    for scored in (0, 4):
        evidence = gate(scored=scored, away="judge is down", passed=scored > 0)

        assert decide(GATING, evidence, rules, 1e9) == Hold(
            reason="gate waits: judge is down", stops_clock=True
        )


@pytest.mark.parametrize(
    ("scored", "now", "ends"),
    [(1, 199.9, None), (1, 200.0, "inconclusive"), (2, 200.0, "ramping")],
)
def test_at_the_gate_s_time_limit_what_is_scored_decides(
    rules: CanarySettings, scored: int, now: float, ends: str | None
) -> None:
    decision = decide(GATING, gate(scored=scored, pending=2), rules, now)

    assert (decision.to if isinstance(decision, Move) else None) == ends


def test_an_inconclusive_candidate_is_retired(rules: CanarySettings) -> None:
    decision = decide(GATING, gate(scored=1, pending=2), rules, 200)

    assert decision == Move(
        to="inconclusive",
        candidate_state="retired",
        reason="gate: 1 comparisons scored, 0 set aside in 100 s; it needs 2",
    )


def test_a_step_needs_both_its_time_and_its_exchanges(rules: CanarySettings) -> None:
    enough = RampEvidence(candidate=arm(3), champion=arm(9))
    too_few = RampEvidence(candidate=arm(2), champion=arm(9))

    assert isinstance(decide(RAMPING, enough, rules, 109.9), Hold)
    assert isinstance(decide(RAMPING, too_few, rules, 500), Hold)
    assert decide(RAMPING, enough, rules, 110) == Move(
        to="ramping",
        candidate_state="ramping",
        step=1,
        reason="step 1 of 2 passed with 3 exchanges",
    )


def test_the_last_step_promotes(rules: CanarySettings) -> None:
    decision = decide(
        replace(RAMPING, step=1), RampEvidence(candidate=arm(3), champion=arm(3)), rules, 110
    )

    assert decision == Move(
        to="promoted", candidate_state="champion", reason="passed all 2 steps of the ramp"
    )


def test_a_hold_in_the_ramp_says_weight_and_progress(rules: CanarySettings) -> None:
    decision = decide(RAMPING, RampEvidence(candidate=arm(2), champion=arm(9)), rules, 101)

    assert decision == Hold(reason="step 1 of 2 at 20%: 2 of 3 exchanges")


def test_more_failed_replies_than_the_champion_roll_back(rules: CanarySettings) -> None:
    evidence = RampEvidence(candidate=arm(10, errors=2), champion=arm(20, errors=1))

    decision = decide(RAMPING, evidence, rules, 101)

    assert decision == Move(
        to="rolled_back",
        candidate_state="rolled_back",
        reason="20% of the canary's 10 replies failed, 5% of the champion's 20: over by more than "
        "10%",
    )


@pytest.mark.parametrize(
    ("candidate", "champion", "trips"),
    [
        (arm(4, short=1), arm(4), False),  # 25% over, which is not more than 25%
        (arm(4, short=2), arm(4), True),
        (arm(4, short=4), arm(4, short=3), False),
        (arm(4, short=4), arm(4, short=2), True),
        (arm(10, errors=1), arm(10), False),  # 10% over, which is not more than 10%
        (arm(10, errors=4), arm(10, errors=4), False),
    ],
)
def test_guards_compare_with_the_champion(
    rules: CanarySettings, candidate: ArmCounts, champion: ArmCounts, trips: bool
) -> None:
    decision = decide(RAMPING, RampEvidence(candidate=candidate, champion=champion), rules, 101)

    assert (isinstance(decision, Move) and decision.to == "rolled_back") is trips


def test_guards_wait_for_a_step_s_exchanges_or_five_bad_replies() -> None:
    rules = CanarySettings(step_min_exchanges=20, steps=(2_000,))

    four = RampEvidence(candidate=arm(4, errors=4), champion=arm(50))
    five = RampEvidence(candidate=arm(5, errors=5), champion=arm(50))

    assert isinstance(decide(RAMPING, four, rules, 101), Hold)
    assert isinstance(decide(RAMPING, five, rules, 101), Move)


def test_a_step_without_traffic_ends_inconclusive(rules: CanarySettings) -> None:
    nothing = RampEvidence(candidate=arm(0), champion=arm(9))

    decision = decide(RAMPING, nothing, rules, 1_100)

    assert isinstance(decision, Move)
    assert (decision.to, decision.candidate_state) == ("inconclusive", "retired")
    assert decision.reason == "step 1: 0 of 3 exchanges in 1000 s"


def test_a_paused_canary_does_nothing(rules: CanarySettings) -> None:
    bad = RampEvidence(candidate=arm(9, errors=9), champion=arm(9))

    assert isinstance(decide(replace(RAMPING, paused=True), bad, rules, 1e9), Hold)


@pytest.mark.parametrize(
    ("phase", "state"),
    [("loading", "rejected"), ("gating", "rejected"), ("ramping", "rolled_back")],
)
@pytest.mark.parametrize("damage", [{"steps": ()}, {"step": 2}, {"step": -1}])
def test_a_canary_whose_ramp_cannot_be_read_ends(
    rules: CanarySettings, phase: Phase, state: str, damage: dict[str, Any]
) -> None:
    canary = replace(LOADING, phase=phase, **damage)

    decision = decide(canary, LoadEvidence(live=True), rules, 1e9)

    assert isinstance(decision, Move)
    assert (decision.to, decision.candidate_state) == ("rolled_back", state)
    assert canary.weight_bp == 0


@pytest.mark.parametrize("phase", ["promoted", "rolled_back", "inconclusive"])
def test_an_ended_canary_never_changes(rules: CanarySettings, phase: Phase) -> None:
    ended = replace(RAMPING, phase=phase, step=1)
    bad = RampEvidence(candidate=arm(9, errors=9), champion=arm(9))

    assert isinstance(decide(ended, bad, rules, 1e9), Hold)


def test_evidence_of_another_phase_is_a_defect(rules: CanarySettings) -> None:
    with pytest.raises(TypeError, match="LoadEvidence is not the evidence of ramping"):
        decide(RAMPING, LoadEvidence(live=True), rules, 101)


@pytest.mark.parametrize(
    ("stopped_s", "stopped_at", "elapsed"), [(0, None, 50), (20, None, 30), (20, 130, 10)]
)
def test_the_clock_stands_while_stopped(
    stopped_s: float, stopped_at: float | None, elapsed: float
) -> None:
    canary = replace(LOADING, stopped_s=stopped_s, stopped_at=stopped_at)

    assert elapsed_s(canary, 150.0) == elapsed
