"""The rule of a canary, by hand-made evidence for every transition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.canary.gate_store import is_short
from deploy.evidence.live import GUARDS, Guard, Live, Turn
from deploy.evidence.quality import Group, Quality, add_group
from deploy.records import Canary, Phase
from deploy.registry.canary_rule import (
    ArmCounts,
    Comparison,
    Decision,
    Evidence,
    GateEvidence,
    GateVerdict,
    Hold,
    LoadEvidence,
    Move,
    RampEvidence,
    bootstrap_interval,
    decide,
    elapsed_s,
    judge_gate,
    load_wait_s,
    mean_difference,
    quality_of,
    step_limit_s,
)
from deploy.registry.proof_rule import limits_of
from sidecar.settings import Canary as CanarySettings
from support.made_canary import made_canary

LOADING = made_canary(phase="loading", steps=(2_000, 5_000), step_started_at=100.0)
RATIOS: dict[str, float] = dict.fromkeys(GUARDS, 1.5)
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
        prompts=prompts,
        pending=pending,
        verdict=verdict(passed=passed, scored=scored),
        quality=Quality(groups=scored),
        away=away,
    )


def ramp(candidate: ArmCounts, champion: ArmCounts, **more: Any) -> RampEvidence:
    """Evidence in which each reply of the candidate is of a session of its own."""
    return RampEvidence(candidate=candidate, champion=champion, sessions=candidate.replies, **more)


def guards(kind: Guard, canary: int, champion: int, *, weight: float = 0.2) -> Live:
    """What sessions with a bad turn say, the arms mixed as evenly as it goes."""
    live, every = Live(RATIOS), canary + champion
    arms = [(n + 1) * canary // every > n * canary // every for n in range(every)]
    live.read(
        Turn(unit=str(number), canary=arm, weight=weight, bad=frozenset({kind}))
        for number, arm in enumerate(arms)
    )
    return live


def arm(replies: int, *, errors: int = 0, short: int = 0) -> ArmCounts:
    return ArmCounts(replies=replies, errors=errors, short=short)


def gates(reason: str) -> Move:
    return Move(to="gating", candidate_state="gating", reason=reason)


def ramps(reason: str, step: int = 0) -> Move:
    return Move(to="ramping", candidate_state="ramping", reason=reason, step=step)


def rejects(reason: str) -> Move:
    return Move(to="rolled_back", candidate_state="rejected", reason=reason)


def waits(reason: str) -> Hold:
    return Hold(reason=reason, stops_clock=True)


LAST = replace(RAMPING, step=1)
FEW = "gate: 1 comparison scored, 0 set aside in 3600 s; it needs 2"
BAD = RampEvidence(candidate=arm(9, errors=9), champion=arm(9))


@pytest.mark.parametrize(
    ("canary", "evidence", "now", "decision"),
    [
        (LOADING, LoadEvidence(live=True), 101, gates("loaded and live")),
        (LOADING, LoadEvidence(invalid="holds NaN"), 101, rejects("holds NaN")),
        (LOADING, LoadEvidence(away="no reply"), 1e9, waits("waiting for vLLM: no reply")),
        (GATING, gate(scored=4), 101, ramps("passed")),
        (GATING, gate(scored=4, prompts=6, pending=2), 101, ramps("passed")),
        (GATING, gate(scored=4, passed=False), 101, rejects("worse")),
        (GATING, gate(scored=3, pending=1), 101, Hold(reason="gate: 3 of 4 prompts compared")),
        (GATING, gate(scored=2, prompts=3), 101, ramps("passed")),
        (
            GATING,
            gate(scored=0, prompts=1, pending=1),
            1e9,
            waits("gate waits for held-out prompts: 1 of the 2 it needs"),
        ),
        (GATING, gate(scored=0, away="it is down"), 1e9, waits("gate waits: it is down")),
        (GATING, gate(scored=4, away="it is down"), 1e9, waits("gate waits: it is down")),
        (
            GATING,
            gate(scored=1, pending=2),
            3_700,
            Move(to="inconclusive", candidate_state="retired", reason=FEW),
        ),
        (
            LAST,
            ramp(arm(3), arm(3)),
            110,
            Move(
                to="promoted", candidate_state="champion", reason="passed all 2 steps of the ramp"
            ),
        ),
        (
            RAMPING,
            ramp(arm(2), arm(9)),
            101,
            Hold(reason="step 1 of 2 at 20%: 2 of 3 exchanges, 2 sessions (1 needed)"),
        ),
        (replace(RAMPING, paused=True), BAD, 1e9, waits("paused")),
        *[
            (replace(LAST, phase=phase, reason="it ended"), BAD, 1e9, Hold(reason="it ended"))
            for phase in ("promoted", "rolled_back", "inconclusive")
        ],
    ],
)
def test_what_is_decided(
    rules: CanarySettings, canary: Canary, evidence: Evidence, now: float, decision: Decision
) -> None:
    assert decide(canary, evidence, rules, now) == decision


@pytest.mark.parametrize(
    ("failures", "partly", "ended"),
    [(7, False, False), (8, False, True), (33, True, False), (34, True, True)],
)
def test_failed_loads_end_inconclusive_later_where_some_vllm_has_the_adapter(
    rules: CanarySettings, failures: int, partly: bool, ended: bool
) -> None:
    evidence = LoadEvidence(away="500", load_failures=failures, partly=partly)

    decision = decide(LOADING, evidence, rules, 101)

    if ended:
        assert isinstance(decision, Move)
        assert (decision.to, decision.candidate_state) == ("inconclusive", "retired")
    else:
        assert decision == Hold(reason="waiting for vLLM: 500", stops_clock=True)


def test_a_candidate_waits_an_hour_for_one_sick_vllm() -> None:
    """2 + 4 + ... + 64 s, then 128 s each time: the 34th try is 3,582 s after the first."""
    assert sum(load_wait_s(failures) for failures in range(1, 34)) == 3_582.0


@pytest.mark.parametrize(
    ("scored", "now", "ends"),
    [(1, 3_699.9, None), (1, 3_700.0, "inconclusive"), (2, 3_700.0, "ramping")],
)
def test_at_the_gate_s_time_limit_what_is_scored_decides(
    rules: CanarySettings, scored: int, now: float, ends: str | None
) -> None:
    decision = decide(GATING, gate(scored=scored, pending=2), rules, now)

    assert (decision.to if isinstance(decision, Move) else None) == ends


@pytest.mark.parametrize(
    ("promote_on", "counts"),
    [
        ("no_worse", "3 groups compared (3 lost by the candidate), 2 set aside"),
        ("quick", "0 comparisons scored, 5 set aside"),
    ],
)
def test_the_gate_s_time_limit_names_the_counts_that_decided(
    rules: CanarySettings, promote_on: str, counts: str
) -> None:
    evidence = GateEvidence(
        prompts=9,
        pending=4,
        verdict=verdict(scored=0, set_aside=5),
        quality=Quality(groups=3, lost=3, unknown=2),
    )
    asked = rules.model_copy(update={"promote_on": promote_on, "gate_min_prompts": 4})

    assert decide(GATING, evidence, asked, 3_700).reason == (
        f"gate: {counts} in 3600 s; it needs 4"
    )


def test_a_step_needs_both_its_time_and_its_exchanges(rules: CanarySettings) -> None:
    enough = ramp(arm(3), arm(9))
    too_few = ramp(arm(2), arm(9))

    assert isinstance(decide(RAMPING, enough, rules, 109.9), Hold)
    assert isinstance(decide(RAMPING, too_few, rules, 500), Hold)
    assert isinstance(decide(RAMPING, replace(enough, behind=True), rules, 110), Hold)
    assert decide(RAMPING, enough, rules, 110) == Move(
        to="ramping",
        candidate_state="ramping",
        step=1,
        reason="step 1 of 2 passed with 3 exchanges",
    )


def test_a_step_lasts_until_the_guards_have_seen_its_time(rules: CanarySettings) -> None:
    """Requests count `turn_wait_s` after they began."""
    slow = rules.model_copy(update={"turn_wait_s": 50.0})
    enough = ramp(arm(3), arm(9))

    assert isinstance(decide(RAMPING, enough, slow, 159.9), Hold)
    assert isinstance(decide(RAMPING, enough, slow, 160), Move)


def test_a_skipped_step_ends_without_time_and_sessions_but_not_before_its_exchanges_are_read(
    rules: CanarySettings,
) -> None:
    skipped = replace(RAMPING, waived_step=0)

    moved = decide(skipped, ramp(arm(0), arm(0)), rules, 100)

    assert isinstance(moved, Move)
    assert (moved.to, moved.step) == ("ramping", 1)
    assert isinstance(decide(skipped, ramp(arm(0), arm(0), behind=True), rules, 100), Hold)
    assert isinstance(decide(skipped, ramp(arm(9), arm(9), missing_in_a_row=5), rules, 100), Hold)
    later = replace(skipped, step=1)
    assert isinstance(decide(later, ramp(arm(0), arm(0)), rules, 100), Hold)


def test_a_skipped_step_waives_neither_the_guards_nor_the_proof(rules: CanarySettings) -> None:
    last = replace(RAMPING, step=1, waived_step=1)
    proving = rules.model_copy(update={"promote_on": "no_worse"})

    unproven = decide(last, ramp(arm(0), arm(0)), proving, 100)
    bad = ramp(arm(9), arm(9), guards=guards("failed", 20, 0).guards)

    assert isinstance(unproven, Hold)
    assert "waits for proof that it is no worse" in unproven.reason
    harmed = decide(last, bad, rules, 100)
    assert isinstance(harmed, Move)
    assert harmed.to == "rolled_back"


@pytest.mark.parametrize(
    ("conversations", "both", "holds"),
    [(20, 1, False), (20, 2, True), (300, 3, False), (300, 4, True), (0, 0, False)],
)
def test_a_step_is_on_hold_while_over_a_hundredth_of_the_conversations_met_both_arms(
    rules: CanarySettings, conversations: int, both: int, holds: bool
) -> None:
    evidence = ramp(arm(3), arm(3), conversations=conversations, in_both_arms=both)

    decision = decide(RAMPING, evidence, rules, 110)

    assert isinstance(decision, Hold) is holds
    if isinstance(decision, Hold):
        words = f"step 1 stands: {both} of {conversations} conversations met both arms"
        assert decision.reason.startswith(words)
        late = decide(RAMPING, evidence, rules, 100 + rules.step_max_s)
        assert isinstance(late, Move)
        assert (late.to, late.reason) == ("inconclusive", words)


@pytest.mark.parametrize(
    ("canary", "champion", "rolled_back"),
    [(4, 0, False), (5, 0, True), (9, 5, False), (14, 5, True), (20, 80, False)],
)
def test_failing_sessions_roll_back_when_they_are_more_than_the_weight_explains(
    rules: CanarySettings, canary: int, champion: int, rolled_back: bool
) -> None:
    """At 20% and a ratio of 1.5 a failing session is the canary's with 27%: five in a row are 1 in
    660, and the evidence is the mean of gamblers who bet up to 30 times the odds."""
    live = guards("failed", canary, champion)

    decision = decide(RAMPING, ramp(arm(9), arm(9), guards=live.guards), rules, 101)

    assert (isinstance(decision, Move) and decision.to == "rolled_back") is rolled_back


def test_a_rollback_says_what_was_counted(rules: CanarySettings) -> None:
    live = guards("failed", 8, 1)

    decision = decide(RAMPING, ramp(arm(9), arm(9), guards=live.guards), rules, 101)

    assert isinstance(decision, Move)
    assert (decision.to, decision.candidate_state) == ("rolled_back", "rolled_back")
    assert decision.reason.startswith(
        "8 of the canary's sessions and 1 of the champion's failed: evidence from 8 callers: "
    )
    assert decision.reason.endswith(", the limit is 100")


@pytest.mark.parametrize(("kind", "limit"), [("cut", "100"), ("short", "200")])
def test_a_kind_that_groups_see_too_has_half_of_the_level(
    rules: CanarySettings, kind: Guard, limit: str
) -> None:
    live = guards(kind, 9, 0)

    decision = decide(RAMPING, ramp(arm(9), arm(9), guards=live.guards), rules, 101)

    assert isinstance(decision, Move)
    assert decision.reason.endswith(f"the limit is {limit}")


def test_a_promotion_waits_for_a_guard_that_is_not_quiet(rules: CanarySettings) -> None:
    live = guards("failed", 3, 0)
    last = replace(RAMPING, step=1)

    suspected = decide(last, ramp(arm(3), arm(3), guards=live.guards), rules, 110)
    cleared = decide(last, ramp(arm(3), arm(3), guards=guards("failed", 3, 12).guards), rules, 110)

    assert isinstance(suspected, Hold)
    assert "waits for more sessions: 3 of the canary's sessions and 0 of the champion's failed" in (
        suspected.reason
    )
    assert isinstance(cleared, Move)
    assert cleared.to == "promoted"


def test_a_wrong_split_holds_the_step_and_ends_inconclusive(rules: CanarySettings) -> None:
    """100 sessions of either arm where 20% should be the canary's."""
    live = Live(RATIOS)
    live.read(Turn(unit=str(number), canary=number % 2 == 0, weight=0.2) for number in range(200))
    evidence = ramp(arm(9), arm(9), guards=live.guards, mismatch=live.mismatch)

    held, ended = decide(RAMPING, evidence, rules, 200), decide(RAMPING, evidence, rules, 1_100)

    assert isinstance(held, Hold)
    assert held.reason.startswith("step 1 stands: sessions are not split by the weight")
    assert isinstance(ended, Move)
    assert ended.to == "inconclusive"


