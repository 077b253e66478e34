"""A group's signal: what of its advantages does not cancel between answers alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from learner.errors import DivergedError, ParentError
from learner.grpo import base_kl
from learner.grpo.base_kl import BaseKl, require_near
from learner.grpo.optimizer import rate_share, signal, uncancelled
from learner.grpo.trainer import run_steps
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row

HALF = math.log(0.5)


def test_answers_that_share_nothing_have_the_root_mean_square_of_their_advantages() -> None:
    rows = [make_row((1, 2), 0.5), make_row((3, 4), -0.5)]
    assert signal(rows) == pytest.approx(0.5)


@pytest.mark.parametrize("advantages", [(0.5, -0.5), (0.1, 0.2, -0.3)])
def test_identical_answers_have_no_signal(advantages: tuple[float, ...]) -> None:
    rows = [make_row((5, 6, 7), advantage) for advantage in advantages]
    assert signal(rows) == 0.0


def test_common_beginnings_cancel_and_what_follows_counts() -> None:
    """The first 3 of 4 places of each answer are common: 1 of 4 squares is left, so half."""
    common = (HALF,) * 4
    rows = [
        make_row((1, 2, 3, 4), 0.5, logprobs=common),
        make_row((1, 2, 3, 5), -0.5, logprobs=common),
    ]
    assert uncancelled(rows) == pytest.approx(0.5)
    assert signal(rows) == pytest.approx(0.25)


def test_the_share_of_the_rate_is_the_signal_over_the_groups_reference(
    learner_settings: Learner,
) -> None:
    group = make_group((9,), [make_row((1, 2), 0.1), make_row((3, 4), -0.1)])
    job = job_of([group], learner_settings)

    assert rate_share(group, job) == pytest.approx(0.4)
    squeezed = replace(job, references={group.group_id: 0.125})
    assert rate_share(group, squeezed) == pytest.approx(0.8)
    certain = replace(job, references={group.group_id: 0.05})
    assert rate_share(group, certain) == 1.0


def test_a_token_that_was_certain_tells_nothing() -> None:
    """One answer stopped where the other was cut: they differ by an end that had to come."""
    text = (HALF,) * 3
    cut, ended = (
        make_row((1, 2, 3), 0.5, logprobs=text),
        make_row((1, 2, 3, 0), -0.5, logprobs=(*text, -1e-6)),
    )
    assert uncancelled([cut, ended]) < 1e-6
    assert signal([cut, ended]) == 0.0
    likely = replace(ended, logprobs=(*text, HALF))
    assert uncancelled([cut, likely]) == pytest.approx(math.sqrt(1 / 7))


def test_equal_advantages_add_up_and_count_once() -> None:
    assert (
        uncancelled([make_row((1, 2), 0.5), make_row((1, 2), 0.5), make_row((3, 4), -1.0)]) == 1.0
    )


def test_temperatures_masks_and_tokens_left_out_make_other_places() -> None:
    warm = [make_row((1, 2), 0.5), make_row((1, 2), -0.5, temperature=0.7)]
    assert uncancelled(warm) == 1.0
    masked = [make_row((1, 2), 0.5), make_row((1, 2), -0.5, trainable=False)]
    assert signal(masked) == pytest.approx(0.5)
    kept = [make_row((1, 2), 0.5, kept=(False, True)), make_row((1, 3), -0.5, kept=(False, True))]
    assert uncancelled(kept) == 1.0
    assert signal([]) == 0.0


def groups_of(
    answers: Sequence[tuple[int, ...]], advantages: tuple[float, ...] = (0.5, 0.3, -0.3, -0.5)
) -> list[TrainingGroup]:
    """Six groups of these answers, whose log-probabilities the trainer computes."""
    rows = [
        replace(make_row(ids, advantage, logprobs=(0.0,) * len(ids)), recorded=False)
        for ids, advantage in zip(answers, advantages, strict=True)
    ]
    return [make_group((1 + number, 2, 3), rows, group_id=str(number)) for number in range(6)]


def test_rounding_of_gradients_that_cancel_moves_nothing(
    tiny_base: Path, policy: Policy, learner_settings: Learner
) -> None:
    """Identical answers with different advantages; before, they moved the weights as sound ones."""
    settings = learner_settings.model_copy(update={"groups_per_step": 2})
    alike: list[tuple[int, ...]] = [(5, 6, 7, 8, 9, 10, 11, 12)] * 4
    moved, _ = run_steps(policy, job_of(groups_of(alike), settings))
    sound = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    answers = [(5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16), (17, 18, 19, 20)]
    useful, _ = run_steps(sound, job_of(groups_of(answers), settings))
    assert [one.update_norm for one in moved.metrics] == [0.0, 0.0, 0.0]
    assert all(one.update_norm > 0.01 for one in useful.metrics)


def test_advantages_times_a_hundredth_move_the_weights_at_least_ten_times_less(
    tiny_base: Path, learner_settings: Learner
) -> None:
    """Through the whole trainer: checks, loss, signal and optimiser, three steps of two groups.

    With the reference at 0.25, 0.5 counts as 0.25, so a bound of the update is 50 times smaller.
    """
    settings = learner_settings.model_copy(update={"groups_per_step": 2})
    answers = [(5, 6, 7, 8), (9, 10, 11, 12), (5, 14, 15, 16), (17, 18, 19, 20)]

    def moved(size: float) -> list[float]:
        policy = load_policy(str(tiny_base), Parent(name="base"), settings)
        used = groups_of(answers, (size, size, -size, -size))
        outcome, _ = run_steps(policy, job_of(used, settings))
        return [one.update_norm for one in outcome.metrics]

    strong, weak = moved(0.5), moved(0.005)

    assert len(strong) == len(weak) == 3
    assert all(one > 0.1 for one in strong), "a run that does not move shows nothing"
    assert 0 < sum(weak) <= sum(strong) / 10


@pytest.mark.parametrize(
    ("per_step", "said"),
    [(2, r"over the limit of 0.5.*learning_rate"), (8, "after 1 step the")],
    ids=["between steps", "after the last"],
)
def test_a_run_that_leaves_the_base_fails_in_words(
    policy: Policy,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
    per_step: int,
    said: str,
) -> None:
    monkeypatch.setattr(base_kl, "KL_LIMIT", 0.5)
    changes = {"groups_per_step": per_step, "learning_rate": 1.0}
    settings = learner_settings.model_copy(update=changes)
    answers = [(5, 6, 7, 8), (9, 10, 11, 12), (13, 14, 15, 16), (17, 18, 19, 20)]
    with pytest.raises(DivergedError, match=said):
        run_steps(policy, job_of(groups_of(answers), settings))


def test_the_limit_names_the_parent_that_was_beyond_it(
    learner_settings: Learner, tmp_path: Path
) -> None:
    parent = Parent(name="m--v3", path=tmp_path)
    job = job_of([], learner_settings, parent=parent)
    far = BaseKl(nats=60.0, tokens=9, bounded=11.0)
    with pytest.raises(ParentError, match="m--v3 is 11 nats"):
        require_near(far, job, steps=0)
    with pytest.raises(DivergedError):
        require_near(far, job, steps=1)
    for away in (BaseKl(nats=50.0, tokens=9, bounded=10.0), None):
        require_near(away, job, steps=0)
