"""Draw summaries: agreement with the known order, and scores by the position shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingest.calibration.agreement import Interval
from ingest.calibration.summary import Summary

CHANCE = 0.5
"""Pairs right of a judge that knows nothing."""


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write a PNG with an axis of agreement and one of positions.

    Raises: ImportError without matplotlib, which the product does not need; OSError.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(11, 3 + 0.4 * len(summaries)), dpi=120, layout="constrained")
    agreement, positions = figure.subplots(1, 2)
    names = [f"[{k}] {one.judge}\n{one.rubric}" for k, one in enumerate(summaries, 1)]
    for offset, label, color, found in (
        (-0.12, "pairs right", "#1f6f8b", [one.pairs_right for one in summaries]),
        (0.12, "tau-b", "#c8553d", [one.tau for one in summaries]),
    ):
        rows = [(row + offset, each) for row, each in enumerate(found) if each is not None]
        if not rows:
            continue  # a legend names what can be seen
        agreement.errorbar(
            [each.value for _, each in rows],
            [row for row, _ in rows],
            xerr=_bars([each for _, each in rows]),
            fmt="o",
            capsize=3,
            color=color,
            label=label,
        )
    agreement.axvline(CHANCE, color="#1f6f8b", linestyle=":", linewidth=1)
    agreement.axvline(0, color="#c8553d", linestyle=":", linewidth=1)
    agreement.set_yticks(range(len(names)), names)
    agreement.set_ylim(len(names) - 0.5, -0.5)
    agreement.set_title("agreement with the known order (dotted: chance)", fontsize=9)
    _legend(agreement)
    for number, one in enumerate(summaries, 1):
        if not one.by_position:
            continue
        places = range(1, len(one.by_position) + 1)
        values = [each.value for each in one.by_position]
        label = f"[{number}]"
        positions.errorbar(
            places, values, yerr=_bars(one.by_position), marker="o", capsize=3, label=label
        )
    positions.axhline(0, color="#555", linewidth=1)
    positions.set_xlabel("position shown")
    positions.set_title("score above the same answers elsewhere", fontsize=9)
    _legend(positions)
    figure.savefig(path)


def _legend(axis: Any) -> None:  # Any: matplotlib is imported late
    """Draw a legend, unless nothing is drawn."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _bars(found: Sequence[Interval]) -> list[list[float]]:
    """Return [below, above]; a value may stand a rounding error outside of its interval."""
    return [
        [max(0.0, one.value - one.low) for one in found],
        [max(0.0, one.high - one.value) for one in found],
    ]
