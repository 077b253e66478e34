"""Noise is that of scores with as many passes; of another number it is an upper bound."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from ingest.noise.estimate import Estimate, encode_passes, estimate
from ingest.noise.windows import WINDOW, Series, refresh
from ingest.noise.worker import LEAST_GROUPS, measured_noise, scaled_sd
from learner.runs.selection import PASSING, noise_factor
from sidecar.store.database import Database
from sidecar.store.models import RescoringRow
from support.migrated_store import open_migrated
from support.simulated_judge import EVEN, UNEVEN, SimulatedJudge, scored_twice

PLAIN = SimulatedJudge(noise=0.08)
KEY = ("judge", "rubric")


@pytest.mark.parametrize(
    ("measured", "passes", "sd"),
    [
        (4, 4, 0.03), (4, 1, 0.07), (2, 1, 0.07),
        (4, 2, 0.03 * 2**0.5), (8, 2, 0.06), (8, 4, 0.03 * 2**0.5),
        (32, 2, 0.07),  # never more than one pass has
        (2, 4, 0.03), (2, 8, 0.03),  # more passes: no less is known
        (4, 3, 0.07), (3, 2, 0.07), (3, 5, 0.07), (1, 2, 0.07),
    ],
)  # fmt: skip
def test_the_rule_by_hand(measured: int, passes: int, sd: float) -> None:
    assert scaled_sd(0.03, 0.07, measured=measured, passes=passes) == pytest.approx(sd)


def noise_of(judge: SimulatedJudge, passes: int, *, seed: int = 1) -> Estimate:
    found = estimate(scored_twice(judge, groups=600, seed=seed, passes=passes))
    assert found is not None
    return found


@pytest.mark.parametrize("judge", [PLAIN, EVEN, UNEVEN], ids=["plain", "even", "uneven"])
def test_scaled_noise_is_an_upper_bound_and_that_of_pairs_is_exact(judge: SimulatedJudge) -> None:
    true = {passes: noise_of(judge, passes, seed=passes) for passes in (1, 2, 3, 4)}
    for measured, one in true.items():
        for passes, wanted in true.items():
            scaled = scaled_sd(one.sd.value, one.pass_sd, measured=measured, passes=passes)
            # each sd is known to 1.5%
            assert scaled >= 0.93 * wanted.sd.value
            if (measured, passes) == (4, 2) or passes == 1:
                assert scaled == pytest.approx(wanted.sd.value, rel=0.07)


def test_what_the_passes_of_one_scoring_share_keeps_the_bound() -> None:
    """A part of 0.05 that the passes of a scoring have in common, and 0.08 of each pass's own."""
    true = {passes: (0.05**2 + 0.08**2 / passes) ** 0.5 for passes in (1, 2, 4, 8)}
    for measured, sd in true.items():
        for passes, wanted in true.items():
            assert scaled_sd(sd, true[1], measured=measured, passes=passes) >= wanted - 1e-12


def add_window(
    database: Database, judge: SimulatedJudge, *, passes: int, now: float, groups: int = WINDOW
) -> None:
    series = Series(judge_model=KEY[0], rubric_hash=KEY[1], passes=passes)
    with database.write() as session:
        for number, one in enumerate(
            scored_twice(judge, groups=groups, seed=int(now), passes=passes)
        ):
            session.add(
                RescoringRow(
                    group_id=f"g-{now}-{number}", chosen_at=1.0, due_at=2.0, attempts=1,
                    judge_model=KEY[0], rubric_hash=KEY[1], passes=passes,
                    first=encode_passes(one.first), again=encode_passes(one.again),
                    at=now + number, window_number=0,
                )
            )  # fmt: skip
        session.flush()
        assert refresh(session, series, 0, now=now) is not None


@pytest.fixture
def database(tmp_path: Path) -> Iterable[Database]:
    opened = open_migrated(tmp_path / "store.db")
    yield opened
    opened.close()


def pure_noise_passing(judge: SimulatedJudge, passes: int, sd: float) -> float:
    """Share of groups of eight equal answers, scored with `passes`, that the learner's gate lets
    through."""
    rng = random.Random(passes)
    through = 0
    for number in range(2_000):
        rounds = judge.score([0.6] * 8, number, passes, rng)
        scores = [fmean(column) for column in zip(*(one.scores for one in rounds), strict=True)]
        through += pstdev(scores) >= sd * noise_factor(scores)
    return through / 2_000


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_after_a_change_of_the_passes_pure_noise_stays_out(
    database: Database, before: int, now: int
) -> None:
    judge = replace(PLAIN, slope=0.1)
    add_window(database, judge, passes=before, now=1_000.0)

    with database.read() as session:
        noise = measured_noise(session, [(*KEY, now)])[*KEY, now]

    assert (noise.passes, noise.measured_passes) == (now, before)
    # 5% for the right sd, which is known to some 5%
    assert pure_noise_passing(judge, now, noise.sd) <= PASSING + 0.07


def test_the_noise_of_four_passes_lets_much_of_two_through() -> None:
    """What the test above would miss if it could not fail."""
    sd = noise_of(PLAIN, 4).sd.value

    assert pure_noise_passing(PLAIN, 2, sd) > 0.3


def test_noise_of_the_same_passes_is_taken_also_when_another_is_newer(database: Database) -> None:
    add_window(database, PLAIN, passes=2, now=1_000.0)
    add_window(database, PLAIN, passes=4, now=2_000.0)
    add_window(database, PLAIN, passes=8, now=3_000.0, groups=LEAST_GROUPS - 1)

    with database.read() as session:
        noise = measured_noise(session, [(*KEY, passes) for passes in (2, 4, 8)])

    assert {one.passes: one.measured_passes for one in noise.values()} == {2: 2, 4: 4, 8: 4}
    assert noise[*KEY, 2].sd == pytest.approx(0.08 / 2**0.5, rel=0.2)
    assert noise[*KEY, 4].sd == pytest.approx(0.04, rel=0.2)
    assert noise[*KEY, 8].sd == noise[*KEY, 4].sd
