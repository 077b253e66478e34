"""The gain over versions as a drawing: places in an SVG, in its own units. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.admin.out import EstimateOut, ProgressOut
from deploy.evidence.progress import ZERO, Estimate, after
from deploy.records import version_of

WIDTH, HEIGHT = 320.0, 200.0
"""The width of a block on a phone, so that the letters are not made smaller there."""
LEFT, RIGHT, TOP, BOTTOM = 42.0, 12.0, 10.0, 24.0
MOST_LABELS = 8
LEAST_SPAN = 0.1
"""Difference of scores that the axis shows at least: noise must not fill the drawing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A version, at its gain, with its interval."""

    name: str
    x: float
    y: float
    low: float
    high: float
    """Ends of the interval, as places."""
    kind: str
    """better, worse or open (the interval holds 0); candidate: it is not promoted; origin."""
    words: str
    label: bool
    """Its name fits below the axis."""
    serves: bool
    """Its version is the champion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    y: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What is drawn."""

    marks: tuple[Mark, ...]
    ticks: tuple[Tick, ...]
    zero: float
    """Where the origin's gain is."""
    path: str
    """The line through the promoted versions whose gain is known."""
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    names_at: float = HEIGHT - 8.0


def draw_curve(found: ProgressOut) -> Curve | None:
    """Return the drawing; None while no promoted version has a gain."""
    shown = [(version_of(found.origin), "origin", ZERO)]
    for one in found.points:
        if one.gain is not None:
            gain = _estimate(one.gain)
            kind = "better" if gain.low > 0 else "worse" if gain.high < 0 else "open"
            shown.append((version_of(one.adapter), kind, gain))
    if len(shown) == 1:
        return None
    running = found.running
    base = None if found.gain is None else _estimate(found.gain)
    if found.champion == found.origin:
        base = ZERO
    if running is not None and running.difference is not None and base is not None:
        gain = after(base, _estimate(running.difference))
        shown.append((version_of(running.adapter), "candidate", gain))
    ticks = _ticks([end for _, _, one in shown for end in (one.low, one.high)])
    low, high = ticks[0], ticks[-1]

    def place(gain: float) -> float:
        return round(TOP + (high - gain) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    step = (WIDTH - LEFT - RIGHT - 24.0) / max(1, len(shown) - 1)
    every = math.ceil(len(shown) / MOST_LABELS)
    marks = tuple(
        Mark(
            name=name,
            x=round(LEFT + 12.0 + step * number, 1),
            y=place(one.mean),
            low=place(one.low),
            high=place(one.high),
            kind=kind,
            words=name if kind == "origin" else f"{name}: {_words(one)}",
            label=(len(shown) - 1 - number) % every == 0,
            serves=kind != "candidate" and name == version_of(found.champion),
        )
        for number, (name, kind, one) in enumerate(shown)
    )
    line = [f"{one.x},{one.y}" for one in marks if one.kind != "candidate"]
    return Curve(
        marks=marks,
        ticks=tuple(Tick(y=place(one), words=f"{one:+.2g}" if one else "0") for one in ticks),
        zero=place(0.0),
        path=" ".join(line),
    )


def _ticks(ends: Sequence[float]) -> list[float]:
    """Return round gains from below the lowest to above the highest; 0 is one of them."""
    low, high = min(0.0, *ends), max(0.0, *ends)
    span = max(high - low, LEAST_SPAN)
    step = next(one for one in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if span / one <= 5 or one == 1.0)
    first, last = math.floor(low / step), math.ceil(max(high, low + span) / step)
    return [number * step for number in range(first, last + 1)]


def _words(one: Estimate) -> str:
    return f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"


def _estimate(found: EstimateOut) -> Estimate:
    return Estimate(mean=found.mean, low=found.low, high=found.high, groups=found.groups)