def test_a_step_without_traffic_ends_inconclusive(rules: CanarySettings) -> None:
    nothing = ramp(arm(0), arm(9))

    assert isinstance(decide(RAMPING, nothing, rules, 28_000), Hold)
    decision = decide(RAMPING, nothing, rules, 28_100)

    assert isinstance(decision, Move)
    assert (decision.to, decision.candidate_state) == ("inconclusive", "retired")
    assert decision.reason == "step 1: 0 of 3 exchanges and 0 of 1 session in 28000 s"


DAY_S = 86_400.0
DEFAULT = CanarySettings()


@pytest.mark.parametrize(
    ("days", "sessions", "limit_days"),
    [
        (1.0, 4, 28.0),  # 20 sessions a day: 4 a day of the canary
        (1.0, 1, 28.0),  # 5 a day
        (1.0, 0, 28.0),  # 3 may have been missed: 20 take 6.7 days
        (4.2, 0, 28.0),  # 20 take 28 days
        (4.3, 0, 1.0),
        (10.0, 5, 28.0),  # 8 in 10 days: 20 take 25 days
        (10.0, 4, 1.0),  # 7 in 10 days: 20 take 28.6 days
    ],
)
def test_a_step_may_take_four_weeks_while_its_sessions_may_still_come(
    days: float, sessions: int, limit_days: float
) -> None:
    evidence = ramp(arm(sessions), arm(9))

    assert step_limit_s(evidence, DEFAULT, days * DAY_S) == limit_days * DAY_S


