"""The check of a GPU runs on a CPU too, small: the same path, one JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.learner import art, gpu_check, run
from benchmarks.learner.cells import ON_CPU, Cell, drawn
from benchmarks.learner.run import ratios, targets
from benchmarks.results import Row


@pytest.mark.filterwarnings("ignore")
def test_the_same_path_runs_small_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path)]) == 0

    found = json.loads((tmp_path / "gpu-check.json").read_text())
    checks = {row["check"] for row in found["rows"]}
    assert checks == {"kernel", "memory", "long", "bf16", "benchmark"}
    assert all(one["holds"] for one in found["targets"])
    contenders = {row["contender"] for row in found["rows"] if row["check"] == "benchmark"}
    assert contenders == {"auto", "packed", "rows", "trl", "art"}
    plain, saving = (row["value"] for row in found["rows"] if row["check"] == "memory")
    assert saving < plain / 2
    assert "holds" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("card", "shares"),
    [("NVIDIA H200", [0.45]), ("NVIDIA H100 80GB HBM3", [0.45]), ("NVIDIA H100 PCIe", [])],
)
def test_the_share_of_a_cards_operations_is_known_for_cards_with_a_known_peak(
    card: str, shares: list[float]
) -> None:
    rows: list[Row] = [
        {"axis": "target", "contender": "auto", "tflops": 445.05},
        {"axis": "target", "contender": "rows", "tflops": 900.0},
        {"axis": "prompt", "contender": "auto", "tflops": 900.0},
    ]

    found = gpu_check.check_use(rows, card)

    assert [one.value for one in found] == shares
    assert all(one.holds for one in found)
    assert [one.holds for one in gpu_check.check_use([], card)] == [False] * len(shares)


def test_art_gets_the_prompt_once_and_its_last_token_before_each_answer() -> None:
    group = drawn(Cell(axis="turns", group=2, prompt=5, answer=3, turns=2), 50)
    first, second = group.rows[1], group.rows[3]

    found = art.packed(group, torch.device("cpu"))

    used = 4 + 2 * (1 + 9)
    assert art.length(group) == found["tokens"].shape[1] == art.CHUNK
    *prompt, last = group.prompt_token_ids
    tokens = [*prompt, last, *first.token_ids, last, *second.token_ids]
    assert found["tokens"][0, :used].tolist() == tokens
    assert found["input_pos"][0, :used].tolist() == [*range(4), *range(4, 14), *range(4, 14)]
    assert found["group_ids"][0, :used].tolist() == [0] * 4 + [1] * 10 + [2] * 10
    turns = [False, *[True] * 3, *[False] * 3, *[True] * 3]
    assert found["assistant_mask"][0, :used].tolist() == [False] * 4 + turns * 2
    assert found["advantages"][0, [4, 14, used]].tolist() == [-0.5, 0.5, 0.0]


def test_turns_share_their_histories_and_train_each_token_once() -> None:
    cell = Cell(axis="turns", group=2, prompt=5, answer=3, turns=2)

    group = drawn(cell, 50)

    assert [len(row.token_ids) for row in group.rows] == [3, 9, 3, 9]
    assert [row.kept_tokens for row in group.rows] == [3, 3, 3, 3]
    assert group.rows[1].token_ids[:3] == group.rows[0].token_ids
    assert cell.padded_tokens == 4 * (5 + 12)
    assert {cell.axis for cell in ON_CPU} >= {"answers", "prompt", "turns", "target"}


@pytest.mark.filterwarnings("ignore")
def test_tiny_cells_write_no_committed_file_and_have_no_target_of_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "SMALL_FOLDER", tmp_path)
    monkeypatch.setattr(results, "FOLDER", tmp_path / "committed")

    assert run.main(["--small", "--repeats", "1"]) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "learner-small.json",
        "learner-small.png",
    ]
    (target,) = json.loads((tmp_path / "learner-small.json").read_text())["targets"]
    assert target["what"].startswith("difference of the contenders' losses")
    assert "3,000" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (gpu_check.main, ["about 3 minutes", "less than 8", "folder for gpu-check.json"]),
        (run.main, ["folder for the JSON and the plot", "of which the least counts"]),
    ],
)
def test_the_help_says_what_is_done_how_long_it_takes_and_where_results_go(
    main: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    told = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert [one for one in words if one not in told] == []


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
