"""A judge whose noise and position bias are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from ingest.judge_noise import Sums, sums_of
from ingest.records import ShownPass


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


def mixed(rng: Random) -> int:
    """Sizes of groups, as identical answers leave them."""
    return rng.choice((2, 3, 4, 5, 6, 7, 8, 8, 8, 8))


def sums(judge: SimulatedJudge, *, groups: int, seed: int = 1, passes: int = 2) -> Sums:
    """Sums over groups whose qualities spread by 0.2 about 0.5."""
    rng = Random(f"groups:{seed}")
    found = Sums()
    for number in range(groups):
        qualities = [rng.gauss(0.5, 0.2) for _ in range(mixed(rng))]
        one = sums_of(judge.score(qualities, seed * 1_000_003 + number, passes, rng))
        assert one is not None
        found += one
    return found


EVEN = SimulatedJudge(noise=0.06, slope=-0.1, common=0.05)
UNEVEN = replace(EVEN, uneven=True, step=0.05, taste=0.05)
