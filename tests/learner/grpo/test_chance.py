"""The shuffle gate: its variance is that of all deals, and a run learns from no chance."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pvariance

import pytest

from learner.grpo.chance import LEAST, MOST, of_group, pooled, score
from learner.grpo.trainer import run_steps
from learner.policy.logprobs import Policy
from learner.records import TrainingGroup, TrainingOutcome
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row

PROMPT = (1, 2, 3)
GOOD, BAD = (10, 11), (20,)
CHANCE = (True, True, True, False, False, False)
"""Dealt to three steps: as many groups of each kind in each of them."""


def sessions(rewards: Sequence[float], name: str = "tg_1") -> TrainingGroup:
    """A group whose first session has two rows."""
    rows = [
        make_row((10 + number, 11), reward) for number, reward in enumerate((rewards[0], *rewards))
    ]
    numbers = (0, *range(len(rewards)))
    return replace(
        make_group(PROMPT, rows, group_id=name),
        scores=(rewards[0], *rewards),
        sessions=numbers,
        weights=(1.0,) * len(numbers),
        steps=(0.0,) * len(numbers),
    )


def test_mean_and_variance_are_those_of_every_deal_of_the_rewards() -> None:
    rewards, moved = (0.9, 0.1, 0.4, 0.4), (1.0, 0.6, -0.3, 2.0, 0.1)

    dealt = [of_group(sessions(deal), moved) for deal in itertools.permutations(rewards)]

    totals, variances = zip(*dealt, strict=True)
    assert fmean(totals) == pytest.approx(0.0, abs=1e-12)
    assert pvariance(totals) == pytest.approx(variances[0])
    assert min(variances) == pytest.approx(max(variances))


def test_a_session_moves_by_the_mean_of_its_tokens_and_masked_rows_have_no_part() -> None:
    whole = sessions((1.0, 0.0))
    without = replace(
        whole, rows=(whole.rows[0], replace(whole.rows[1], trainable=False), whole.rows[2])
    )

    t, _ = of_group(whole, [0.4, 0.8, 0.0])
    assert t == pytest.approx(0.3)  # a = 1, -1; c = 0.3, 0 nats a token
    t, _ = of_group(without, [0.4, 0.0])
    assert t == pytest.approx(0.2)


def test_the_z_of_a_run_and_of_its_line() -> None:
    assert score([(0.0, 0.0), (1.0, 3.0), (2.0, 1.0)]) == pytest.approx(1.5)
    assert score([(0.0, 0.0)]) is None
    assert (score([(-9.0, 1.0)]), score([(9.0, 1.0)])) == (-MOST, MOST)
    assert pooled(1.0, ()) == 1.0
    assert pooled(1.0, (2.0, -1.0)) == pytest.approx((1 + 1.6 - 0.64) / (1 + 0.64 + 0.4096) ** 0.5)


def run(
    policy: Policy,
    settings: Learner,
    *,
    liked: Sequence[bool],
    signals: Sequence[float] | None = (),
) -> TrainingOutcome:
    """Train on a group of answers, and on a group of sessions for each of `liked`: whether the
    good sessions are those that said `GOOD`."""
    answers = make_group(PROMPT, [make_row((30,), 0.5), make_row((31,), -0.5)], group_id="ag_1")
    groups = [answers]
    for number, is_liked in enumerate(liked):
        rewards = (1.0, 1.0, 0.0, 0.0) if is_liked else (0.0, 0.0, 1.0, 1.0)
        said = (GOOD, GOOD, BAD, BAD)
        rows = [make_row(ids, reward - 0.5) for ids, reward in zip(said, rewards, strict=True)]
        one = make_group(PROMPT, rows, group_id=f"tg_{number}")
        weights, steps = (1.0,) * 4, (0.0,) * 4
        groups.append(
            replace(one, scores=rewards, sessions=(0, 1, 2, 3), weights=weights, steps=steps)
        )
    settings = settings.model_copy(update={"max_drift": 100.0})
    job = replace(job_of(groups, settings), signals=signals)
    return run_steps(policy, job)[0]


def test_sessions_whose_rewards_agree_are_learned_from(
    policy: Policy, learner_settings: Learner
) -> None:
    found = run(policy, learner_settings, liked=[True] * 8)

    assert found.faults == {}
    assert found.signal is not None
    assert found.signal > LEAST
    assert sum(one.groups for one in found.metrics) == 9
    assert found.metrics[0].alignment_variance == 0  # nothing had been learned before it


@pytest.mark.parametrize("signals", [(), (-0.5, 0.3)])
def test_sessions_whose_rewards_are_chance_cost_only_themselves(
    policy: Policy, learner_settings: Learner, signals: tuple[float, ...]
) -> None:
    found = run(policy, learner_settings, liked=CHANCE, signals=signals)

    assert {fault.reason for fault in found.faults.values()} == {"by_chance"}
    assert len(found.faults) == len(CHANCE)
    assert abs(found.signal or 0.0) < LEAST
    assert [one.groups for one in found.metrics] == [1]  # the group of answers


@pytest.mark.parametrize("signals", [(4.0,), (-6.0,), None])
def test_earlier_runs_of_the_line_may_have_told(
    policy: Policy, learner_settings: Learner, signals: tuple[float, ...] | None
) -> None:
    found = run(policy, learner_settings, liked=CHANCE, signals=signals)

    assert found.faults == {}


def test_rounding_of_the_server_is_no_move(policy: Policy, learner_settings: Learner) -> None:
    """With a rate of nearly 0 the policy stands still, though no recorded value is exact."""
    settings = learner_settings.model_copy(update={"learning_rate": 1e-12})

    found = run(policy, settings, liked=[True] * 8, signals=None)

    moved = [one.alignment_variance for one in found.metrics]
    assert max(moved) < 1e-12
