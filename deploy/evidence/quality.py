"""What judged groups say of a candidate: no worse, better, or harmful. Pure.

A group is one prompt with fresh answers of candidate, champion and anchor, judged blind together;
its difference is the candidate's mean score minus the other's, -1..1. Six e-processes read the
groups in the order in which they were drawn:

- `no_worse`: against "worse than the champion by `margin` or more" (non-inferiority).
- `anchored`: against "worse than the anchor by the margin or more". The anchor moves to what
  is proven better than it and to nothing else, so many small losses cannot add up (Feng, Emerson
  and Simon 2021, "Approval policies for modifications to machine learning-based software").
- `over_anchor`: against "no better than the anchor".
- `champion_over_anchor`: against "the champion is no better than the anchor", by the same groups.
- `better`: against "no better than the champion".
- `harm`: against "no worse than the champion".

A group that could not be scored because of the candidate's answers counts as -1. One that could
not be scored because of the champion's counts as +1 against harm and in the chart: answers of two
equal adapters get lost equally often, and counted for one arm only they would look like harm. It
says nothing in favour of the candidate, and neither does a group that nobody's answers lost: what
cannot be compared is no merit of the candidate. Both are counted as `unknown`.

`flaws` are five more e-processes, one for each kind of flaw that needs no judge (`FLAWS` and
`OF_GROUPS`): against "the
candidate's share of such answers exceeds the champion's by no more than its limit".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from deploy.evidence.betting import START, Bets, bet

# A confidence sequence of a bounded mean: intervals that all hold it at the same time. Pure.

LARGEST_BET = 0.5
"""Truncation of the bets (`c` in the source)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """State after some observations in 0..1."""

    observations: int = 0
    total: float = 0.0
    """Sum of the observations."""
    squares: float = 0.0
    """Sum of the squared differences of each observation from the mean estimated with it."""
    bets: float = 0.0
    """Sum of the bets."""
    weighted: float = 0.0
    """Sum of bet times observation."""
    cost: float = 0.0
    """Sum of what the bets' variance costs."""


EMPTY = Sequence()


def observe(sequence: Sequence, value: float, level: float) -> Sequence:
    """Return the state after one observation. value: 0..1. level: as for `bounds`, each time."""
    number = sequence.observations + 1
    # Both estimates are of the observations before this one.
    mean_before = (sequence.total + 0.5) / number
    variance_before = (sequence.squares + 0.25) / number
    size = math.sqrt(
        2.0 * math.log(2.0 / level) / (number * math.log(1 + number) * variance_before)
    )
    size = min(size, LARGEST_BET)
    error = (value - mean_before) ** 2
    mean = (sequence.total + value + 0.5) / (number + 1)
    return Sequence(
        observations=number,
        total=sequence.total + value,
        squares=sequence.squares + (value - mean) ** 2,
        bets=sequence.bets + size,
        weighted=sequence.weighted + size * value,
        # psi_E of the source.
        cost=sequence.cost + error * (-math.log1p(-size) - size),
    )


def bounds(sequence: Sequence, level: float) -> tuple[float, float]:
    """Return the interval of the mean, within 0..1.

    All intervals of one sequence hold the mean with a probability of at least 1 - level.
    """
    if not sequence.observations:
        return 0.0, 1.0
    centre = sequence.weighted / sequence.bets
    half = (math.log(2.0 / level) + sequence.cost) / sequence.bets
    return max(0.0, centre - half), min(1.0, centre + half)


