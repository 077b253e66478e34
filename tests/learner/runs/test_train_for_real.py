"""The whole run with torch: scripted groups in the store, a better adapter in a folder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from structlog.testing import capture_logs

from learner.adapter_folder import CURVES, folder_digest
from learner.grpo.trainer import GrpoTrainer
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.progress.export import draw  # before a fixture puts a stub in its place
from learner.records import Parent, TrainableRow, TrainingGroup, TrainingJob
from learner.runs.train import Run
from sidecar.settings import Settings
from sidecar.store.database import Database
from support.clock import Clock

if TYPE_CHECKING:
    from tests.learner.conftest import MakeAnswer, MakeGroup, MakeRow, MakeScoredGroup, PutGroup


PROMPTS = ((1, 2, 3), (4, 5, 6, 7), (8, 9))
ANSWERS = ((10, 11, 12), (20, 21), (30, 31, 32, 33), (40,))
SCORES = (1.0, 0.8, 0.2, 0.0)
BETTER = 2
"""The first answers of each group are the better ones."""


def totals(policy: Policy, groups: list[TrainingGroup]) -> list[tuple[float, float]]:
    """(better, worse): summed log-probabilities of each group's answers."""
    found = []
    for group in groups:
        (pack,) = pack_group(group, max_tokens=100)
        with torch.no_grad():
            logprobs = policy.logprobs(pack)[0]
        better = sum(len(row.token_ids) for row in group.rows[:BETTER])
        found.append((logprobs[:better].sum().item(), logprobs[better:].sum().item()))
    return found


def test_a_run_makes_the_better_answers_likelier_and_the_worse_ones_rarer(
    settings: Settings,
    tiny_base: Path,
    database: Database,
    clock: Clock,
    put_group: PutGroup,
    scored_group: MakeScoredGroup,
    answer: MakeAnswer,
    group: MakeGroup,
    row: MakeRow,
) -> None:
    learner = settings.learner.model_copy(update={"groups_per_step": 1, "min_groups": 3})
    settings = settings.model_copy(update={"learner": learner})
    base = load_policy(str(tiny_base), Parent(name="base"), learner)
    groups = [group(prompt, [row(ids) for ids in ANSWERS]) for prompt in PROMPTS]
    for number, training in enumerate(groups):
        (pack,) = pack_group(training, max_tokens=100)
        with torch.no_grad():
            recorded = base.logprobs(pack)[0].split([len(ids) for ids in ANSWERS])
        answers = [
            answer(index, token_ids=ids, logprobs=tuple(values.tolist()))
            for index, (ids, values) in enumerate(zip(ANSWERS, recorded, strict=True))
        ]
        put_group(
            scored_group(
                SCORES,
                answers=answers,
                group_id=str(number),
                prompt_token_ids=training.prompt_token_ids,
            )
        )

    run = Run(settings, database, GrpoTrainer, run_id="r1", clock=clock)
    candidate = run.start()

    parent = Parent(name=candidate.adapter, path=candidate.path)
    trained = load_policy(str(tiny_base), parent, learner)
    for before, after in zip(totals(base, groups), totals(trained, groups), strict=True):
        assert after[0] > before[0] + 0.1
        assert after[1] < before[1] - 0.1


def two_answers(
    tiny_base: Path, settings: Settings, group: MakeGroup, row: MakeRow
) -> list[TrainableRow]:
    """A good and a bad answer to the prompt (1, 2), with the base's own log-probabilities."""
    base = load_policy(str(tiny_base), Parent(name="base"), settings.learner)
    (pack,) = pack_group(group((1, 2), [row((3, 4)), row((5,))]), max_tokens=100)
    with torch.no_grad():
        first, second = base.logprobs(pack)[0].split([2, 1])
    return [
        row((3, 4), 0.5, logprobs=first.tolist()),
        row((5,), -0.5, logprobs=second.tolist()),
    ]


def test_the_same_groups_and_seed_give_the_same_adapter(
    tiny_base: Path, settings: Settings, tmp_path: Path, group: MakeGroup, row: MakeRow
) -> None:
    rows = two_answers(tiny_base, settings, group, row)
    digests = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        GrpoTrainer().train(
            TrainingJob(
                base_model_path=str(tiny_base),
                parent=Parent(name="base"),
                groups=(group((1, 2), rows),),
                settings=settings.learner,
                folder=tmp_path / name,
                check_stop=lambda: None,
            )
        )
        digests.add(folder_digest(tmp_path / name))

    assert len(digests) == 1


def test_the_figures_of_a_run_are_drawn_beside_the_adapter(
    tiny_base: Path,
    settings: Settings,
    tmp_path: Path,
    group: MakeGroup,
    row: MakeRow,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.progress.export.draw", draw)
    rows = two_answers(tiny_base, settings, group, row)

    with capture_logs() as logs:
        GrpoTrainer().train(
            TrainingJob(
                base_model_path=str(tiny_base),
                parent=Parent(name="base"),
                groups=(group((1, 2), rows),),
                settings=settings.learner,
                folder=tmp_path,
                check_stop=lambda: None,
            )
        )

    content = (tmp_path / CURVES).read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1100, 770), "10 x 7 inches at 110 dots"
    assert "no_curves" not in [entry["event"] for entry in logs]
