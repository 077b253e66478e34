"""Fit the weights of the preference on the first recording: `python -m benchmarks.groups.fit`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.groups.recording import Step, seen
from ingest.grouping.same_prompt import inputs, prior

PENALTY: Final = 1.0
"""Penalty of the squared weights, in steps: a prior of sd 1 on each."""
ROUNDS: Final = 2_000
PACE: Final = 0.5


def fit(steps: Sequence[Step]) -> Mapping[str, float]:
    """Return the weights of a logistic model of `spread`, by gradient descent."""
    rows = [(inputs(one.features), prior(one.features), one.spread) for one in steps]
    weights = dict.fromkeys(rows[0][0], 0.0)
    for _ in range(ROUNDS):
        pull = {
            name: PENALTY * value * (name != "bias") / len(rows) for name, value in weights.items()
        }
        for given, known, spread in rows:
            logit = known + sum(weights[name] * value for name, value in given.items())
            error = 1 / (1 + math.exp(-logit)) - spread
            for name, value in given.items():
                pull[name] += error * value / len(rows)
        weights = {name: value - PACE * pull[name] for name, value in weights.items()}
    return weights


if __name__ == "__main__":
    for name, value in fit(seen()).items():
        print(f"{name:12} {value:6.2f}")