def test_a_proven_candidate_needs_no_more_sessions_of_a_slow_step() -> None:
    """The last step sees its sessions all the same, and one with doubt stays."""
    began = replace(RAMPING, step_started_at=0.0)
    groups = Quality()
    for _ in range(60):
        groups = add_group(groups, Group(champion=0.1, anchor=0.1), limits_of(DEFAULT))
    few = ramp(arm(4), arm(16), quality=groups)

    early, late = (decide(began, few, DEFAULT, days * DAY_S) for days in (0.9, 1.0))
    last = decide(replace(began, step=1), few, DEFAULT, 2 * DAY_S)
    unproven = decide(began, ramp(arm(4), arm(16)), DEFAULT, 2 * DAY_S)
    doubted = guards("failed", 3, 0).guards
    stays = decide(began, replace(few, guards=doubted), DEFAULT, 2 * DAY_S)

    assert isinstance(late, Move)
    assert (late.to, late.step) == ("ramping", 1)
    assert all(isinstance(one, Hold) for one in (early, last, unproven, stays))


@pytest.mark.parametrize(
    ("groups", "carried", "days", "ends"),
    [(100, 0, 8, False), (100, 0, 28, True), (400, 0, 8, True), (400, 300, 8, False)],
)
def test_the_proof_may_take_four_weeks_where_prompts_are_few(
    groups: int, carried: int, days: int, ends: bool
) -> None:
    """carried: groups of earlier tries, which are no limit to this one."""
    began = replace(RAMPING, step=1, step_started_at=0.0)
    evidence = ramp(arm(50), arm(50), quality=Quality(groups=groups), carried=carried)

    assert isinstance(decide(began, evidence, DEFAULT, days * DAY_S), Move) == ends


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


