"""When a canary that must be proven is promoted, refused, held or given up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from deploy.evidence.betting import Bets
from deploy.evidence.live import GuardState
from deploy.evidence.quality import Group, Quality, add_group
from deploy.registry.canary_rule import (
    EVIDENCE_MAX_S,
    SLOWEST_PROOF,
    ArmCounts,
    Comparison,
    Decision,
    GateEvidence,
    Hold,
    Move,
    RampEvidence,
    decide,
    judge_gate,
    quality_of,
)
from deploy.registry.proof_rule import (
    anchor_after,
    describe,
    flaw_suspicion,
    gate_doubt,
    gate_prompts,
    guard_harm,
    harm,
    limits_of,
    odds,
    proven,
    suspicion,
    threshold,
    too_many_missing,
)
from sidecar.settings import Canary as CanarySettings
from support.made_canary import made_canary

RULES = CanarySettings(
    gate_prompts=10,
    gate_min_prompts=4,
    steps=(5_000,),
    step_min_s=10.0,
    turn_wait_s=0.0,
    step_min_exchanges=3,
    step_min_sessions=3,
    max_groups=400,
)
RAMPING = made_canary()
GATING = replace(RAMPING, phase="gating")


def judged(
    champion: float | None, anchor: float | None = None, *, groups: int, **more: Any
) -> Quality:
    quality = Quality()
    for _ in range(groups):
        group = Group(champion=champion, anchor=champion if anchor is None else anchor, **more)
        quality = add_group(quality, group, limits_of(RULES))
    return quality


def at_the_end(
    quality: Quality, *, rules: CanarySettings = RULES, now: float = 20.0, **more: Any
) -> Decision:
    counts = ArmCounts(replies=9, errors=0, short=0)
    evidence = RampEvidence(candidate=counts, champion=counts, sessions=9, quality=quality, **more)
    return decide(RAMPING, evidence, rules, now)


def at_the_gate(quality: Quality, *, pending: int = 0) -> Decision:
    evidence = GateEvidence(
        prompts=10, pending=pending, verdict=judge_gate([], RULES, seed=1), quality=quality
    )
    return decide(GATING, evidence, RULES, 20.0)


def phase(decision: Decision) -> str:
    return decision.to if isinstance(decision, Move) else "held"


@pytest.mark.parametrize(
    ("proven", "promoted", "after"),
    [
        ((), True, "m--v0"),
        (("no_worse", "anchored"), True, "m--v0"),
        (("over_anchor",), True, "m--v2"),
        (("over_anchor",), False, "m--v0"),
        (("champion_over_anchor",), False, "m--v1"),
        (("champion_over_anchor", "over_anchor"), True, "m--v1"),
        (("champion_over_anchor", "over_anchor", "better"), True, "m--v2"),
        (("better",), True, "m--v0"),
    ],
)
def test_the_anchor_moves_to_what_is_proven_better_than_it(
    proven: tuple[str, ...], promoted: bool, after: str
) -> None:
    """v0 is the anchor, v1 the champion, v2 the candidate."""
    canary = made_canary(anchor="m--v0", champion="m--v1", proven=frozenset(proven))

    assert anchor_after(canary, promoted=promoted) == after


def test_a_first_version_that_is_better_than_the_base_is_the_anchor() -> None:
    canary = made_canary(anchor="base", champion="base", proven=frozenset({"over_anchor"}))

    assert anchor_after(canary, promoted=True) == canary.candidate
    assert anchor_after(canary, promoted=False) == "base"


def test_quick_proves_nothing_of_an_anchor_that_it_does_not_ask() -> None:
    rules = RULES.model_copy(update={"promote_on": "quick"})
    sure = judged(0.5, groups=60)

    assert "over_anchor" in proven(sure, RULES)
    assert "over_anchor" not in proven(sure, rules)


def test_without_groups_nobody_is_promoted() -> None:
    decision = at_the_end(Quality())

    assert isinstance(decision, Hold)
    assert decision.reason.startswith(
        "the one step passed; waits for proof that it is no worse than the champion: "
        "evidence 1 of 20; "
    )


def test_an_equal_candidate_is_promoted_when_it_is_proven_no_worse_than_both() -> None:
    enough, too_few = judged(0.0, groups=200), judged(0.0, groups=90)

    assert proven(enough, RULES) == {"no_worse", "anchored"}
    assert phase(at_the_end(too_few)) == "held"
    decision = at_the_end(enough)
    assert isinstance(decision, Move)
    assert decision.to == "promoted"
    assert decision.reason.startswith(
        "passed the one step of the ramp; it scored 0.000 higher than the champion (95% interval -"
    )
    assert decision.reason.endswith(", 200 comparisons)")


def test_a_candidate_that_lost_to_the_anchor_is_not_promoted() -> None:
    decision = at_the_end(judged(0.05, -0.05, groups=200))

    assert isinstance(decision, Hold)
    assert "no worse than the anchor" in decision.reason


def test_better_asks_for_more_than_no_worse() -> None:
    rules = RULES.model_copy(update={"promote_on": "better"})

    assert phase(at_the_end(judged(0.0, groups=200), rules=rules)) == "held"
    assert phase(at_the_end(judged(0.1, groups=100), rules=rules)) == "promoted"


def test_a_proof_of_an_earlier_look_stands() -> None:
    none = judged(0.0, groups=10)

    assert phase(at_the_end(none)) == "held"
    assert phase(at_the_end(none, proven=frozenset({"no_worse", "anchored"}))) == "promoted"


@pytest.mark.parametrize("at", ["gate", "ramp"])
def test_harm_ends_a_canary_in_any_phase(at: str) -> None:
    quality = judged(-0.4, groups=40)

    decision = at_the_gate(quality) if at == "gate" else at_the_end(quality)

    assert isinstance(decision, Move)
    assert decision.to == "rolled_back"
    assert "worse than the champion in " in decision.reason
    assert decision.candidate_state == ("rejected" if at == "gate" else "rolled_back")


def test_harm_is_decided_before_a_promotion() -> None:
    """Slightly worse for long: within the margin, and proven worse."""
    quality = judged(-0.03, groups=400)

    assert "no_worse" in proven(quality, RULES) or quality.no_worse.peak > 0
    both = replace(
        quality, no_worse=judged(0.0, groups=300).no_worse, harm=judged(-0.4, groups=40).harm
    )
    assert phase(at_the_end(both)) == "rolled_back"


def test_the_gate_lets_pass_what_is_not_proven_harmful_and_says_so() -> None:
    decision = at_the_gate(judged(-0.1, groups=10))

    assert isinstance(decision, Move)
    assert decision.to == "ramping"
    assert decision.reason.startswith("gate: no harm shown on 10 prompts; difference")


def test_a_gate_whose_groups_are_mostly_missing_proves_nothing() -> None:
    """18 of 24 set aside, and the other 6 are good."""
    made = [Comparison(difference=0.5)] * 6 + [Comparison(difference=None)] * 18

    decision = at_the_gate(quality_of(made, limits_of(RULES), anchored=False))

    assert isinstance(decision, Move)
    assert decision.to == "inconclusive"
    assert decision.reason == (
        "gate: 18 of 24 groups could not be scored, so the others prove nothing"
    )


def test_groups_missing_because_of_the_candidate_are_evidence_against_it() -> None:
    made = [Comparison(difference=0.5)] * 6
    made += [Comparison(difference=None, fault="candidate")] * 18

    decision = at_the_gate(quality_of(made, limits_of(RULES), anchored=False))

    assert isinstance(decision, Move)
    assert (decision.to, decision.candidate_state) == ("rolled_back", "rejected")


def test_answers_that_are_flawed_on_the_same_prompts_end_it_whatever_the_judge_says() -> None:
    decision = at_the_end(judged(0.2, groups=25, flaws={"invalid": 1.0}))

    assert isinstance(decision, Move)
    assert decision.to == "rolled_back"
    assert decision.reason.startswith("more invalid tool calls or JSON than the champion in ")


@pytest.mark.parametrize(
    ("groups", "now", "ends"),
    [(50, 20.0, "held"), (50, SLOWEST_PROOF * EVIDENCE_MAX_S, "inconclusive")],
)
def test_the_deadline_keeps_the_champion(groups: int, now: float, ends: str) -> None:
    assert phase(at_the_end(judged(0.0, groups=groups), now=now)) == ends


def test_the_last_group_keeps_the_champion() -> None:
    rules = RULES.model_copy(update={"max_groups": 50})

    decision = at_the_end(judged(0.0, groups=50), rules=rules)

    assert isinstance(decision, Move)
    assert (decision.to, decision.candidate_state) == ("inconclusive", "retired")


def test_a_judge_that_is_away_stops_the_clock_of_the_proof() -> None:
    decision = at_the_end(judged(0.0, groups=10), away="judge is down")

    assert decision == Hold(reason="the evidence waits: judge is down", stops_clock=True)


def test_a_promotion_waits_for_a_guard_of_judged_groups_that_is_not_quiet() -> None:
    """Evidence of over 100, where 200 roll back, must not be promoted."""
    quality = judged(0.05, groups=300, flaws={"invalid": 0.0})
    while math.exp(quality.flaws["invalid"].log_e) < 100.0:
        quality = add_group(
            quality, Group(champion=0.05, anchor=0.05, flaws={"invalid": 1.0}), limits_of(RULES)
        )
    assert math.exp(quality.flaws["invalid"].peak) < 200.0

    suspected = at_the_end(quality)

    assert isinstance(suspected, Hold)
    assert (
        "waits for more groups: more invalid tool calls or JSON than the champion, evidence 1"
        in (suspected.reason)
    )
    while math.exp(quality.flaws["invalid"].log_e) >= 5.0:
        quality = add_group(
            quality, Group(champion=0.05, anchor=0.05, flaws={"invalid": -1.0}), limits_of(RULES)
        )
    assert phase(at_the_end(quality)) == "promoted"


def test_the_quick_rule_judges_no_group_that_could_settle_a_suspicion() -> None:
    quality = judged(0.05, groups=300, flaws={"invalid": 0.0})
    while math.exp(quality.flaws["invalid"].log_e) < 6.0:
        quality = add_group(
            quality, Group(champion=0.05, anchor=0.05, flaws={"invalid": 1.0}), limits_of(RULES)
        )

    assert phase(at_the_end(quality)) == "held"
    quick = RULES.model_copy(update={"promote_on": "quick"})
    assert phase(at_the_end(quality, rules=quick)) == "promoted"


def test_harm_that_was_proven_stays_proven() -> None:
    """Ville's inequality bounds the largest evidence: later good groups take nothing back."""
    quality = judged(-0.4, groups=40)
    while math.exp(quality.harm.log_e) >= 1.0:
        quality = add_group(quality, Group(champion=0.5, anchor=0.5), limits_of(RULES))

    assert phase(at_the_end(quality)) == "rolled_back"


