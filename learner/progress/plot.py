"""Draw the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    (
        "score, and spread within groups, of each\nstep's own groups, sampled before the run",
        ("reward_mean", "reward_spread"),
    ),
    ("loss", ("loss",)),
    ("KL, nats a token: to the sampler, to the base", ("approx_kl", "kl_base")),
    ("entropy, nats a token", ("entropy",)),
    ("share of tokens clipped", ("clip_share",)),
    ("gradient norm", ("grad_norm",)),
    ("norm of the update", ("update_norm",)),
    ("tokens of an answer", ("answer_tokens",)),
    ("tokens per second", ("tokens_per_s",)),
)
"""Title and figures of each axis. The score is no learning curve: its answers were sampled before
the run, so no step of the run can raise it."""
COLORS = ("#1f6f8b", "#c8553d")


def draw(steps: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG with the figures of a run's steps, the first step first.

    Raises: ImportError without matplotlib, which the extra `learner` installs; OSError.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=9, parse_math=False)  # an id may hold `$`
    places = [_value(one.get("step", place)) for place, one in enumerate(steps, 1)]
    for axis, (words, keys) in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        for key, color in zip(keys, COLORS, strict=False):
            values = [_value(one.get(key)) for one in steps]
            axis.plot(places, values, "o-", markersize=3, color=color, label=key)
        if len(keys) > 1:
            axis.legend(fontsize=6, frameon=False)
        axis.set_title(words, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.locator_params(axis="x", integer=True)
    figure.savefig(path, format="png")


def _value(found: object) -> float:
    """Return a figure; NaN, which is not drawn, for what is none or too large for a float."""
    if not isinstance(found, int | float):
        return float("nan")
    try:
        return float(found)
    except OverflowError:
        return float("nan")
