"""Prefer the steps where answers are likely to differ. Pure and seeded.

Answers without a spread in their scores teach nothing, and cost as much as others. A logistic model
of a few features estimates the chance of a spread; steps below a pivot are drawn less often. A
share of all steps is drawn whatever their features say, so no propensity is 0: whoever reads the
groups can weigh them by 1 / propensity, and a wrong model is corrected by what it left in.

The weights were fitted by `python -m benchmarks.groups.fit` on the benchmark's first recording;
docs/log.md has what they are worth on one that was made later, and their limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ingest.grouping.features import Features
from ingest.grouping.held_out import share_of

Choose = Literal["uniform", "prefer"]
PRIOR_GROUPS: Final = 2.0
"""Groups without an outcome that every opening is credited with: a new one is neither good nor
bad."""
PRIOR_SPREAD: Final = 0.5
STEEPNESS: Final = 6.0
"""Exponent by which the chance to be drawn falls below the pivot."""
PIVOT: Final = 0.6
"""Chance of a spread from which a step is always kept."""
WEIGHTS: Final[Mapping[str, float]] = {
    "bias": 0.58,
    "surprisal": -0.17,
    "forks": 0.30,
    "cut": -0.80,
    "log_tokens": -0.59,
    "earlier": 1.08,
}
"""Log-odds."""
DECIDES: Final = 0.5
"""Log-odds that the first choice of a tool, or a final answer, has over the steps between them,
which mostly follow from what a tool gave: not fitted, for the recording has no such steps."""
TOLD: Final = 1.0
"""Log-odds that a user's discontent adds: not fitted, for the recording has no users. Whoever asks
again says that a better answer was possible."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Whether a step is drawn, with what probability, and why."""

    drawn: bool
    propensity: float
    """Probability of being drawn given the features, 0..1; caps and the backlog come after it."""
    reason: str


def inputs(features: Features) -> dict[str, float]:
    """Return the inputs of the logistic model, each of the order of 1."""
    share = (features.earlier_spread + PRIOR_GROUPS * PRIOR_SPREAD) / (
        features.earlier + PRIOR_GROUPS
    )
    return {
        "bias": 1.0,
        "surprisal": min(features.surprisal, 5.0),
        "forks": features.forks,
        "cut": float(features.cut),
        "log_tokens": math.log1p(min(features.tokens, 4_096)) / 4,
        "earlier": math.log(share / (1 - share)),
    }


def prior(features: Features) -> float:
    """Return the log-odds of what is not fitted."""
    decides = features.tool_choice or features.final_answer
    return DECIDES * decides + TOLD * (features.corrected or features.negative)


def chance_of_spread(features: Features, weights: Mapping[str, float] = WEIGHTS) -> float:
    """Estimate the probability that a group of this step has a spread, 0..1."""
    logit = sum(weights.get(name, 0.0) * value for name, value in inputs(features).items())
    logit += prior(features)
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))


def propensity(
    features: Features,
    *,
    rate: float,
    uniform_share: float,
    weights: Mapping[str, float] = WEIGHTS,
) -> float:
    """Return the probability to draw a step: `rate` times a keep of at least `uniform_share`."""
    kept: float = min(1.0, (chance_of_spread(features, weights) / PIVOT) ** STEEPNESS)
    return rate * (uniform_share + (1 - uniform_share) * kept)


def draw(
    name: str, features: Features, *, choose: Choose, rate: float, uniform_share: float
) -> Draw:
    """Draw a step by a hash of its name: the same in every process and after every restart."""
    if choose == "uniform":
        return Draw(share_of(f"rate\x00{name}") < rate, rate, "uniform")
    probability = propensity(features, rate=rate, uniform_share=uniform_share)
    luck = share_of(f"rate\x00{name}")
    reason = "uniform_share" if luck < rate * uniform_share else "likely_spread"
    return Draw(luck < probability, probability, reason)
