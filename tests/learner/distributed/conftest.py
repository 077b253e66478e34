"""Runs of one process and of several, on the same groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.adapter_folder import WEIGHTS
from learner.distributed import trainer
from learner.distributed.place import ADDRESS, LOCAL_RANK, LOCAL_SIZE, PORT, RANK, SIZE
from learner.distributed.trainer import RankedTrainer, started
from learner.grpo import trainer as grpo_trainer
from learner.grpo.trainer import GrpoTrainer
from learner.policy.adapter_io import load_policy
from learner.records import Parent, TrainingGroup, TrainingJob, TrainingOutcome
from sidecar.settings import Advanced, Learner
from support.forking import Fork, Forked, forking
from tests.learner.conftest import job_of, make_group, make_row, on_policy

VOCABULARY = 48
LENGTHS = ((3, 4), (9, 2), (5, 5, 5), (2, 3), (12, 1, 6), (4, 4), (3, 7))
"""Answers of each group, in tokens."""


@pytest.fixture
def several(learner_settings: Learner, monkeypatch: pytest.MonkeyPatch) -> Learner:
    """Settings of a run with most parts: two steps, a start, a term for KL."""
    monkeypatch.setattr("learner.grpo.trainer.KL_BUDGET", 0.0)
    return learner_settings.model_copy(
        update={
            "groups_per_step": 4,
            "processes": 2,
            "pack_tokens": 24,
            "loss": "ppo_decoupled",
            "advanced": Advanced(kl_coef=0.05),
        }
    )


@pytest.fixture
def groups(tiny_base: Path, learner_settings: Learner) -> tuple[TrainingGroup, ...]:
    """Groups whose recorded log-probabilities are the base's."""
    policy = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    draw = Random(5)

    def ids(number: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(number))

    found: list[TrainingGroup] = []
    for number, lengths in enumerate(LENGTHS):
        scores = [draw.random() for _ in lengths]
        mean = sum(scores) / len(scores)
        rows = [
            make_row(ids(length), score - mean)
            for length, score in zip(lengths, scores, strict=True)
        ]
        group = make_group(ids(4), rows, group_id=f"g{number}")
        found.append(on_policy(policy, replace(group, scores=tuple(scores))))
    return tuple(found)


LOADED = (
    "learner.__main__",
    "learner.once",
    "learner.replay",
    "learner.schedule.loop",
    "learner.distributed.trainer",
    "learner.grpo.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)
"""What a process of a run imports."""


@pytest.fixture(scope="session")
def fork() -> Iterator[Fork]:
    with forking(*LOADED) as found:
        yield found


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, fork: Fork) -> list[Forked]:
    """The further processes of a run are forked, not started anew: the imports of each take longer
    than its run. Gives: those that were. How they are started, `test_torchrun` tests."""
    launched: list[Forked] = []

    def launch(rank: int, size: int, port: int, config: Path | None) -> Forked:
        numbers = {RANK: rank, SIZE: size, LOCAL_RANK: rank, LOCAL_SIZE: size, PORT: port}
        environ = {ADDRESS: trainer.LOOPBACK, **{name: str(one) for name, one in numbers.items()}}
        constants = {
            f"learner.grpo.trainer:{name}": getattr(grpo_trainer, name)
            for name in ("CHECKPOINTING", "KL_BUDGET")
        }
        command = ("learner.__main__", "--once", "--config", str(config))
        launched.append(fork(*command, environ=environ, constants=constants))
        return launched[-1]

    monkeypatch.setattr(trainer, "_launch", launch)
    return launched


@dataclass(frozen=True, slots=True)
class Trained:
    outcome: TrainingOutcome
    weights: dict[str, torch.Tensor]


Train = Callable[..., Trained]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sidecar.toml"
    path.write_text('[serving]\nmodel = "m"\n')
    return path


@pytest.fixture
def job(tiny_base: Path, tmp_path: Path) -> Callable[..., TrainingJob]:
    """job(groups, settings, **fields): with a folder of its own."""

    def make(groups: tuple[TrainingGroup, ...], settings: Learner, **fields: Any) -> TrainingJob:
        folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
        folder.mkdir()
        return job_of(groups, settings, base_model_path=str(tiny_base), folder=folder, **fields)

    return make


@pytest.fixture
def train(job: Callable[..., TrainingJob], config: Path) -> Train:
    """train(groups, settings, **fields): as many processes as the settings say."""

    def run(groups: tuple[TrainingGroup, ...], settings: Learner, **fields: Any) -> Trained:
        made = job(groups, settings, **fields)
        if settings.processes == 1:
            outcome = GrpoTrainer().train(made)
        else:
            outcome = RankedTrainer(partial(started, settings, config)).train(made)
        if not outcome.metrics:
            return Trained(outcome, {})
        return Trained(outcome, load_file(made.folder / WEIGHTS))

    return run