Flaw = Literal["short", "invalid", "evasive"]
FLAWS: tuple[Flaw, ...] = get_args(Flaw)
"""Kinds of flawed answers. short: empty, or ended by the token limit. invalid: a tool call or JSON
that does not fit what the request asks for. evasive: a refusal, or a loop."""
OF_GROUPS = ("narrow", "long")
"""Kinds that only judged groups show. narrow: the candidate's answers were nearly certain, and at
most half as uncertain as the champion's to the same prompt, by the mean negative log-probability of
their tokens: the entropy of what it says has collapsed. long: they were more than twice as long, in
tokens. A judge that likes long answers sees no fault in it."""
Fault = Literal["candidate", "champion", "unknown"]
"""Whose answers kept the judge from scoring a group."""
CHART_LEVEL = 0.05
"""Level of the confidence sequence that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One judged group, or one that the judge could not score."""

    champion: float | None
    """Mean score of the candidate minus the champion's, -1..1; None: not scored."""
    anchor: float | None
    """The same for the anchor; None: not scored, and the group says nothing of the anchor."""
    fault: Fault | None = None
    """Why it is not scored; None for a scored group."""
    flaws: Mapping[str, float] = field(default_factory=dict)
    """Kind -> the candidate's share of flawed answers minus the champion's, -1..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What counts as worse."""

    margin: float
    """Difference to the champion that is accepted, above 0 and below 1."""
    anchor_margin: float
    """Difference to the anchor that is accepted, above 0 and below 1."""
    flaws: Mapping[str, float]
    """Kind -> share by which flawed answers may become more frequent, 0 to below 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """State after some groups."""

    groups: int = 0
    """Groups that say something of the candidate."""
    unknown: int = 0
    """Groups that could not be scored, and not because of the candidate."""
    lost: int = 0
    """Groups that could not be scored because of the candidate; part of `groups`."""
    champion_lost: int = 0
    """Groups that could not be scored because of the champion; part of `unknown`."""
    no_worse: Bets = START
    anchored: Bets = START
    better: Bets = START
    over_anchor: Bets = START
    champion_over_anchor: Bets = START
    harm: Bets = START
    flaws: Mapping[str, Bets] = field(
        default_factory=lambda: dict.fromkeys((*FLAWS, *OF_GROUPS), START)
    )
    differences: tuple[float, ...] = ()
    """To the champion, in the order in which they count."""
    chart: Sequence = EMPTY
    """Confidence sequence of the difference to the champion, moved to 0..1."""
    to_anchor: Sequence = EMPTY
    """The same of the candidate's to the anchor."""
    champion_to_anchor: Sequence = EMPTY
    """The same of the champion's to the anchor."""

    @property
    def unknown_share(self) -> float:
        """Share of all groups that nobody could score."""
        every = self.groups + self.unknown
        return self.unknown / every if every else 0.0


def add_group(quality: Quality, group: Group, limits: Limits) -> Quality:
    """Return the state after one more group."""
    flaws = {kind: _bet_on_flaw(bets, group, kind, limits) for kind, bets in quality.flaws.items()}
    champion, anchor = _differences(group)
    if group.fault == "champion":
        return replace(
            quality,
            unknown=quality.unknown + 1,
            champion_lost=quality.champion_lost + 1,
            harm=bet(quality.harm, 0.0, 0.5),
            flaws=flaws,
            differences=(*quality.differences, 1.0),
            chart=observe(quality.chart, 1.0, CHART_LEVEL),
        )
    if champion is None:
        return replace(quality, unknown=quality.unknown + 1, flaws=flaws)
    to_champion = (1.0 + champion) / 2.0
    if anchor is not None:
        quality = _against_anchor(quality, group, anchor, limits)
    return replace(
        quality,
        groups=quality.groups + 1,
        lost=quality.lost + (group.fault == "candidate"),
        no_worse=bet(quality.no_worse, to_champion, (1.0 - limits.margin) / 2.0),
        better=bet(quality.better, to_champion, 0.5),
        harm=bet(quality.harm, 1.0 - to_champion, 0.5),
        flaws=flaws,
        differences=(*quality.differences, champion),
        chart=observe(quality.chart, to_champion, CHART_LEVEL),
    )


def _against_anchor(quality: Quality, group: Group, anchor: float, limits: Limits) -> Quality:
    """anchor: what the group counts as, against the anchor."""
    to_anchor = (1.0 + anchor) / 2.0
    quality = replace(
        quality,
        anchored=bet(quality.anchored, to_anchor, (1.0 - limits.anchor_margin) / 2.0),
        over_anchor=bet(quality.over_anchor, to_anchor, 0.5),
        to_anchor=observe(quality.to_anchor, to_anchor, CHART_LEVEL),
    )
    if group.champion is None:  # the candidate lost the group, which says nothing of the champion
        return quality
    # The candidate's own score falls out; the largest difference of two mean scores is 1.
    champion = (1.0 + max(-1.0, min(1.0, anchor - group.champion))) / 2.0
    return replace(
        quality,
        champion_over_anchor=bet(quality.champion_over_anchor, champion, 0.5),
        champion_to_anchor=observe(quality.champion_to_anchor, champion, CHART_LEVEL),
    )


def _differences(group: Group) -> tuple[float | None, float | None]:
    """Return what the group counts as, against the champion and against the anchor."""
    if group.fault == "candidate":
        return -1.0, -1.0
    return group.champion, group.anchor


def _bet_on_flaw(bets: Bets, group: Group, kind: str, limits: Limits) -> Bets:
    excess = group.flaws.get(kind)
    if excess is None:
        return bets
    return bet(bets, (1.0 + excess) / 2.0, (1.0 + limits.flaws[kind]) / 2.0)
