"""Figures as charts: series for the browser, and the same numbers for a table beside it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.evidence.interval import EMPTY, bounds, observe
from deploy.evidence.quality import CHART_LEVEL

MOST_POINTS = 2_000
"""A longer series is thinned out: no screen shows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A threshold, drawn over the whole width."""

    label: str
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    x_label: str
    x: tuple[float, ...]
    series: Mapping[str, tuple[float | None, ...]]
    """Label -> a value for each x; None: not known."""
    lines: tuple[Line, ...] = ()
    log: bool = False
    bars: bool = False
    """Each x is a series of its own kind, named by `names`."""
    names: tuple[str, ...] = ()
    """Long ones would cover each other below the bars, so those have numbers there."""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further columns of the table, which are not drawn."""

    @property
    def data(self) -> str:
        """JSON for the script that draws it. It stands in an attribute, which escapes it."""
        return json.dumps(
            {
                "x": self.x,
                "xLabel": self.x_label,
                "series": [{"label": label, "y": y} for label, y in self.series.items()],
                "lines": [{"label": line.label, "y": line.y} for line in self.lines],
                "log": self.log,
                "names": [str(place) for place, _ in enumerate(self.names, start=1)],
            }
        )

    def rows(self) -> list[tuple[str, ...]]:
        """The numbers as a table: x, then each series."""
        bars = tuple(f"{place}: {name}" for place, name in enumerate(self.names, start=1))
        names = bars or tuple(f"{x:g}" for x in self.x)
        more = self.beside.values()
        return [
            (
                name,
                *(shown(series[i]) for series in self.series.values()),
                *(column[i] for column in more),
            )
            for i, name in enumerate(names)
        ]


def shown(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def number(value: object) -> float | None:
    """A finite number of stored JSON; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


CURVES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Reward of each step's groups, sampled before the run",
        (("reward_mean", "mean reward"), ("reward_spread", "spread within groups")),
    ),
    ("Divergence, nats a token", (("approx_kl", "from the sampler"), ("kl_base", "from the base"))),
    ("Entropy, nats a token", (("entropy", "entropy"),)),
    ("Loss", (("loss", "loss"),)),
    ("Length, tokens an answer", (("answer_tokens", "tokens"),)),
    ("Share of tokens that the clip removes", (("clip_share", "share"),)),
)
"""Title -> (figure of a step, its label)."""


def run_charts(steps: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return the curves of a run. steps: the figures of each step, the first first."""
    kept = steps[:: max(1, math.ceil(len(steps) / MOST_POINTS))]
    x = tuple(number(one.get("step")) or float(i + 1) for i, one in enumerate(kept))
    found = []
    for title, figures in CURVES:
        series = {
            label: tuple(number(one.get(key)) for one in kept)
            for key, label in figures
            if any(number(one.get(key)) is not None for one in kept)
        }
        if series:
            found.append(Chart(title=title, x_label="step", x=x, series=series))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One judged prompt of a canary, as far as the chart needs it."""

    place: int | None
    """Its number in the order in which it counts; None in comparisons of older versions."""
    difference: float | None
    """The candidate's mean score minus the champion's, -1..1; None: not scored."""
    fault: str | None
    """Whose answers kept it from being scored."""

    @property
    def counts_as(self) -> float | None:
        """What the interval takes it for (`deploy.evidence.quality.add_group`); None: nothing."""
        return {"candidate": -1.0, "champion": 1.0}.get(self.fault or "", self.difference)


def difference_chart(
    compared: Iterable[Compared], margin: float, *, made: int, whole: tuple[object, object]
) -> Chart | None:
    """The mean judged difference after each comparison, in the order in which they count, with the
    interval that holds at every look; None without any.

    margin: loss that is accepted. made: number of all comparisons, of which these may be the
    newest. whole: the interval over all of them, which the evidence has.
    """
    ordered = sorted(compared, key=lambda one: -1 if one.place is None else one.place)
    known = [(i, one) for i, one in enumerate(ordered, start=1) if one.counts_as is not None]
    if not known:
        return None
    # An interval over a part of them would not be the one that the canary is judged by.
    cut = made > len(ordered)
    x, means, lows, highs = [], [], [], []
    total, sequence = 0.0, EMPTY
    for number_of, (i, one) in enumerate(known, start=1):
        value = one.counts_as or 0.0
        total += value
        sequence = observe(sequence, (1.0 + value) / 2.0, CHART_LEVEL)
        low, high = bounds(sequence, CHART_LEVEL)
        x.append(float(i if one.place is None else one.place))
        means.append(total / number_of)
        lows.append(2.0 * low - 1.0)
        highs.append(2.0 * high - 1.0)
    lines = [Line(label="equal", y=0.0), Line(label=f"margin {-margin:g}", y=-margin)]
    title = "Judged score of the candidate minus the champion's, mean so far"
    if cut:
        title += f": only the newest {len(ordered)} of {made} comparisons"
        for word, end in zip(("low", "high"), map(number, whole), strict=True):
            if end is not None:
                lines.append(Line(label=f"{word} end of the interval, by all {made}", y=end))
    series = {"mean difference": means}
    if not cut:
        series |= {"low end of the interval": lows, "high end of the interval": highs}
    step = max(1, math.ceil(len(known) / MOST_POINTS))
    return Chart(
        title=title,
        x_label="comparison",
        x=tuple(x[::step]),
        series={label: tuple(values[::step]) for label, values in series.items()},
        lines=tuple(lines),
    )
