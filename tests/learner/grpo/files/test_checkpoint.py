"""A checkpoint that is damaged is discarded, whatever its file says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from learner.grpo.files.checkpoint import FORMAT, resumed
from learner.records import Parent, TrainingJob
from learner.resume.work_folder import STATE, WorkFolder
from sidecar.settings import Learner

DEEP = "[" * 200_000


def whole(state: object, sha256: str = "") -> str:
    return json.dumps({"format": FORMAT, "state": state, "sha256": sha256})


DAMAGED = {
    "deep": DEEP,
    "deep within": whole(DEEP, hashlib.sha256(DEEP.encode()).hexdigest()),
    "null": whole(None),
    "number": whole(5),
    "list": "[]",
    "cut": '{"format": 1',
    "other format": '{"format": 0}',
    "other digest": whole("{}"),
}


@pytest.mark.parametrize("text", list(DAMAGED.values()), ids=list(DAMAGED))
def test_a_damaged_checkpoint_is_discarded(tmp_path: Path, text: str) -> None:
    work = WorkFolder(tmp_path, "r1")
    checkpoint = work.path / "000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE).write_text(text)
    job = TrainingJob(
        base_model_path="",
        parent=Parent(name="base"),
        groups=(),
        settings=Learner(),
        folder=tmp_path,
        check_stop=lambda: None,
        checkpoints=work,
    )

    with capture_logs() as logs:
        assert resumed(job, {}) is None

    assert [entry["event"] for entry in logs] == ["checkpoint_discarded"]
    assert work.newest() is None
