"""The judges in the settings: the gate's own or the reward's; rubrics as texts or files, of
single projects too."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.settings import Judge, Settings, load_settings
from sidecar.settings.checks import advice
from sidecar.settings.judge import GateJudge

REWARD = """
[judge]
model = "openai/reward"
api_base = "http://127.0.0.1:9/v1"
api_key = "reward-key"
rubric = "reward rubric"
passes = 3
timeout_s = 7.0
params = {temperature = 0.5}
"""


def load(folder: Path, text: str) -> Settings:
    path = folder / "sidecar.toml"
    path.write_text(text)
    return load_settings(path)


def test_without_a_model_the_gate_asks_the_judge_of_the_reward(tmp_path: Path) -> None:
    settings = load(tmp_path, REWARD)

    assert settings.judge_of_gate == settings.judge


def test_the_rubric_may_be_the_gates_own_with_the_rewards_judge(tmp_path: Path) -> None:
    gate = load(tmp_path, f'{REWARD}[gate_judge]\nrubric = "exam"\n').judge_of_gate

    assert (gate.model, gate.rubric) == ("openai/reward", "exam")
    assert gate.api_key is not None
    assert gate.params == {"temperature": 0.5}


def test_another_model_gets_neither_key_nor_address_nor_parameters_of_the_rewards_judge(
    tmp_path: Path,
) -> None:
    gate = load(tmp_path, f'{REWARD}[gate_judge]\nmodel = "openai/exam"\n').judge_of_gate

    assert gate.model == "openai/exam"
    assert (gate.api_base, gate.api_key, gate.params) == (None, None, {})
    assert (gate.rubric, gate.passes, gate.timeout_s) == ("reward rubric", 3, 7.0)


def test_a_rubric_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_text("be brief")
    (tmp_path / "exam.txt").write_text("be right\n")
    text = (
        "[judge]\nrubric = 'file:reward.txt'\n"
        f"[gate_judge]\nrubric_file = '{tmp_path}/exam.txt'\n"  # as older files have it
    )

    settings = load(tmp_path, text)

    assert settings.judge.rubric == "be brief"
    assert settings.judge_of_gate.rubric == "be right\n"


def test_of_a_rubric_and_an_older_file_beside_it_the_rubric_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old.txt").write_text("be old")

    settings = load(tmp_path, "[judge]\nrubric = 'be new'\nrubric_file = 'old.txt'\n")

    assert settings.judge.rubric == "be new"
    assert "judge.rubric_file was left out: judge.rubric is set too, and holds" in caplog.messages


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"  \n", "is empty"), (b"\xff\xfe", "is not UTF-8"), (b"a" * 70_000, "is longer than")],
)
def test_a_file_that_is_no_rubric_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "rubric.txt").write_bytes(content)

    with pytest.raises(SettingsError, match=message):
        load(tmp_path, "[judge]\nrubric = 'file:rubric.txt'\n")


def test_the_context_of_one_judge_is_not_taken_for_that_of_another() -> None:
    judge = Judge(model="openai/a", context_tokens=32_768)
    unknown = GateJudge(model="hosted_vllm/b")

    assert Settings(judge=judge).judge_of_gate.context_tokens == 32_768
    assert Settings(judge=judge, gate_judge=unknown).judge_of_gate.context_tokens == 0


PROJECTS = """
[access]
mode = "keys"
[judge]
model = "openai/reward"
rubric = "base"
[judge.projects.shop]
rubric = "shop"
[judge.projects.desk]
rubric = "desk"
"""


def exams(settings: Settings) -> dict[str, str]:
    """What the gate asks by, of each project."""
    return {name: settings.judge_of_gate.of(name).rubric for name in ("shop", "desk", "bank")}


def test_a_project_without_a_rubric_of_its_own_has_the_default(tmp_path: Path) -> None:
    judge = load(tmp_path, PROJECTS).judge

    assert [judge.of(name).rubric for name in ("shop", "desk", "bank", "")] == [
        "shop", "desk", "base", "base",
    ]  # fmt: skip
    assert judge.of("shop").model_copy(update={"rubric": "base"}) == judge


def test_the_gate_takes_its_own_then_the_rewards(tmp_path: Path) -> None:
    assert exams(load(tmp_path, PROJECTS)) == {"shop": "shop", "desk": "desk", "bank": "base"}
    # A rubric of the gate's own stands before the rewards' rubrics of projects.
    assert exams(load(tmp_path, f'{PROJECTS}[gate_judge]\nrubric = "exam"\n')) == {
        "shop": "exam", "desk": "exam", "bank": "exam",
    }  # fmt: skip


def test_a_projects_rubric_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "shop.txt").write_text("shop, by a file")

    settings = load(
        tmp_path,
        f"[judge]\nmodel = 'x/y'\nrubric = 'base'\n"
        f"[judge.projects.shop]\nrubric = 'file:{tmp_path}/shop.txt'\n",
    )

    assert settings.judge.of("shop").rubric == "shop, by a file"
    assert exams(settings) == {"shop": "shop, by a file", "desk": "base", "bank": "base"}


def test_without_keys_there_is_one_project_and_rubrics_of_others_are_warned_of(
    tmp_path: Path,
) -> None:
    text = PROJECTS + "[judge.projects.default]\nrubric = 'd'\n"

    warned = [".".join(key) for key, _ in advice(load(tmp_path, text.replace('"keys"', '"open"')))]

    assert warned == ["judge.projects.shop", "judge.projects.desk"]
    assert not [key for key, _ in advice(load(tmp_path, text)) if "projects" in key]
