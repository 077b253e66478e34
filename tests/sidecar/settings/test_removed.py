"""A settings file of before: its removed keys are told, and where one moved its value counts."""

from __future__ import annotations

import importlib
import logging
import re
from operator import attrgetter
from pathlib import Path

import pytest

from sidecar.settings import Settings, load_settings
from sidecar.settings.explain import known
from sidecar.settings.removed import ADVANCED, REMOVED


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_what_is_said_of_a_removed_key_is_true(key: str) -> None:
    section, _, name = key.partition(".")
    assert name not in known(section)
    constant = re.fullmatch(r"([A-Za-z_.]+) in ([a-z_.]+) is (\S+)", REMOVED[key])
    if constant is not None:
        path, module, value = constant.groups()
        assert str(attrgetter(path)(importlib.import_module(module))) == value
        return
    for other, name in re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", REMOVED[key]):
        assert other not in Settings.model_fields or name in known(other)


def test_a_file_and_an_environment_with_removed_keys_are_read_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sidecar.toml"
    path.write_text("[learner]\nkl_limit = 3\nrank = 4\n[learner.advanced]\nwarmup_steps = 3\n")
    monkeypatch.setenv("SIDECAR_LEARNER__MASK_TOLERANCE", "nonsense")
    monkeypatch.setenv("SIDECAR_LEARNER__ADVANCED__TIS_CAP", "3")

    with caplog.at_level(logging.WARNING):
        settings = load_settings(path)

    assert settings.learner.rank == 4
    said = "is no longer a setting: {} in learner.grpo.{} is {}"
    assert sorted(caplog.messages) == [
        "learner.advanced.tis_cap is no longer a setting: no token or answer is weighed or left "
        "out for its age",
        "learner.advanced.warmup_steps is no longer a setting: the rate is whole from the first "
        "step",
        f"learner.kl_limit {said.format('KL_LIMIT', 'base_kl', 10.0)}",
        f"learner.mask_tolerance {said.format('MASK_TOLERANCE', 'answers', 0.2)}",
    ]


def test_a_key_that_moved_keeps_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sidecar.toml"
    path.write_text("[learner]\nkl_coef = 0.5\n")

    assert load_settings(path).learner.advanced.kl_coef == 0.5
    assert "learner.kl_coef is now learner.advanced.kl_coef" in caplog.messages
    monkeypatch.setenv("SIDECAR_LEARNER__KL_COEF", "0.3")
    assert load_settings(path).learner.advanced.kl_coef == 0.3
    assert set(ADVANCED) == set(known("learner", "advanced"))


def test_a_removed_key_of_a_list_of_tables_is_read_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sidecar.toml"
    fallback = '[[judge.fallbacks]]\nmodel = "openai/b"\njson_schema = "off"\n'
    path.write_text(f'[judge]\nmodel = "openai/a"\n{fallback}')

    assert load_settings(path).judge.fallbacks[0].model == "openai/b"

    assert [one for one in caplog.messages if one.startswith("judge.fallbacks.json_schema is no")]
