"""The check of a GPU runs on a CPU too, small: the same path, one JSON."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.learner import art, gpu_check
from benchmarks.learner.cells import ON_CPU, Cell, drawn
from benchmarks.results import Row


@pytest.mark.filterwarnings("ignore")
def test_the_same_path_runs_small_on_a_cpu_and_an_error_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPU_CHECK_STARTED", raising=False)
    full = "[enforce fail] DefaultCPUAllocator: can't allocate memory"
    monkeypatch.setattr(gpu_check.Bench, "ceilings", fails(RuntimeError(full)))
    monkeypatch.setattr(gpu_check, "measures", small_measures)
    argv = ["--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]

    assert gpu_check.main(argv) == 0

    rows = [json.loads(line) for line in (tmp_path / "gpu-check.jsonl").read_text().splitlines()]
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert found["rows"] == rows
    assert [row["check"] for row in rows] == ["device", "product", "arithmetic", "step", "small"]
    assert {(row["card"], row["torch"], row["commit"]) for row in rows} == {
        ("cpu", torch.__version__, "abc")
    }
    assert rows[0]["why"] == f"out of memory: RuntimeError: {full}"
    assert rows[2]["value"] < 1e-5
    assert (rows[3]["groups"], len(rows[3]["step_seconds"])) == ([1, 1, 1, 1], 4)
    assert rows[3]["profile"]["by_host"]
    assert all(one["holds"] for one in found["targets"])

    assert gpu_check.main(argv) == 0, "what the file has is not measured again"
    assert len((tmp_path / "gpu-check.jsonl").read_text().splitlines()) == len(rows)


def small_measures(at: gpu_check.Bench) -> list[gpu_check.Measure]:
    wanted = ("copy and product", "bf16 into fp32", "135M, float32", "whole run of 4", "one pack")
    every = MEASURES(at)
    return [one for part in wanted for one in every if part in one.what]


MEASURES = gpu_check.measures


def fails(error: Exception) -> Any:
    def work(_: gpu_check.Bench) -> Row:
        raise error

    return work


@pytest.mark.filterwarnings("ignore")
def test_a_measure_in_which_a_process_ended_is_a_row_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_CHECK_ENDED_IN", "device: copy and product")

    gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--only", "device", "product"])

    rows = [json.loads(line) for line in (tmp_path / "gpu-check.jsonl").read_text().splitlines()]
    assert [row["check"] for row in rows] == ["device", "product"]
    assert rows[0]["why"].startswith("its process ended")
    assert "why" not in rows[1]


@pytest.mark.parametrize("ends", ["kill -9 $$", "exit 3"])
def test_the_script_starts_again_where_a_process_ended_in_a_measure(
    tmp_path: Path, ends: str
) -> None:
    told, python = tmp_path / "told", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$GPU_CHECK_ENDED_IN" >> {told}\n[ -n "$GPU_CHECK_ENDED_IN" ] && exit 1\n'
        f'echo "8B: one" > "$GPU_CHECK_BEGUN"\n{ends}\n'
    )
    python.chmod(0o755)

    done = subprocess.run(
        ["scripts/gpu_check"], env={**os.environ, "PYTHON": str(python)}, check=False, timeout=60
    )

    assert done.returncode == 1
    assert told.read_text() == "\n8B: one\n"


def test_targets_are_bounds_shares_of_the_card_and_memory() -> None:
    rows: list[Row] = [
        {"check": "kernel", "what": "varlen", "value": 0.04, "limit": 0.05},
        {"check": "step", "what": "1.7B", "mfu": 0.41, "peak_mb": 90_000},
        {"check": "pass", "what": "1.7B: rows", "mfu": 0.1},
        {"check": "pass", "what": "1.7B: packed", "mfu": 0.3},
        {"check": "8B", "what": "8B", "mfu": 0.5, "peak_mb": 82_000},
        {"check": "arithmetic", "what": "bf16", "why": "RuntimeError: no"},
        {"check": "trl", "what": "once", "why": "out of memory"},
    ]

    found = [(one.value, one.holds) for one in gpu_check.targets(rows)]

    shares = [(0.41, True), (0.3, False), (0.5, True), (80.0781, False)]
    assert found == [(0.04, True), *shares, (None, False)]


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