def test_one_group_is_no_groups() -> None:
    quality = judged(-1.0, groups=1)
    once = replace(quality, harm=replace(quality.harm, peak=10.0, peak_at=1))
    flaws = {"short": replace(quality.harm, peak=10.0, peak_at=1)}

    assert describe(quality).endswith(" by 1 group")
    assert (harm(once) or "").startswith("worse than the champion in 1 group: evidence ")
    assert "than the champion in 1 group: evidence " in (harm(replace(quality, flaws=flaws)) or "")
    assert too_many_missing(Quality(unknown=1)).startswith("1 of 1 group could not be scored")


def test_the_interval_names_the_groups_that_it_rests_on() -> None:
    """One group in favour, and 30 that the champion lost: those move the interval too."""
    quality = judged(1.0, groups=1)
    for _ in range(30):
        lost = Group(champion=None, anchor=None, fault="champion")
        quality = add_group(quality, lost, limits_of(RULES))

    assert (quality.groups, quality.chart.observations) == (1, 31)
    assert describe(quality).endswith(" by 31 groups")


@pytest.mark.parametrize(
    ("evidence", "shown"),
    [(19.99, "19.9"), (20.0, "20"), (1.0, "1"), (0.0129, "0.0129"), (199.9, "199"), (5.0, "5")],
)
def test_evidence_is_rounded_down(evidence: float, shown: str) -> None:
    assert odds(math.log(evidence)) == shown


