"""The supervised start: what it learns from, when it is taken, and what a bad group costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from learner.grpo.trainer import run_steps
from learner.grpo.warmup import best_answers, wanted_steps
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy, packs_of
from learner.records import Parent, Silent, Stage, TrainingGroup
from sidecar.settings import Advanced, Learner
from tests.learner.conftest import job_of

if TYPE_CHECKING:
    from tests.learner.conftest import MakeGroup, MakeRow

GOOD, BAD = (10, 11, 12), (20, 21)


@pytest.fixture
def scored(group: MakeGroup, row: MakeRow) -> TrainingGroup:
    return group((1, 2, 3), [row(GOOD, 0.5), row(BAD, -0.5)])


def nats_of(policy: Policy, group: TrainingGroup) -> float:
    """Mean negative log-probability of the best answer."""
    (pack,) = packs_of(policy, best_answers([group])[0], 1_000)
    with torch.no_grad():
        return -float(policy.logprobs(pack)[0].mean())


def test_the_best_trainable_answer_is_taken(group: MakeGroup, row: MakeRow) -> None:
    rows = [row((1,), 0.2), row((2,), 0.8, trainable=False), row((3,), 0.4), row((4,), 0.4)]

    (found,) = best_answers([group((9,), rows), group((9,), [rows[1]])])

    assert [one.token_ids for one in found.rows] == [(3,)]
    assert found.scores == (0.7,)


def test_it_makes_the_best_answers_likelier_step_by_step(
    policy: Policy, scored: TrainingGroup, learner_settings: Learner
) -> None:
    settings = learner_settings.model_copy(
        update={"warmup": 4, "max_drift": 10.0, "learning_rate": 0.02}
    )
    before = nats_of(policy, scored)

    outcome, state = run_steps(policy, job_of([scored], settings))

    warmed = outcome.algorithm["warmup_nats"]
    assert isinstance(warmed, list)
    assert warmed[0] == pytest.approx(before, abs=1e-5), "the first figure is the base's"
    assert warmed == sorted(warmed, reverse=True)
    assert warmed[-1] < before - 0.1
    assert state.steps == 4 + 1
    assert len(outcome.metrics) == 1


def test_its_steps_are_as_long_as_the_learning_rate_says(
    tiny_base: Path, scored: TrainingGroup, learner_settings: Learner
) -> None:
    """A tenth of the rate gains a tenth in the first step. Its own are all that is measured."""
    gained = []
    for rate in (1e-3, 1e-4):
        settings = learner_settings.model_copy(
            update={
                "warmup": 2,
                "max_drift": 10.0,
                "learning_rate": rate,
                "advanced": Advanced(warmup_steps=0),
            }
        )
        policy = load_policy(str(tiny_base), Parent(name="base"), settings)
        outcome, _ = run_steps(policy, job_of([scored], settings))
        warmed = outcome.algorithm["warmup_nats"]
        assert isinstance(warmed, list)
        gained.append(warmed[0] - warmed[1])

    assert gained[1] > 0
    assert gained[0] == pytest.approx(10 * gained[1], rel=0.3)


class Planned(Silent):
    """Keeps what it was told of the supervised steps."""

    def __init__(self) -> None:
        self.plans: list[list[tuple[str, int, int]]] = []
        self.groups: list[str] = []

    def plan(self, stages: Sequence[Stage]) -> None:
        self.plans.append([(one.name, one.parts[0].step, one.steps) for one in stages])

    def done(self, group_id: str) -> None:
        self.groups.append(group_id)


def test_its_passes_are_watched_and_count_in_the_time_left(
    policy: Policy, scored: TrainingGroup, learner_settings: Learner
) -> None:
    settings = learner_settings.model_copy(update={"warmup": 2, "max_drift": 10.0})
    watch = Planned()

    run_steps(policy, replace(job_of([scored], settings), watch=watch))

    rest = [("warming up", 1, 2), ("warming up", 2, 2), ("training", 1, 1)]
    assert watch.plans == [[("checking", 0, 0), *rest], rest, rest[2:]]
    assert watch.groups == [scored.group_id] * 4


def test_it_is_off_by_default_and_never_continues_an_adapter(
    policy: Policy, scored: TrainingGroup, learner_settings: Learner, tmp_path: Path
) -> None:
    settings = learner_settings.model_copy(update={"max_drift": 10.0})
    outcome, state = run_steps(policy, job_of([scored], settings))
    assert outcome.algorithm["warmup_nats"] == []
    assert state.steps == 1

    asked = settings.model_copy(update={"warmup": 3})
    assert wanted_steps(job_of([scored], asked)) == 3
    assert wanted_steps(job_of([scored], asked, parent=Parent(name="m--v1", path=tmp_path))) == 0


def test_a_group_that_fails_in_it_costs_itself_alone(
    tiny_base: Path,
    scored: TrainingGroup,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weights are those of a run that never had the group."""
    settings = learner_settings.model_copy(update={"warmup": 2, "max_drift": 10.0})
    others = tuple(replace(scored, group_id=name) for name in "abc")
    bad = replace(scored, group_id="bad", prompt_token_ids=(7, 7))

    def weights(groups: tuple[TrainingGroup, ...]) -> tuple[list[torch.Tensor], dict[str, str]]:
        policy = load_policy(str(tiny_base), Parent(name="base"), settings)
        real = Policy.logprobs

        def breaking(self: Policy, pack: object) -> tuple[torch.Tensor, float]:
            found, entropy = real(self, pack)  # type: ignore[arg-type]
            if torch.is_grad_enabled() and getattr(pack, "group_id", "") == "bad":
                found = found * math.inf
            return found, entropy

        with monkeypatch.context() as patch:
            patch.setattr(Policy, "logprobs", breaking)
            outcome, _ = run_steps(policy, job_of(groups, settings))
        faults = {name: fault.reason for name, fault in outcome.faults.items()}
        return [p.detach() for p in policy.model.parameters() if p.requires_grad], faults

    expected, none = weights(others)
    found, faults = weights((*others, bad))

    assert none == {}
    assert faults == {"bad": "non_finite_gradient"}
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
