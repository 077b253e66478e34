"""Draw how much longer rows, TRL and ART take than what the cost model chooses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Row

AXES = (
    ("answers", "group", "answers of 128 tokens, prompt of 512"),
    ("prompt", "prompt", "tokens of the prompt, 8 answers of 64"),
    ("turns", "turns", "turns of 24 + 24 tokens, 2 conversations"),
)
"""Axis of the cells, the field that it varies, and what that is in words."""
COLORS = {"rows": "#1f6f8b", "trl": "#c8553d", "art": "#7a9e3a"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: one panel for each axis."""
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(10, 3.2), dpi=110, layout="constrained")
    for panel, (axis, field, words) in zip(figure.subplots(1, 3).flat, AXES, strict=True):
        of_axis = [row for row in rows if row["axis"] == axis and "seconds" in row]
        if not of_axis:
            continue  # no such cells
        auto = {row[field]: _seconds(row) for row in of_axis if row["contender"] == "auto"}
        for name, color in COLORS.items():
            found = {
                row[field]: _seconds(row) / auto[row[field]]
                for row in of_axis
                if row["contender"] == name
            }
            places = [float(str(place)) for place in found]
            panel.plot(places, list(found.values()), "o-", color=color, label=name, markersize=4)
        panel.axhline(1.0, color="#999999", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted(float(str(place)) for place in auto))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        panel.minorticks_off()
        panel.set_xlabel(words, fontsize=8)
        panel.set_ylabel("seconds, as multiples of auto's", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=7)
    figure.savefig(path, format="png")


def _seconds(row: Row) -> float:
    return float(str(row["seconds"]))
