"""The whole run with torch."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from learner.adapter_folder import CURVES, folder_digest
from learner.grpo.trainer import GrpoTrainer
from learner.policy.logprobs import Policy
from learner.progress.export import draw  # before a fixture puts a stub in its place
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row, on_policy


def test_the_same_groups_and_seed_give_the_same_adapter_with_its_figures_drawn_beside_it(
    tiny_base: Path,
    learner_settings: Learner,
    policy: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.progress.export.draw", draw)
    group = on_policy(policy, make_group((1, 2), [make_row((3, 4), 0.5), make_row((5,), -0.5)]))
    job = job_of([group], learner_settings, base_model_path=str(tiny_base))
    digests = set()
    with capture_logs() as logs:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            GrpoTrainer().train(replace(job, folder=tmp_path / name))
            digests.add(folder_digest(tmp_path / name))

    assert len(digests) == 1
    content = (tmp_path / "two" / CURVES).read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1100, 770), "10 x 7 inches at 110 dots"
    assert "no_curves" not in [entry["event"] for entry in logs]