def test_of_one_thing_a_reason_speaks_in_the_singular(rules: CanarySettings) -> None:
    one = rules.model_copy(update={"step_min_exchanges": 1, "gate_prompts": 1})

    assert [
        decide(RAMPING, ramp(arm(0), arm(9)), one, 100).reason,
        decide(RAMPING, ramp(arm(1), arm(9)), one, 110).reason,
        decide(GATING, gate(scored=0, pending=1), one, 100).reason,
    ] == [
        "step 1 of 2 at 20%: 0 of 1 exchange, 0 of 1 session",
        "step 1 of 2 passed with 1 exchange",
        "gate: 0 of 1 prompt compared",
    ]


# The gate's arithmetic, by hand.


STRICT = CanarySettings(margin=0.05)


def test_difference_is_candidate_minus_champion() -> None:
    assert mean_difference([0.9, 0.5], [0.25, 0.25]) == pytest.approx(0.45)


def test_mean_over_the_prompts_that_were_scored() -> None:
    made = [Comparison(difference=0.25), Comparison(difference=None), Comparison(difference=-0.125)]

    verdict = judge_gate(made, STRICT, seed=1)

    assert verdict.mean_difference == 0.0625
    assert (verdict.scored, verdict.set_aside) == (2, 1)
    assert verdict.passed