def test_evidence_just_below_its_limit_does_not_look_as_if_it_had_reached_it() -> None:
    nearly = replace(Quality().no_worse, peak=math.log(19.99))

    assert "evidence 19.9 of 20; " in at_the_end(replace(Quality(), no_worse=nearly)).reason


def test_evidence_that_reached_a_limit_of_many_digits_does_not_look_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HARM_LEVEL", "GUARD_LEVEL"):
        monkeypatch.setattr(f"deploy.registry.proof_rule.{name}", 0.03)
    over = replace(Quality().harm, peak=math.log(33.34), peak_at=9)
    guards = {"cut": GuardState(canary=9, champion=0, by_caller=over, callers=9)}

    assert (harm(replace(Quality(), harm=over)) or "").endswith("33.3, the limit is 33.3")
    assert (guard_harm(guards) or "").endswith("33.3, the limit is 33.3")


@pytest.mark.parametrize(("more", "waits"), [(0.0, False), (0.001, True)])
def test_a_guard_is_suspicious_over_5_and_not_at_5(more: float, waits: bool) -> None:
    """As docs/canary.md says."""
    bets = Bets(log_wealth=(threshold(1.0 / 5.0) + more,) * 7)
    guards = {"cut": GuardState(canary=1, champion=1, bets=bets)}
    quality = replace(Quality(), flaws={"short": bets})

    assert (suspicion(guards, Quality(), RULES) is not None) is waits
    assert (flaw_suspicion(quality, RULES) is not None) is waits


def test_the_gate_judges_three_times_as_many_while_it_doubts_a_candidate() -> None:
    doubted, quick = judged(-0.3, groups=13), RULES.model_copy(update={"promote_on": "quick"})

    assert 5.0 < math.exp(doubted.harm.log_e) < 20.0
    assert gate_prompts(doubted, RULES) == 3 * RULES.gate_prompts
    assert gate_prompts(judged(-0.03, groups=13), RULES) == RULES.gate_prompts
    assert gate_prompts(doubted, quick) == RULES.gate_prompts
    assert "worse than the champion, evidence " in (gate_doubt(doubted, RULES) or "")
    short = judged(0.0, groups=10, flaws={"short": 0.9})
    assert (gate_doubt(short, RULES) or "").startswith("more cut short or empty than the champion")
