"""`sidecar judge calibrate`, as a user runs it, on judges with known virtues and faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from pydantic import SecretStr

from deploy.cli.judge import _named, _write
from deploy.cli.main import main
from ingest.calibration.running import draw
from sidecar.settings import Judge
from sidecar.store.database import Database
from support.scripted_judges import BIAS, ScriptedJudges, shipped_truth

ROOT = Path(__file__).resolve().parents[3]
GROUPS = 36
"""Shipped groups that are asked about, to be quick."""


@pytest.fixture
def judges() -> Iterator[ScriptedJudges]:
    server = ScriptedJudges(shipped_truth())
    yield server
    server.close()


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own: it imports LiteLLM and sets up logging."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.cli.main", "judge", "calibrate", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Calibrate(Protocol):
    """Runs the command. Returns: exit code, standard output, standard error."""

    def __call__(self, *arguments: str) -> tuple[int, str, str]: ...


@pytest.fixture
def calibrate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Calibrate:
    """Run the command in this process: LiteLLM takes 3 s of CPU to load, here once for all."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["judge", "calibrate", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def named(judges: ScriptedJudges, *names: str) -> list[str]:
    return [word for name in names for word in ("--judge", f"hosted_vllm/{name}@{judges.url}")]


def test_the_figures_tell_the_judges_apart(judges: ScriptedJudges, tmp_path: Path) -> None:
    who = named(judges, "honest", "biased", "random", "rubbish")
    options = ("--passes", "2", "--limit", str(GROUPS), "--out", "made/here", "-o", "json")

    process = start(tmp_path, *who, *options)
    out, errors = process.communicate()

    assert process.returncode == 0, errors
    found = json.loads(out)
    honest, biased, random, rubbish = found["judges"]
    assert (found["groups"], found["passes"], found["repeats"]) == (GROUPS, 2, 2)
    assert all(one["runs"] == 2 * GROUPS for one in found["judges"])

    assert all(honest[name]["value"] == 1 for name in ("tau", "pairs_right", "repeat_tau"))
    assert honest["flips"]["value"] == honest["noise_sd"] == 0
    assert [one["value"] for one in honest["by_position"]] == pytest.approx([0] * 7, abs=1e-9)
    assert (honest["scored"], honest["failures"]) == (2 * GROUPS, [])

    assert biased["first_minus_last"]["low"] == pytest.approx(BIAS, abs=0.001)
    assert biased["by_position"][0]["low"] > 0.1 > -0.1 > biased["by_position"][4]["high"]
    assert biased["flips"]["low"] > 0.25  # and yet two passes cancel it:
    assert biased["pairs_right"]["value"] > 0.99

    assert random["pairs_right"]["low"] < 0.5 < random["pairs_right"]["high"] < 0.6
    assert random["tau"]["low"] < 0 < random["tau"]["high"] < 0.2
    assert random["repeat_tau"]["high"] < 0.4
    assert random["noise_sd"] > 0.15

    assert rubbish["unusable_replies"] > 10
    assert [one["reason"] for one in rubbish["failures"]] == ["judge_rubbish"]
    assert rubbish["failures"][0]["count"] == 2 * GROUPS - rubbish["scored"] > 0
    assert rubbish["tau"]["value"] == 1
    assert rubbish["tokens_per_group"] > 1.1 * honest["tokens_per_group"]

    made = tmp_path / "made" / "here"
    assert json.loads((made / "calibration.json").read_text()) == found
    assert "first minus last position" in (made / "calibration.txt").read_text()
    assert (made / "calibration.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_paid_for_is_not_asked_again_but_for_the_repeats(
    judges: ScriptedJudges, tmp_path: Path, calibrate: Calibrate
) -> None:
    Database(f"sqlite:///{tmp_path}/store.db").upgrade()
    (tmp_path / "sidecar.toml").write_text(f'[store]\nurl = "sqlite:///{tmp_path}/store.db"\n')
    options = (*named(judges, "random"), "--passes", "2", "--limit", "5", "-o", "json")

    def run(*more: str) -> tuple[int, dict[str, Any]]:
        before = len(judges.models)
        code, out, errors = calibrate(*options, *more)
        assert code == 0, errors
        return len(judges.models) - before, json.loads(out)["judges"][0]

    first, again, anew = run(), run(), run("--no-cache")

    # 5 groups x 2 repeats x 2 passes; a second time the first repeat's replies are those kept.
    assert [asked for asked, _ in (first, again, anew)] == [20, 10, 20]
    assert [one["replayed"] for _, one in (first, again, anew)] == [0, 10, 0]
    assert again[1]["noise_sd"] == first[1]["noise_sd"] > 0.1, "no repeat is replayed for another"
    assert again[1]["pairs_right"] == first[1]["pairs_right"]
    assert again[1]["tokens_per_group"] == pytest.approx(first[1]["tokens_per_group"], rel=0.1)


