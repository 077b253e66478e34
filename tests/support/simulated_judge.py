"""A judge whose noise and position bias are known, scoring groups twice.

`python -m support.simulated_judge` prints the rates that docs/log.md states.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from ingest.noise.estimate import Estimate, Twice, changes_within, drifts, estimate
from ingest.records import ShownPass

WINDOW = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJudge:
    """Score = quality + level + slope * (position - 1/2) + what it gives all answers of a scoring
    + its own taste of the answer + noise of the pass."""

    noise: float
    """Standard deviation of the noise of one pass."""
    slope: float = 0.0
    level: float = 0.0
    common: float = 0.0
    """Standard deviation of what one scoring gives to all answers of a group alike."""
    taste: float = 0.0
    """Standard deviation of the judge's own opinion of an answer: the same at every scoring."""
    seed: int = 0
    uneven: bool = False
    """The noise differs from group to group, by a factor of 0.5 to 1.5."""
    step: float = 0.0
    """Scores are multiples of this, within 0..1; 0: any number."""

    def score(self, qualities: list[float], group: int, passes: int, rng: Random) -> Scoring:
        own = Random(f"{self.seed}:{group}")
        tastes = [own.gauss(0, self.taste) for _ in qualities]
        noise = self.noise * (own.uniform(0.5, 1.5) if self.uneven else 1.0)
        shared = rng.gauss(0, self.common) + self.level
        order = list(range(len(qualities)))
        rng.shuffle(order)
        found = []
        for number in range(passes):
            shown = order if number % 2 == 0 else order[::-1]
            if number % 2 == 0 and number:
                rng.shuffle(order)
                shown = order
            place = {answer: k / (len(order) - 1) for k, answer in enumerate(shown)}
            scores = [
                self._rounded(
                    quality
                    + tastes[i]
                    + shared
                    + self.slope * (place[i] - 0.5)
                    + rng.gauss(0, noise)
                )
                for i, quality in enumerate(qualities)
            ]
            found.append(ShownPass(order=tuple(shown), scores=tuple(scores)))
        return tuple(found)

    def _rounded(self, score: float) -> float:
        if not self.step:
            return score
        return min(1.0, max(0.0, round(score / self.step) * self.step))


Scoring = tuple[ShownPass, ...]
Size = Callable[[Random], int]


def mixed(rng: Random) -> int:
    """Sizes of groups, as identical answers leave them."""
    return rng.choice((2, 3, 4, 5, 6, 7, 8, 8, 8, 8))


def scored_twice(
    first: SimulatedJudge,
    again: SimulatedJudge | None = None,
    *,
    groups: int,
    seed: int,
    size: Size = mixed,
    passes: int = 2,
) -> list[Twice]:
    """Groups whose qualities spread by 0.2 about 0.5. again: judges the second time."""
    rng = Random(f"groups:{seed}")
    found = []
    for number in range(groups):
        qualities = [rng.gauss(0.5, 0.2) for _ in range(size(rng))]
        name = seed * 1_000_003 + number
        found.append(
            Twice(
                first=first.score(qualities, name, passes, rng),
                again=(again or first).score(qualities, name, passes, rng),
            )
        )
    return found


def estimated(*judges: SimulatedJudge, **how: int) -> Estimate:
    found = estimate(scored_twice(*judges, **how))  # type: ignore[arg-type]  # `size` is not given
    assert found is not None
    return found


def alarm_share(
    before: SimulatedJudge,
    first: SimulatedJudge,
    again: SimulatedJudge | None = None,
    *,
    windows: int,
    seed: int = 0,
) -> float:
    """Share of windows that raise an alarm, compared with one before and with a reference."""
    raised = 0
    for number in range(windows):
        base = seed + 3 * number
        reference = estimated(before, groups=WINDOW, seed=base)
        last = estimated(before, groups=WINDOW, seed=base + 1)
        now = estimated(first, *(() if again is None else (again,)), groups=WINDOW, seed=base + 2)
        raised += bool(drifts(now, before=last, reference=reference))
    return raised / windows


def first_window_alarm_share(
    first: SimulatedJudge,
    second: SimulatedJudge,
    *,
    at: int,
    windows: int,
    across: int = 0,
    seed: int = 0,
) -> float:
    """Share of first windows that raise an alarm when the judge is another from group `at` on.

    across: so many groups after those are scored by `first` and again by `second`.
    """
    raised = 0
    for number in range(windows):
        base = seed + 3 * number
        left = WINDOW - at - across
        parts = ((first, first, at), (first, second, across), (second, second, left))
        groups = [
            one
            for place, (before, after, some) in enumerate(parts)
            for one in scored_twice(before, after, groups=some, seed=base + place)
        ]
        whole = estimate(groups)
        assert whole is not None
        half = WINDOW // 2
        raised += bool(changes_within(whole, estimate(groups[:half]), estimate(groups[half:])))
    return raised / windows


EVEN = SimulatedJudge(noise=0.06, slope=-0.1, common=0.05)
UNEVEN = replace(EVEN, uneven=True, step=0.05, taste=0.05)
EXACT = SimulatedJudge(noise=0.0, step=0.05)
CHANGES = {
    "noise x 1.5": replace(UNEVEN, noise=0.09),
    "noise x 2": replace(UNEVEN, noise=0.12),
    "slope -0.1 to 0": replace(UNEVEN, slope=0.0),
    "slope -0.1 to +0.1": replace(UNEVEN, slope=0.1),
}
OTHER_TASTE = replace(UNEVEN, seed=1)
HARSHER = replace(UNEVEN, level=-0.05)


def main(windows: int) -> None:
    lines = [
        f"false alarms, {name} judge: {alarm_share(judge, judge, windows=windows):.4f}"
        for name, judge in (("even", EVEN), ("uneven", UNEVEN), ("exact", EXACT))
    ]
    few = max(1, windows // 10)
    for name, judge in CHANGES.items():
        share = alarm_share(UNEVEN, judge, windows=few)
        lines.append(f"found by the first whole window after the change, {name}: {share:.3f}")
    for name, judge in (("another taste", OTHER_TASTE), ("level -0.05", HARSHER)):
        share = alarm_share(UNEVEN, UNEVEN, judge, windows=few)
        lines.append(f"found by a window scored again after the change, {name}: {share:.3f}")
    for name, judge in (("even", EVEN), ("uneven", UNEVEN), ("exact", EXACT)):
        share = first_window_alarm_share(judge, judge, at=25, windows=windows)
        lines.append(f"false alarms of a first window, {name} judge: {share:.4f}")
    for at in (25, 10, 40):
        for name, judge in CHANGES.items():
            share = first_window_alarm_share(UNEVEN, judge, at=at, windows=few)
            lines.append(f"found in the first window, changed at group {at}, {name}: {share:.3f}")
    for name, judge in (("another taste", OTHER_TASTE), ("level -0.05", HARSHER)):
        share = first_window_alarm_share(UNEVEN, judge, at=15, across=20, windows=few)
        lines.append(f"found in the first window, 20 groups scored across it, {name}: {share:.3f}")
    sys.stdout.write("\n".join([f"{windows} and {few} windows of {WINDOW} groups", *lines]) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5_000)
