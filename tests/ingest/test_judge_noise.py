"""Noise and position bias from the passes over each group, and the daily check of the judge."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from ingest.errors import JudgeUnavailableError
from ingest.judge_noise import (
    DAY_S,
    LEAST_GROUPS,
    SUBJECT,
    WINDOW,
    Check,
    NoiseWatch,
    accept_now,
    add_judgement,
    difference,
    measured_noise,
    newest,
    noise_by_day,
    read_noise_state,
    sums_of,
)
from ingest.judge_watch import JudgeState, write_judge_state
from ingest.records import ShownPass
from ingest.ruler.judge import JudgeReply
from ingest.ruler.prompt import hash_of
from ingest.ruler.ruler import JudgeCall, Judgement
from learner.runs.selection import PASSING, noise_factor
from sidecar.settings import Judge as JudgeSettings
from sidecar.store.database import Database
from sidecar.store.models import FlagRow, JudgeCallRow
from support.fake_judge import FakeJudge, Shown, scores_reply
from support.simulated_judge import EVEN, UNEVEN, SimulatedJudge, sums
from support.stores import NewStore

SETTINGS = JudgeSettings(model="scripted", rubric="Be good.")


def one_pass(*scores: float, order: tuple[int, ...] | None = None) -> ShownPass:
    return ShownPass(order=order or tuple(range(len(scores))), scores=scores)


def test_the_sums_of_one_group_by_hand() -> None:
    # Differences +0.2, 0, -0.2 between the passes: what the last position gets is -0.2 above the
    # first, in both. Another +0.06 of the answer in the middle is noise: +0.03 and -0.03 about its
    # mean, of which the means of the passes take a third.
    found = sums_of([one_pass(0.6, 0.53, 0.4), one_pass(0.4, 0.47, 0.6, order=(2, 1, 0))])

    assert found is not None
    assert (found.groups, found.freedom) == (1, 2)
    assert found.of_position == pytest.approx(4 * 0.5**2)
    assert found.slope == pytest.approx(-0.2)
    left = 2 * (0.02**2 + 2 * 0.01**2)
    assert found.pass_variance == pytest.approx(left / (2 - 1))
    assert found.sd(2) == pytest.approx(math.sqrt(left / 2))
    # a single pass has the bias too, by the variance of the places 0, 0.5 and 1
    assert found.sd(1) == pytest.approx(math.sqrt(left + 0.2**2 * 0.25))
    assert found.flips == pytest.approx(1.0)


def test_what_all_answers_of_a_pass_share_is_no_noise() -> None:
    found = sums_of([one_pass(0.1, 0.5), one_pass(0.3, 0.7)])

    assert found is not None
    assert found.squares == pytest.approx(0.0)
    assert found.flips == 0.0


@pytest.mark.parametrize("passes", [[], [one_pass(0.1, 0.9)], [one_pass(0.1), one_pass(0.2)]])
def test_a_group_of_one_pass_or_one_answer_tells_nothing(passes: list[ShownPass]) -> None:
    assert sums_of(passes) is None


@pytest.mark.parametrize(
    ("judge", "passes"), [(UNEVEN, 2), (SimulatedJudge(noise=0.08, slope=0.3), 4)]
)
def test_known_noise_and_bias_are_found(judge: SimulatedJudge, passes: int) -> None:
    found = sums(judge, groups=1_000, passes=passes)

    uneven = math.sqrt(1 + 1 / 12) if judge.uneven else 1.0  # factors of 0.5 to 1.5
    rounded = judge.step**2 / 12
    assert math.sqrt(found.pass_variance) == pytest.approx(
        math.sqrt((uneven * judge.noise) ** 2 + rounded), rel=0.08
    )
    assert found.slope == pytest.approx(judge.slope, abs=0.02)


@pytest.mark.parametrize(("judge", "passes"), [(EVEN, 1), (replace(UNEVEN, taste=0.0), 3)])
def test_pure_noise_stays_out_at_any_passes(judge: SimulatedJudge, passes: int) -> None:
    sd = sums(judge, groups=500).sd(passes)
    rng = random.Random(passes)
    through = 0
    for number in range(2_000):
        rounds = judge.score([0.6] * 8, number, passes, rng)
        scores = [fmean(column) for column in zip(*(one.scores for one in rounds), strict=True)]
        through += pstdev(scores) >= sd * noise_factor(scores)

    assert through / 2_000 < PASSING + (0.08 if judge.uneven else 0.02)


def judgement(*passes: ShownPass) -> Judgement:
    call = JudgeCall(
        judge_model="scripted", order_seed=0, attempt=0, error=None,
        reply=JudgeReply(text="", prompt_tokens=0, completion_tokens=0, seconds=0.0),
    )  # fmt: skip
    return Judgement(scores=(), explanations=(), disagreement=None, calls=(call,), passes=passes)


def score(database: Database, groups: int, *, now: float, apart: float = 0.1) -> None:
    with database.write() as session:
        for _ in range(groups):
            scores = one_pass(0.5, 0.5), one_pass(0.5 + apart, 0.5, order=(0, 1))
            add_judgement(session, judgement(*scores), hash_of(SETTINGS), now)


@pytest.mark.both_stores
def test_the_newest_days_with_enough_groups_tell(new_store: NewStore) -> None:
    database, key = new_store(), ("scripted", hash_of(SETTINGS), 2)
    score(database, LEAST_GROUPS - 1, now=5.0, apart=0.9)
    with database.read() as session:
        assert measured_noise(session, [key]) == {}
    score(database, WINDOW - 1, now=DAY_S + 5.0)
    score(database, 1, now=3 * DAY_S)

    with database.read() as session:
        days = noise_by_day(session, *key[:2])
        measured = measured_noise(session, [key, ("other", "r", 2)])

    assert [(day, one.groups) for day, one in days] == [
        (3, 1), (1, WINDOW - 1), (0, LEAST_GROUPS - 1),
    ]  # fmt: skip
    assert newest(days).groups == WINDOW
    (found,) = measured.values()
    # two passes that differ by 0.1 in one of two answers: squares 4 * 0.025^2, freedom 1
    assert found.sd == pytest.approx(math.sqrt(WINDOW * 0.005 / 2 / (WINDOW - 1) / 2), rel=1e-6)


def check(*groups: list[float], variance: float = 0.0004) -> Check:
    return Check(at=1.0, scores=list(groups), variance=variance)


def scores_of(rng: random.Random, sd: float, *, level: float = 0.0) -> Check:
    groups = [[0.1 * k + level + rng.gauss(0, sd) for k in range(4)] for _ in range(10)]
    return check(*groups, variance=sd**2)


def test_a_judge_that_stays_the_same_seldom_alarms_and_another_one_does() -> None:
    rng = random.Random(1)
    first = [scores_of(rng, 0.04) for _ in range(500)]
    same = sum(bool(difference(one, scores_of(rng, 0.04))) for one in first)
    noisier = sum(bool(difference(one, scores_of(rng, 0.12))) for one in first)
    harsher = sum(bool(difference(one, scores_of(rng, 0.04, level=-0.1))) for one in first)

    assert same <= 5
    assert noisier >= 480
    assert harsher >= 480


def test_what_changed_is_said() -> None:
    first = check(*[[0.2, 0.8]] * 10)

    assert difference(first, first) == ""
    assert difference(first, check(*[[0.8, 0.2]] * 10)) == (
        "the scores of the calibration groups changed by 0.849, where noise explains 0.032"
    )
    assert difference(first, check(*[[0.1, 0.7]] * 10)) == (
        "it gives the calibration groups -0.100 more on average"
    )


def by_length(shown: Shown) -> str:
    return scores_reply({n: min(1.0, len(str(one)) / 400) for n, one in shown.items()})


def against_length(shown: Shown) -> str:
    return scores_reply({n: 1 - min(1.0, len(str(one)) / 400) for n, one in shown.items()})


async def test_the_judge_is_checked_daily_and_a_change_told_once(new_store: NewStore) -> None:
    database, judge, now, told = new_store(), FakeJudge(by_length), [1e6], list[str]()
    watch = NoiseWatch(database, judge, SETTINGS, clock=lambda: now[0], announce=told.append)
    with database.write() as session:
        write_judge_state(session, JudgeState(state="works", since=1.0), now=1.0)

    async def pass_a_day(*script: object) -> int:
        judge.script, before = list(script), len(judge.conversations)  # type: ignore[arg-type]
        for _ in range(2):  # the second finds nothing to do
            await watch.step()
        now[0] += DAY_S
        return len(judge.conversations) - before

    assert await pass_a_day(by_length) == 0, "the first check is due a day after the first sight"
    assert accept_now(database, SETTINGS, now=now[0]) is None
    assert [await pass_a_day(by_length) for _ in range(2)] == [20, 20]
    assert told == []
    assert [await pass_a_day(against_length) for _ in range(2)] == [20, 20]
    assert len(told) == 1
    assert told[0].startswith("judge scripted is not as it was: the scores of the calibration")
    with database.read() as session:
        state = read_noise_state(session)
        calls = session.query(JudgeCallRow.group_id).distinct().all()
    assert state is not None
    assert (state.drift_at, calls) == (1e6 + 3 * DAY_S, [(SUBJECT,)])

    assert accept_now(database, SETTINGS, now=now[0]) == 1e6 + 4 * DAY_S
    with database.read() as session:
        state = read_noise_state(session)
    assert state is not None
    assert (state.drift, state.drift_at) == ("", None)
    await pass_a_day(against_length)
    assert len(told) == 1


async def test_an_unanswered_check_is_tried_again_after_an_hour(new_store: NewStore) -> None:
    database, now = new_store(), [1e6]
    judge = FakeJudge(by_length)
    watch = NoiseWatch(database, judge, SETTINGS, clock=lambda: now[0])
    await watch.step()
    now[0] += DAY_S
    await watch.step()
    assert judge.conversations == [], "the judge is not known to work"
    with database.write() as session:
        write_judge_state(session, JudgeState(state="works", since=1.0), now=1.0)
    judge.script = [by_length, JudgeUnavailableError("away")]
    await watch.step()
    judge.script, before = [by_length], len(judge.conversations)
    await watch.step()
    assert len(judge.conversations) == before
    now[0] += 3_601.0

    await watch.step()

    assert len(judge.conversations) == before + 20


async def test_a_damaged_state_is_written_anew(new_store: NewStore) -> None:
    database = new_store()
    with database.write() as session:
        for name in ("judge_noise", "judge_checks"):
            session.add(FlagRow(name=name, value='{"at": "x"}', updated_at=1.0))
    score(database, 3, now=5.0)

    await NoiseWatch(database, FakeJudge(), SETTINGS, clock=lambda: 9.0).step()

    with database.read() as session:
        state = read_noise_state(session)
    assert state is not None
    assert (state.groups, state.passes, state.drift) == (3, 2, "")
    assert state.sd is not None
