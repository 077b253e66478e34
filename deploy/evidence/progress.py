"""How much better each promoted version is than what served first, from the gate's groups. Pure.

Each canary compared its candidate with the champion of its time, and with the anchor. The mean
difference of a candidate is one link; a version's gain is the sum of the links from it to the
origin, the champion of the first canary (the base model, as a rule). Where both links are known,
the one with the narrower sum is taken: with the base as anchor that is one link for every version.

A canary ends when its evidence is enough, so an interval of a fixed number of groups would be
wrong. `bounds_of` inverts the e-process of `deploy.evidence.betting`: all its intervals of one
canary hold the mean together with a probability of 95%, whenever the canary ends. Along a chain the
distances from the mean to each end are added: only candidates that were promoted are in the chain,
so that its mean is too high by a part of each link, and intervals that grow as the root of the
links held the truth in 65% of simulated chains of 12 (promoted as better). Scores of a judge and
ends of whole tasks are two scales, so a chain begins where the newest of them begins. A judge that
changed between two canaries is another scale too, and is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from deploy.evidence.betting import START, bet, threshold
from sidecar.visible import counted

LEVEL = 0.05
HALVINGS = 10
"""Of the range 0..1: the ends are exact to 0.002 of a difference, on the safe side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean difference of judged scores, -1..1, and its 95% interval."""

    mean: float
    low: float
    high: float
    groups: int
    """Comparisons that it rests on."""


def difference_words(one: Estimate, other: str) -> str:
    """`scored 0.034 higher than v2 (95% interval -0.018 to +0.086, 60 comparisons)`.

    other: what it was compared with.
    """
    side = "lower" if one.mean < 0.0 else "higher"
    prompts = counted(one.groups, "comparison")
    interval = f"95% interval {one.low:+.3f} to {one.high:+.3f}, {prompts}"
    return f"scored {abs(one.mean):.3f} {side} than {other} ({interval})"


ZERO = Estimate(mean=0.0, low=0.0, high=0.0, groups=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one canary says of its candidate."""

    canary_id: str
    candidate: str
    champion: str
    anchor: str
    """The same as `champion` where no other was asked."""
    ended_at: float | None
    """None: it still runs."""
    to_champion: Estimate | None
    """None: nothing was judged, or nothing of it is stored any more."""
    to_anchor: Estimate | None
    of_tasks: bool = False
    """Scores are how whole tasks ended; False: a judge's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A promoted version on the curve."""

    adapter: str
    promoted_at: float
    gain: Estimate | None
    """Over the origin; None: a link of the chain is not known."""
    links: int
    """Comparisons that the gain is the sum of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How an adapter compared with its champion, on one kind of requests."""

    name: str
    """Openings of sessions, later turns, a project's requests, or hours of the day."""
    difference: Estimate


def kinds_of(values: Iterable[tuple[str, float]], *, least: int = 2) -> tuple[Kind, ...]:
    """Return the mean difference by the name of its kind, sorted.

    values: (kind, difference) in the order in which they count. least: with fewer kinds, nothing.
    """
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    if len(by_name) < least:
        return ()
    kinds = [(name, estimate(tuple(found))) for name, found in sorted(by_name.items())]
    return tuple(Kind(name=name, difference=of) for name, of in kinds if of is not None)


def counts_as(difference: float | None, fault: str | None) -> float | None:
    """Return what a comparison counts as: answers that the judge could not score are the worst,
    of either arm. None: it says nothing."""
    return {"candidate": -1.0, "champion": 1.0}.get(fault or "", difference)


@lru_cache(maxsize=512)
def estimate(differences: tuple[float, ...]) -> Estimate | None:
    """Return the mean of differences (-1..1, in the order in which they count); None of none.

    Kept, because it takes some milliseconds and an ended canary never changes.
    """
    if not differences:
        return None
    values = [(1.0 + one) / 2.0 for one in differences]
    low, high = _low_end(values), 1.0 - _low_end([1.0 - one for one in values])
    mean = sum(differences) / len(differences)
    return Estimate(
        mean=mean,
        low=min(2.0 * low - 1.0, mean),
        high=max(2.0 * high - 1.0, mean),
        groups=len(differences),
    )


def _low_end(values: Sequence[float]) -> float:
    """Return a number that the mean of the values exceeds, at half of `LEVEL`. values: 0..1."""
    refuted, open_ = 0.0, 1.0
    for _ in range(HALVINGS):
        mean = (refuted + open_) / 2.0
        state = START
        for value in values:
            state = bet(state, value, mean)
        if state.peak >= threshold(LEVEL / 2.0):
            refuted = mean
        else:
            open_ = mean
    return refuted


def after(start: Estimate, step: Estimate) -> Estimate:
    """Return the difference over both links."""
    return Estimate(
        mean=max(-1.0, min(1.0, start.mean + step.mean)),
        low=max(-1.0, start.low + step.low),
        high=min(1.0, start.high + step.high),
        groups=start.groups + step.groups,
    )


def curve(promoted: Sequence[Link]) -> tuple[str, list[Point]]:
    """Return the origin and the gain of each promoted version, the first promotion first.

    promoted: canaries that ended with a promotion, the oldest first. Without any there is no origin
    (""). A version that was promoted twice has two points.
    """
    if not promoted:
        return "", []
    other = [n for n, one in enumerate(promoted, 1) if one.of_tasks != promoted[-1].of_tasks]
    promoted = promoted[max(other, default=0) :]
    origin = promoted[0].champion
    known: dict[str, tuple[Estimate, int]] = {origin: (ZERO, 0)}
    points = []
    for link in promoted:
        ways = [
            (after(known[of][0], step), known[of][1] + 1)
            for of, step in ((link.champion, link.to_champion), (link.anchor, link.to_anchor))
            if step is not None and of in known
        ]
        best = min(ways, key=lambda way: way[0].high - way[0].low, default=None)
        known.pop(link.candidate, None)  # what an earlier canary said of it is superseded
        if best is not None:
            known[link.candidate] = best
        points.append(
            Point(
                adapter=link.candidate,
                promoted_at=link.ended_at or 0.0,
                gain=None if best is None else best[0],
                links=0 if best is None else best[1],
            )
        )
    return origin, points
