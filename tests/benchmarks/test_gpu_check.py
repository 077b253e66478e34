"""The check of a GPU runs on a CPU too, small: the same path, one JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.learner import gpu_check
from benchmarks.learner.cells import ON_CPU, Cell, drawn
from benchmarks.learner.run import ratios, targets


@pytest.mark.filterwarnings("ignore")
def test_the_same_path_runs_small_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path)]) == 0

    found = json.loads((tmp_path / "gpu-check.json").read_text())
    checks = {row["check"] for row in found["rows"]}
    assert checks == {"kernel", "memory", "bf16", "benchmark"}
    assert all(one["holds"] for one in found["targets"])
    contenders = {row["contender"] for row in found["rows"] if row["check"] == "benchmark"}
    assert contenders == {"auto", "packed", "rows", "trl"}
    plain, saving = (row["value"] for row in found["rows"] if row["check"] == "memory")
    assert saving < plain / 2
    assert "holds" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


def test_turns_share_their_histories_and_train_each_token_once() -> None:
    cell = Cell(axis="turns", group=2, prompt=5, answer=3, turns=2)

    group = drawn(cell, 50)

    assert [len(row.token_ids) for row in group.rows] == [3, 9, 3, 9]
    assert [row.kept_tokens for row in group.rows] == [3, 3, 3, 3]
    assert group.rows[1].token_ids[:3] == group.rows[0].token_ids
    assert cell.padded_tokens == 4 * (5 + 12)
    assert {cell.axis for cell in ON_CPU} >= {"answers", "prompt", "turns", "target"}


def test_targets_are_ratios_to_what_the_product_takes() -> None:
    place = {"group": 8, "prompt": 3_000, "answer": 500, "turns": 1}
    rows = [
        {"axis": "target", **place, "contender": name, "seconds": seconds, "loss": loss}
        for name, seconds, loss in (
            ("auto", 2.0, 0.5),
            ("rows", 1.8, 0.5),
            ("trl", 7.0, 0.50002),
        )
    ]

    found = targets(rows, half=False)

    assert list(ratios(rows, "trl").values()) == [3.5]
    assert [one.value for one in found] == [0.9, 3.5, 0.0]
    assert [one.holds for one in found] == [False, True, False]
