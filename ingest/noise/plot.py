"""Draw a judge's noise and position bias by window."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sidecar.store.models import JudgeNoiseRow


def draw(rows: Sequence[JudgeNoiseRow], path: Path, *, min_spread: float) -> None:
    """Write a PNG with an axis of the noise and one of the position slope.

    rows: the oldest first. min_spread: `learner.min_spread`, drawn beside the noise.
    Raises: ImportError without matplotlib, which the product does not need; OSError.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
    noise, slope = figure.subplots(2, 1, sharex=True)
    places = list(range(len(rows)))
    sds, slopes = [row.sd for row in rows], [row.slope for row in rows]
    for axis, values, lows, highs, color in (
        (noise, sds, [row.sd_low for row in rows], [row.sd_high for row in rows], "#1f6f8b"),
        (
            slope,
            slopes,
            [row.slope_low for row in rows],
            [row.slope_high for row in rows],
            "#c8553d",
        ),
    ):
        below = [max(0.0, value - low) for value, low in zip(values, lows, strict=True)]
        above = [max(0.0, high - value) for value, high in zip(values, highs, strict=True)]
        axis.errorbar(places, values, yerr=[below, above], fmt="o-", capsize=3, color=color)
        for place, row in zip(places, rows, strict=True):
            if row.drift:
                axis.axvline(place, color="#b00020", linestyle=":", linewidth=1)
    noise.axhline(min_spread, color="#555", linestyle="--", linewidth=1)
    noise.set_ylim(bottom=0)
    noise.set_title("noise of a score (dashed: learner.min_spread; dotted: drift)", fontsize=9)
    slope.axhline(0, color="#555", linewidth=1)
    slope.set_title("score of the last position above the first", fontsize=9)
    slope.set_xticks(
        places, [f"{row.window_number}{'' if row.whole else '+'}" for row in rows], fontsize=8
    )
    slope.set_xlabel("window of groups that were scored twice (+: not whole)")
    figure.savefig(path)
