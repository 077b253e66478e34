"""Combine the judge's scores with what verifiers found into one reward. Pure.

Rewards are compared within one group only, so every answer of a group must be measured alike: a
verifier counts in a group only when it scored each of its answers (`counted_scores`).

`weights`: the weighted mean of the judge's score and the scores of the verifiers that count.
`gate_then_rank`: an answer passes when each gate that counts scores it at its `pass_at` or above.
Answers are ranked by the weighted mean of the judge and the verifiers that are no gates. In a group
with both kinds, answers that fail share the range 0 to `FAIL_TOP`, those that pass `PASS_BOTTOM` to
1, each kind in its own order. Where all pass or all fail, a gate tells no answer from another, and
the mean itself is the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ingest.records import Rewarded
from ingest.verifiers.records import OF_THE_ANSWER, Checked, Failure, Finding, Result

FAIL_TOP = 0.4
PASS_BOTTOM = 0.6
"""The gap between both is ten times the default of `learner.min_spread`, so that a gate always
tells."""
Rule = Literal["weights", "gate_then_rank"]
OnError = Literal["ignore", "fail", "hold"]


def counted_scores(results: Sequence[Result], on_error: OnError) -> tuple[float, ...]:
    """Return the scores of a verifier as they count in a group; empty: it does not count there.

    results: [G] what it found. An answer that it failed over gets 0 under `fail`, when the answer
        may be the cause; any other answer without a score keeps the verifier out.
    """
    scores: list[float] = []
    for result in results:
        if isinstance(result, Finding) and result.score is not None:
            scores.append(result.score)
        elif on_error == "fail" and isinstance(result, Failure) and result.reason in OF_THE_ANSWER:
            scores.append(0.0)
        else:
            return ()
    return tuple(scores)


def weighted_mean(scores: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the mean by weight, in the range of the scores; None when all weights are 0."""
    total = sum(weights)
    if total <= 0.0:
        return None
    mean = sum(weight * score for weight, score in zip(weights, scores, strict=True)) / total
    return min(max(mean, min(scores)), max(scores))  # rounding must not leave the range


def combine(
    ruler_scores: Sequence[float],
    checked: Sequence[Checked],
    *,
    rule: Rule,
    judge_weight: float,
) -> Rewarded:
    """Make the rewards of one group.

    ruler_scores: [G] the judge's scores, 0..1. judge_weight: above 0.
    Returns: rewards in 0..1; the judge's scores themselves when no verifier counts.
    """
    counting = [one for one in checked if one.scores]
    places = range(len(ruler_scores))
    means = [
        weighted_mean([one.scores[i] for one in counting], [one.weight for one in counting])
        for i in places
    ]
    independent = tuple(mean for mean in means if mean is not None)
    gates = [one for one in counting if one.gate] if rule == "gate_then_rank" else []
    ranking = [one for one in counting if one not in gates]
    weights = [judge_weight, *(one.weight for one in ranking)]
    if ranking:
        ranks = [
            weighted_mean([ruler_scores[i], *(one.scores[i] for one in ranking)], weights) or 0.0
            for i in places
        ]
    else:
        ranks = list(ruler_scores)
    passes = [all(one.scores[i] >= one.pass_at for one in gates) for i in places]
    return Rewarded(
        rewards=tuple(_place(rank, ok, passes) for rank, ok in zip(ranks, passes, strict=True)),
        independent=independent,
        rule=_rule(checked, rule, judge_weight),
        checks=tuple([_check(one, i) for one in checked] for i in places),
    )


def _place(rank: float, passes: bool, all_passes: Sequence[bool]) -> float:
    if len(set(all_passes)) < 2:
        return rank
    return PASS_BOTTOM + (1.0 - PASS_BOTTOM) * rank if passes else FAIL_TOP * rank


def _rule(checked: Sequence[Checked], rule: Rule, judge_weight: float) -> dict[str, Any]:
    return {
        "combine": rule,
        "judge_weight": judge_weight,
        "verifiers": [
            {
                "name": one.name,
                "version": one.version,
                "digest": one.digest,
                "weight": one.weight,
                "gate": one.gate,
                "pass_at": one.pass_at,
                "counts": bool(one.scores),
            }
            for one in checked
        ],
    }


def _check(one: Checked, place: int) -> dict[str, Any]:
    result = one.results[place]
    found: dict[str, Any] = {"name": one.name, "version": one.version, "why": result.why}
    if isinstance(result, Failure):
        return {**found, "score": one.scores[place] if one.scores else None, "error": result.reason}
    return {**found, "score": result.score, "error": None}