@pytest.mark.parametrize(("difference", "passed"), [(-0.04, True), (-0.05, False), (-0.06, False)])
def test_the_candidate_passes_above_minus_the_margin(difference: float, passed: bool) -> None:
    verdict = judge_gate([Comparison(difference=difference)], STRICT, seed=1)

    assert verdict.passed is passed


def test_the_reason_says_numbers() -> None:
    verdict = judge_gate([Comparison(difference=-0.125)] * 2, STRICT, seed=1)

    assert verdict.reason == (
        "gate: scored -0.125 against the champion on 2 held-out prompts, "
        "not above the margin of -0.050"
    )


@pytest.mark.parametrize(
    ("difference", "judged", "margin"),
    [
        (-0.0199, "-0.0199", "above the margin of -0.0200"),
        (-0.01999, "-0.01999", "above the margin of -0.02000"),
        (-0.0201, "-0.0201", "not above the margin of -0.0200"),
        (-0.02, "-0.020", "not above the margin of -0.020"),
        (-0.0189, "-0.019", "above the margin of -0.020"),
    ],
)
def test_numbers_that_differ_do_not_look_equal(difference: float, judged: str, margin: str) -> None:
    rules = STRICT.model_copy(update={"margin": 0.02})

    assert judge_gate([Comparison(difference=difference)], rules, seed=1).reason == (
        f"gate: scored {judged} against the champion on 1 held-out prompt, {margin}"
    )


def test_one_prompt_is_no_prompts() -> None:
    reason = judge_gate([Comparison(difference=0.5)], STRICT, seed=1).reason

    assert reason.startswith(
        "gate: scored +0.500 against the champion on 1 held-out prompt, above "
    )


def test_answers_of_set_aside_comparisons_count_for_the_guard() -> None:
    made = [
        Comparison(difference=0.5, candidate_answers=1, champion_answers=1),
        Comparison(difference=None, candidate_answers=1, candidate_short=1, champion_answers=1),
    ]

    verdict = judge_gate(made, STRICT, seed=1)

    assert verdict.candidate_short_share == 0.5


def test_nothing_scored_does_not_pass() -> None:
    verdict = judge_gate([], STRICT, seed=1)

    assert not verdict.passed
    assert verdict.mean_difference is None
    assert (verdict.low, verdict.high) == (None, None)


def test_the_interval_of_equal_values_is_that_value() -> None:
    assert bootstrap_interval([0.25] * 5, seed=3) == (0.25, 0.25)


def test_the_interval_is_the_same_for_the_same_seed_and_holds_the_mean() -> None:
    values = [0.0, 0.5, 1.0, 0.25, 0.75]

    low, high = bootstrap_interval(values, seed=3)

    assert (low, high) == bootstrap_interval(values, seed=3)
    # 5 values with standard deviation 0.354: the mean's is 0.158, two of them on either side.
    assert 0.15 <= low <= 0.30
    assert 0.70 <= high <= 0.85


@pytest.mark.parametrize(
    ("message", "finish_reason", "short"),
    [
        ({"content": "Yes."}, "stop", False),
        ({"content": "Yes, but"}, "length", True),
        ({"content": " \n"}, "stop", True),
        ({"content": None}, "stop", True),
        ({"content": None, "tool_calls": [{"id": "1"}]}, "tool_calls", False),
        ({"content": [{"type": "text", "text": "Yes."}]}, "stop", False),
        ({}, None, True),
    ],
)
def test_short_means_cut_or_saying_nothing(
    message: dict[str, object], finish_reason: str | None, short: bool
) -> None:
    assert is_short(message, finish_reason) is short


def test_a_group_without_a_score_of_the_anchor_is_no_evidence_for_it() -> None:
    """The champion's difference must not stand in for the anchor's, who may be far better."""
    limits = limits_of(CanarySettings())
    made = [Comparison(difference=0.1) for _ in range(100)]

    alone = quality_of(made, limits, anchored=False)
    beside = quality_of(made, limits, anchored=True)

    assert alone.anchored == alone.no_worse
    assert beside.no_worse == alone.no_worse
    assert (beside.groups, beside.anchored.observations) == (100, 0)


def test_a_scored_anchor_is_evidence_in_a_canary_that_has_one() -> None:
    made = [Comparison(difference=0.1, anchor_difference=-0.2)]

    quality = quality_of(made, limits_of(CanarySettings()), anchored=True)

    assert quality.anchored.log_e < 0.0 < quality.no_worse.log_e