def test_one_pass_leaves_the_bias_in_the_scores_and_rubrics_stand_side_by_side(
    judges: ScriptedJudges, tmp_path: Path, calibrate: Calibrate
) -> None:
    for name in ("plain", "strict"):
        (tmp_path / name).write_text(f"Be {name}.")
    rubrics = ("--rubric", "plain", "--rubric", "strict")

    code, out, errors = calibrate(
        *named(judges, "biased"), *rubrics, "--passes", "1", "--limit", str(GROUPS), "-o", "json"
    )

    assert code == 0, errors
    plain, strict = json.loads(out)["judges"]
    assert (plain["rubric"], strict["rubric"]) == ("plain", "strict")
    assert plain["rubric_hash"] != strict["rubric_hash"]
    assert plain["pairs_right"] == strict["pairs_right"]  # this judge reads no rubric
    assert plain["pairs_right"]["high"] < 0.95
    assert plain["first_minus_last"]["low"] > 0.3
    assert plain["flips"] is None  # no order is reversed


def test_a_judge_that_cannot_be_reached_ends_with_one_line_and_exit_code_1(
    calibrate: Calibrate,
) -> None:
    code, out, errors = calibrate("--judge", "hosted_vllm/gone@http://127.0.0.1:9/v1")

    assert code == 1
    counts = re.findall(r"(\d+) runs failed: (\w+)", out)
    failed = {reason: int(count) for count, reason in counts}
    assert failed["judge_unavailable"] < 20  # those in flight when the tenth had failed
    assert sum(failed.values()) == 140
    assert "tau-b)        -" in out
    assert errors.splitlines()[-1].startswith("sidecar: a judge scored no group")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "there is no judge: set judge.model, or name one"),
        (["--judge", "openai/x@http://"], 2, "openai/x@http://"),
        (["gone.jsonl", "--judge", "openai/x"], 2, "gone.jsonl cannot be read"),
        (["bad.jsonl", "--judge", "openai/x"], 1, "bad.jsonl line 1: candidates: null"),
        (["--judge", "openai/x", "--rubric", "gone.txt"], 2, "gone.txt cannot be read"),
        (["--judge", "openai/x", "--rubric", "blank.txt"], 2, "blank.txt is empty"),
        (["--judge", "openai/x", "--out", "bad.jsonl"], 2, "bad.jsonl cannot be made"),
        (["--judge", "openai/x", "--passes", "9"], 2, "less than or equal to 8"),
    ],
)
def test_bad_use_is_one_line(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{}\n")
    Path("blank.txt").write_text(" \n")

    assert main(["judge", "calibrate", *arguments]) == code

    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_the_configured_key_goes_to_the_configured_address_alone() -> None:
    configured = Judge(
        model="hosted_vllm/mine",
        api_base="http://10.0.0.5:8000/v1",
        api_key=SecretStr("sk-test-key-1"),
        timeout_s=7.0,
    )

    assert _named("hosted_vllm/mine", configured) == ("hosted_vllm/mine", configured)
    url = "http://10.0.0.5:8000/v1"
    assert _named(f"hosted_vllm/mine@{url}", configured) == (f"hosted_vllm/mine@{url}", configured)
    name, same_server = _named("hosted_vllm/other@http://10.0.0.5:8000/v1", configured)
    assert name == "hosted_vllm/other@http://10.0.0.5:8000/v1"
    assert same_server.api_key == configured.api_key
    _, elsewhere = _named("hosted_vllm/mine@http://10.0.0.6:8000/v1", configured)
    assert (elsewhere.api_key, elsewhere.api_base) == (None, "http://10.0.0.6:8000/v1")
    _, provider = _named("openai/gpt-4.1-mini", configured)
    assert (provider.api_key, provider.api_base, provider.timeout_s) == (None, None, 7.0)


def test_without_matplotlib_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found: dict[str, Any] = {"groups": 1}

    _write(tmp_path, "calibration", ["a table"], found, lambda path: draw([], path))

    assert sorted(one.name for one in tmp_path.iterdir()) == ["calibration.json", "calibration.txt"]
    assert "there is no plot: matplotlib is not installed" in capsys.readouterr().err
