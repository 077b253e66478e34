"""Rubrics of single projects in the settings: which one holds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.errors import SettingsError
from sidecar.settings import Settings, load_settings
from sidecar.settings.checks import advice

REWARD = """
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


def load(folder: Path, text: str) -> Settings:
    path = folder / "sidecar.toml"
    path.write_text(text)
    return load_settings(path)


def exams(settings: Settings) -> dict[str, str]:
    """What the gate asks by, of each project."""
    return {name: settings.judge_of_gate.of(name).rubric for name in ("shop", "desk", "bank")}


def test_a_project_without_a_rubric_of_its_own_has_the_default(tmp_path: Path) -> None:
    judge = load(tmp_path, REWARD).judge

    assert [judge.of(name).rubric for name in ("shop", "desk", "bank", "")] == [
        "shop", "desk", "base", "base",
    ]  # fmt: skip
    assert judge.of("shop").model_copy(update={"rubric": "base"}) == judge


def test_the_gate_takes_its_own_then_the_rewards(tmp_path: Path) -> None:
    assert exams(load(tmp_path, REWARD)) == {"shop": "shop", "desk": "desk", "bank": "base"}
    # A rubric of the gate's own stands before the rewards' rubrics of projects.
    assert exams(load(tmp_path, f'{REWARD}[gate_judge]\nrubric = "exam"\n')) == {
        "shop": "exam", "desk": "exam", "bank": "exam",
    }  # fmt: skip


def test_each_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "shop.txt").write_text("shop, by a file")

    settings = load(
        tmp_path,
        f"[judge]\nmodel = 'x/y'\nrubric = 'base'\n"
        f"[judge.projects.shop]\nrubric = 'file:{tmp_path}/shop.txt'\n",
    )

    assert settings.judge.of("shop").rubric == "shop, by a file"
    assert exams(settings) == {"shop": "shop, by a file", "desk": "base", "bank": "base"}


def test_the_environment_gives_them_as_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR_JUDGE__PROJECTS", '{"shop": {"rubric": "from outside"}}')

    assert load_settings(None).judge.of("shop").rubric == "from outside"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("shop", "", "projects.shop has no rubric"),
        ("shop", "rubric = '  '", "projects.shop has no rubric"),
        ("shop", "rubric_file = 'gone.txt'", "projects.shop.rubric: /"),
        ("shop", "rubrc = 'a'", "projects.shop.rubrc; did you mean"),
        ("'a shop'", "rubric = 'a'", "projects.a shop: is no name that a project may have"),
    ],
)
def test_what_is_no_rubric_of_a_project_is_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, f"[judge]\nmodel = 'x/y'\n[judge.projects.{name}]\n{text}\n")

    assert f"judge.{message}" in str(caught.value)


def test_without_keys_there_is_one_project_and_rubrics_of_others_are_warned_of(
    tmp_path: Path,
) -> None:
    text = REWARD + "[judge.projects.default]\nrubric = 'd'\n"

    warned = [".".join(key) for key, _ in advice(load(tmp_path, text.replace('"keys"', '"open"')))]

    assert warned == ["judge.projects.shop", "judge.projects.desk"]
    assert not [key for key, _ in advice(load(tmp_path, text)) if "projects" in key]
