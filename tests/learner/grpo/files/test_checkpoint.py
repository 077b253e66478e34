"""A checkpoint that is damaged is discarded, whatever its file says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from learner.errors import CheckpointError
from learner.grpo.checkpoint import (
    FORMAT,
    Snapshot,
    load_snapshot,
    resumed,
    save_snapshot,
    set_random,
)
from learner.grpo.checks import Checked
from learner.records import CheckedAnswers
from learner.resume import STATE, WorkFolder
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row

DEEP = "[" * 200_000


def whole(state: object, sha256: str = "") -> str:
    return json.dumps({"format": FORMAT, "state": state, "sha256": sha256})


DAMAGED = {
    "deep": DEEP,
    "deep within": whole(DEEP, hashlib.sha256(DEEP.encode()).hexdigest()),
    "null": whole(None),
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
    job = job_of([], Learner(), checkpoints=work)

    with capture_logs() as logs:
        assert resumed(job, {}) is None

    assert [entry["event"] for entry in logs] == ["checkpoint_discarded"]
    assert work.newest() is None


JOB = job_of([], Learner())
BEGUN = Snapshot(checked=Checked(groups=(), faults={}, drift=None, answers={}), faults={})


def test_random_numbers_go_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    torch.manual_seed(7)
    torch.rand(5)  # somewhere in the sequence, not at its seed
    save_snapshot(BEGUN, JOB, tmp_path)
    expected = torch.rand(3)
    torch.rand(2)

    _, states = load_snapshot(tmp_path, JOB, {})
    set_random(states)

    assert torch.equal(torch.rand(3), expected)


def test_the_random_numbers_of_each_card_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [torch.full((16,), 4, dtype=torch.uint8), torch.full((16,), 9, dtype=torch.uint8)]
    told: dict[int, list[int]] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: cards)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, number: told.update({number: state.tolist()})
    )
    save_snapshot(BEGUN, JOB, tmp_path)

    _, states = load_snapshot(tmp_path, JOB, {})
    set_random(states)

    assert told == {0: [4] * 16, 1: [9] * 16}


@pytest.mark.parametrize(
    "states",
    [{}, {"random": torch.zeros(3, dtype=torch.uint8)}, {"random": torch.zeros(3)}],
    ids=["none", "too short", "numbers"],
)
def test_random_numbers_that_are_none_damage_a_checkpoint(states: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match="its random numbers cannot be set"):
        set_random(states)


def test_what_was_decided_at_the_start_of_a_run_comes_back(tmp_path: Path) -> None:
    """An answer that was left out, its siblings' new advantages, and the marks."""
    rows = [replace(make_row([5, 6], logprobs=(-1.0, -1.0)), start=(-1.0, -1.0)) for _ in range(4)]
    begun = replace(make_group([1, 2], rows), scores=(0.1, 0.9, 0.5, 0.3))
    plain = tuple(replace(one, start=()) for one in begun.rows)
    rows[0] = replace(begun.rows[0], trainable=False, counted=False)
    rows[1] = replace(begun.rows[1], advantage=1 / 3)
    decided = replace(begun, rows=(*rows[:2], *begun.rows[2:]))
    job = replace(JOB, groups=(replace(begun, rows=plain),))
    known = CheckedAnswers(left_out={0: "drift"}, tokens=6)
    checked = Checked(groups=(decided,), faults={}, answers={begun.group_id: known}, drift=None)
    kept = Snapshot(checked=checked, faults={})

    save_snapshot(kept, job, tmp_path)

    assert load_snapshot(tmp_path, job, {})[0] == kept
