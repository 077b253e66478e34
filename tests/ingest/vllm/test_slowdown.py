"""How many candidates slow users by at most the limit, on simulated engines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from ingest.vllm.load import EngineWork, parse_work
from ingest.vllm.throttle import (
    ALL,
    LEARNING_S,
    LONGEST_PAUSE_S,
    MET,
    MIN_POINTS,
    Point,
    SlowdownLimit,
    StepCost,
    fit,
    most_candidates,
    pause_s,
)

EVERY_S = 0.5
StepTime = Callable[[int], float]
GPU = StepCost(step_s=0.010, request_s=0.0001)
CPU = StepCost(step_s=0.020, request_s=0.008)


def linear(cost: StepCost) -> StepTime:
    return lambda running: cost.step_s + cost.request_s * running


class Engine:
    """Decodes; every step takes `step_s(running)`. Requests of users last one interval."""

    def __init__(self, step_s: StepTime, *, noise: float = 0.0, seed: int = 1) -> None:
        self.step_s = step_s
        self.noise = noise
        self.rng = random.Random(seed)
        self.work = EngineWork(tokens=0, tokens_s=0, steps=0, ended=0, prefills_s=0)

    def run(self, running: int, *, ended: int = 0) -> EngineWork:
        """Go on for one interval with so many requests."""
        if running:
            each = self.step_s(running) * self.rng.uniform(1 - self.noise, 1 + self.noise)
            steps = EVERY_S / each
            self.work = replace(
                self.work,
                steps=self.work.steps + steps,
                tokens=self.work.tokens + steps * running,
                tokens_s=self.work.tokens_s + steps * running * each,
            )
        self.work = replace(
            self.work,
            ended=self.work.ended + ended,
            prefills_s=self.work.prefills_s + 0.02 * ended,
        )
        return self.work


class World:
    """An engine, its limit, and candidates that are sent whenever they are allowed."""

    def __init__(self, engine: Engine, limit: float = 0.05, *, candidate_s: float = 2.0) -> None:
        self.engine = engine
        self.limit = SlowdownLimit(limit)
        self.now = 1_000.0
        self.candidate_s = candidate_s
        self.own: list[float] = []
        """When each candidate in flight ends."""
        self.started = 0

    def go(self, users: int) -> int:
        """Pass one interval. Returns: the candidates in flight at its end."""
        self.now += EVERY_S
        done = sum(end <= self.now for end in self.own)
        self.own = [end for end in self.own if end > self.now]
        for _ in range(done):
            self.limit.candidate_ended(self.candidate_s)
        work = self.engine.run(users + len(self.own) + done, ended=users + done)
        self.limit.measured(self.now, work, users=users)
        while len(self.own) < min(64, self.limit.allowed(self.now)):
            self.own.append(self.now + self.candidate_s)
            self.started += 1
        return len(self.own)


def worked(world: World, *, users: Callable[[int], int], seconds: float) -> list[int]:
    return [world.go(users(number)) for number in range(int(seconds / EVERY_S))]


def test_the_limit_by_hand() -> None:
    # (10 + 0.1 * 20) ms * 0.05 / 0.1 ms = 6
    assert most_candidates(GPU, 20, 0.05) == 6
    # an empty engine is that of one user: 10.1 * 0.05 / 0.1 = 5.05
    assert most_candidates(GPU, 0, 0.05) == most_candidates(GPU, 1, 0.05) == 5
    # (20 + 8) * 0.05 / 8 = 0.175
    assert most_candidates(CPU, 1, 0.05) == 0
    assert most_candidates(StepCost(step_s=0.01, request_s=0.0), 3, 0.05) == ALL


@given(
    step_s=st.floats(1e-4, 1.0),
    request_s=st.floats(1e-7, 1.0),
    users=st.integers(0, 500),
    limit=st.floats(0.001, 2.0),
)
def test_as_many_as_the_limit_allows(
    step_s: float, request_s: float, users: int, limit: float
) -> None:
    cost = StepCost(step_s=step_s, request_s=request_s)
    allowed = most_candidates(cost, users, limit)

    def slowed(candidates: int) -> float:
        alone = step_s + request_s * max(users, 1)
        return candidates * request_s / alone

    if allowed < ALL:
        assert slowed(allowed) <= limit * (1 + 1e-9)
        assert slowed(allowed + 1) > limit * (1 - 1e-9)


def test_the_cost_of_a_step_is_fitted_exactly_without_noise() -> None:
    points = [Point(n, 10.0, n % 4, 0.01 + 0.002 * (n % 4), 0, 0) for n in range(40)]

    found = fit(points)

    assert found is not None
    assert found.step_s == pytest.approx(0.01)
    assert found.request_s == pytest.approx(0.002)


def test_too_few_points_or_points_that_are_all_alike_show_nothing() -> None:
    assert fit([Point(n, 10.0, n % 4, 0.01, 0, 0) for n in range(19)]) is None
    assert fit([Point(n, 10.0, 3.0 + 0.1 * (n % 2), 0.01, 0, 0) for n in range(50)]) is None


def test_noise_that_hides_the_cost_of_a_request_allows_no_candidate() -> None:
    rng = random.Random(11)
    worst = 0
    for _ in range(200):
        points = [
            Point(n, 10.0, rng.randrange(1, 8), 0.2 * rng.uniform(0.5, 1.5), 0, 0)
            for n in range(20)
        ]
        found = fit(points)
        assert found is not None
        worst = max(worst, most_candidates(found, 1, 0.05))

    assert worst <= 2


@pytest.mark.parametrize("seed", range(2))
def test_noise_costs_candidates_and_not_users(seed: int) -> None:
    world = World(Engine(linear(GPU), noise=0.1, seed=seed))
    rng = random.Random(seed)

    flights = worked(world, users=lambda _: rng.randrange(5, 40), seconds=300)

    assert world.limit.cost is not None
    assert world.limit.cost.request_s >= GPU.request_s * 0.8
    assert max(flights[-100:]) <= most_candidates(GPU, 40, 0.05) * 1.25


def test_on_a_fast_engine_candidates_run_beside_users_within_the_limit() -> None:
    world = World(Engine(linear(GPU)))
    rng = random.Random(3)

    flights = worked(world, users=lambda _: rng.randrange(5, 40), seconds=120)

    assert min(flights[60:]) >= most_candidates(GPU, 5, 0.05) == 5
    assert max(flights[60:]) <= most_candidates(GPU, 40, 0.05) == 7


def test_on_an_engine_that_saturates_the_limit_follows_what_its_steps_cost_then() -> None:
    def saturating(running: int) -> float:
        return 0.010 + 0.0001 * running + 0.002 * max(0, running - 16)

    world, rng = World(Engine(saturating)), random.Random(5)
    light = worked(world, users=lambda _: rng.randrange(1, 8), seconds=60)
    heavy = worked(world, users=lambda _: rng.randrange(18, 40), seconds=700)

    assert light[-1] >= 5
    assert max(heavy[-100:]) <= 2  # (10 + 3 + 2.1 * 22) * 0.05 / 2.1 = 1.4 at 40


def test_on_a_slow_engine_no_candidate_runs_beside_users_who_keep_coming() -> None:
    world, rng = World(Engine(linear(CPU))), random.Random(4)

    flights = worked(world, users=lambda _: rng.randrange(1, 5), seconds=300)

    assert sum(flights) == 0


def test_users_who_come_at_random_seldom_meet_a_candidate_on_a_slow_engine() -> None:
    world, rng = World(Engine(linear(CPU))), random.Random(9)
    came = met = 0
    for _ in range(40_000):
        users = sum(rng.random() < 0.1 for _ in range(3))
        came += users
        met += users * (len(world.own) > 0)
        world.go(users)

    assert came > 10_000
    assert world.started > 0
    assert met / came <= MET


def test_an_idle_engine_is_never_starved() -> None:
    world = World(Engine(linear(CPU)))
    worked(world, users=lambda number: 1 + number % 3, seconds=60)
    assert not world.own

    night = worked(world, users=lambda _: 0, seconds=600)

    assert max(night) == 1
    assert 1 in night[: int((LONGEST_PAUSE_S + 1) / EVERY_S)]
    assert sum(night) > 0.9 * len(night) - LONGEST_PAUSE_S / EVERY_S


@given(rate=st.floats(0, 1e4), candidate_s=st.floats(0, 1e4))
def test_the_pause_ends(rate: float, candidate_s: float) -> None:
    pause = pause_s(rate, candidate_s)

    assert 0 <= pause <= LONGEST_PAUSE_S
    if 0 < pause < LONGEST_PAUSE_S:
        gaps = math.exp(-rate * pause)
        assert gaps * (1 + rate * candidate_s) == pytest.approx(MET)


def test_users_who_never_vary_are_watched_first_and_then_one_candidate_shows_its_cost() -> None:
    world = World(Engine(linear(GPU)))
    before = worked(world, users=lambda _: 4, seconds=LEARNING_S - 1)
    one = worked(world, users=lambda _: 4, seconds=2)

    assert max(before) == 0
    assert max(one) == 1


def test_an_engine_that_does_not_tell_its_work_gets_one_at_a_time() -> None:
    limit = SlowdownLimit(0.05)
    limit.measured(1.0, None, users=3)

    assert limit.allowed(1.0) == 1
    assert limit.gap_s() == 0.0


def test_starts_are_so_far_apart_that_prefills_take_the_limit_of_the_time() -> None:
    world = World(Engine(linear(GPU)))
    worked(world, users=lambda number: 1 + number % 7, seconds=30)

    assert world.limit.gap_s() == pytest.approx(0.02 / 0.05)
    world.go(0)
    assert world.limit.gap_s() == 0.0


def test_a_vllm_that_restarts_is_fitted_anew() -> None:
    world = World(Engine(linear(GPU)))
    worked(world, users=lambda number: 1 + number % 7, seconds=30)
    assert world.limit.cost is not None

    world.engine = Engine(linear(GPU))
    world.go(3)

    assert world.limit.cost is None


PAGE = """\
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01"} 3.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="a}b"} 30.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="a}b"} 1.5
vllm:iteration_tokens_total_count{engine="0"} 10.0
vllm:iteration_tokens_total_sum{engine="0"} 99.0
vllm:request_prefill_time_seconds_count{engine="0"} 4.0
vllm:request_prefill_time_seconds_sum{engine="0"} 0.25
"""


def test_the_work_is_read_from_vllms_page_and_summed_over_its_engines() -> None:
    one = EngineWork(tokens=30, tokens_s=1.5, steps=10, ended=4, prefills_s=0.25)

    assert parse_work(PAGE) == one
    assert parse_work(PAGE + PAGE.replace('"0"', '"1"')) == EngineWork(
        tokens=60, tokens_s=3, steps=20, ended=8, prefills_s=0.5, engines=2
    )


@pytest.mark.parametrize("bad", ["NaN", "+Inf", "many", ""])
def test_work_that_cannot_be_read_is_not_known_and_no_error(bad: str) -> None:
    assert parse_work(PAGE.replace("0.25", bad)) is None
    assert parse_work(PAGE.replace("iteration", "other")) is None


@pytest.mark.parametrize("huge", [1e160, 1e300, 1.7e308])
def test_counters_beyond_every_number_show_nothing_and_are_no_error(huge: float) -> None:
    limit = SlowdownLimit(0.05)
    for number in range(2 * MIN_POINTS):
        work = EngineWork(
            tokens=huge * number / 100,
            tokens_s=huge * (number % 7),
            steps=1.0 + number,
            ended=huge * number / 100,
            prefills_s=huge * (number % 3),
        )
        limit.measured(1_000.0 + number, work, users=number % 5)
        assert limit.allowed(1_000.0 + number) in (0, 1)
    assert limit.cost is None
