"""The gate's judge in the settings: its own, or that of the reward; a rubric as text or file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.settings import Judge, Settings, load_settings, shown_settings
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("api_base = 'http://127.0.0.1:9/v1'", "gate_judge.api_base is set without"),
        ("api_key = 'k'", "gate_judge.api_key is set without"),
        ("params = {temperature = 1}", "gate_judge.params is set without"),
        ("model = 'x/y'\nparams = {stream = true}", "gate_judge.params holds stream"),
        ("rubric = 'file:gone.txt'", "gone.txt cannot be read"),
    ],
)
def test_what_would_not_be_used_or_cannot_be_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=r"^setting ") as caught:
        load(tmp_path, f"[gate_judge]\n{text}\n")

    assert message in str(caught.value)


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


def test_its_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_GATE_JUDGE__MODEL", "openai/exam")
    monkeypatch.setenv("SIDECAR_GATE_JUDGE__API_KEY", "s3cret-value")
    monkeypatch.setenv("SIDECAR_GATE_JUDGE__PARAMS", '{"token": "s3cret-value"}')

    settings = load_settings(None)

    assert settings.gate_judge.api_key is not None
    assert settings.gate_judge.api_key.get_secret_value() == "s3cret-value"
    assert "s3cret-value" not in str(shown_settings(settings))


def test_the_context_of_one_judge_is_not_taken_for_that_of_another() -> None:
    judge = Judge(model="openai/a", context_tokens=32_768)
    unknown = GateJudge(model="hosted_vllm/b")

    assert Settings(judge=judge).judge_of_gate.context_tokens == 32_768
    assert Settings(judge=judge, gate_judge=unknown).judge_of_gate.context_tokens == 0
