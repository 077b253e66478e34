"""Settings: one file, the environment on top, nothing unknown, nothing unsafe."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from sidecar.errors import SettingsError
from sidecar.settings import load_settings
from sidecar.settings.kinds import is_loopback


def write(folder: Path, text: str) -> Path:
    path = folder / "sidecar.toml"
    path.write_text(text)
    return path


def test_the_environment_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, '[judge]\nmodel = "openai/from-file"\npasses = 2\n')
    monkeypatch.setenv("SIDECAR_JUDGE__MODEL", "openai/from-environment")

    settings = load_settings(path)

    assert settings.judge.model == "openai/from-environment"
    assert settings.judge.passes == 2


def test_what_the_installation_was_told_may_stay_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIDECAR_COMPILE", "1")

    load_settings()


def test_a_file_that_is_not_toml_says_which_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"is not TOML .*line 1"):
        load_settings(write(tmp_path, "model = \n"))


def test_listening_to_the_world_without_keys_must_be_said_in_words(tmp_path: Path) -> None:
    open_proxy = '[proxy]\nhost = "0.0.0.0"\n'

    with pytest.raises(SettingsError, match="allow_remote_without_keys"):
        load_settings(write(tmp_path, open_proxy))
    for allowed in ("allow_remote_without_keys = true", '[access]\nmode = "keys"'):
        settings = load_settings(write(tmp_path, f"{open_proxy}{allowed}\n"))
        assert settings.proxy.host == "0.0.0.0"


def test_admin_beyond_loopback_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"admin\.tokens is empty"):
        load_settings(write(tmp_path, '[admin]\nhost = "192.0.2.1"\n'))


def test_loopback_addresses_are_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "example.org")))


def test_what_vllm_fills_is_stated_in_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[serving.sampling_defaults]\ntemperature = 0.6\ntop_k = 20\n")
    assert load_settings(path).serving.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert load_settings(write(tmp_path, "[serving]\n")).serving.sampling_defaults is None

    monkeypatch.setenv("SIDECAR_SERVING__SAMPLING_DEFAULTS", "{}")
    assert load_settings(path).serving.sampling_defaults == {}


@pytest.mark.parametrize("value", ["{temprature = 0.6}", "{top_p = nan}", "{top_k = -3}", "0.6"])
def test_a_default_that_vllm_could_not_fill_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(SettingsError, match=r"setting serving\.sampling_defaults"):
        load_settings(write(tmp_path, f"[serving]\nsampling_defaults = {value}\n"))


PATHS = """
state_dir = "state"
[store]
url = "sqlite:///state/store.db?timeout=5"
[bus]
url = "sqlite:////var/outbox.db"
[judge]
model = "openai/x"
rubric = "file:rubric.txt"
[telemetry]
spans_file = "spans.jsonl"
[notify.hooks.ops]
url = "http://127.0.0.1:9/hook"
secret_file = "secret"
[serving]
base_model_path = "weights"
"""


def test_relative_paths_begin_at_the_folder_of_the_settings_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    for folder in (site / "weights", elsewhere):
        folder.mkdir(parents=True)
    (site / "rubric.txt").write_text("Prefer short answers.")
    write(site, PATHS)
    monkeypatch.setenv("SIDECAR_LEARNER__ADAPTERS_DIR", "adapters")
    monkeypatch.chdir(elsewhere)

    settings = load_settings(Path("../site/sidecar.toml"))

    assert settings.state_dir == site / "state"
    assert settings.learner.adapters_dir == site / "adapters"
    assert settings.store.url == f"sqlite:///{site}/state/store.db?timeout=5"
    assert settings.bus.url == "sqlite:////var/outbox.db"
    assert settings.judge.rubric == "Prefer short answers."
    assert settings.telemetry.spans_file == f"{site}/spans.jsonl"
    assert settings.notify.hooks["ops"].secret_file == f"{site}/secret"
    assert settings.serving.base_model_path == f"{site}/weights"


def test_defaults_begin_there_too_and_a_name_of_the_hub_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, '[serving]\nbase_model_path = "Qwen/Qwen3-8B"\n')
    monkeypatch.chdir("/")

    settings = load_settings(path)

    assert settings.store.url == f"sqlite:///{tmp_path}/.sidecar/store.db"
    assert settings.bus.url == f"sqlite:///{tmp_path}/.sidecar/outbox.db"
    assert settings.serving.base_model_path == "Qwen/Qwen3-8B"
    monkeypatch.chdir(tmp_path)
    assert load_settings().store.url == "sqlite:///.sidecar/store.db"


@pytest.mark.parametrize("name", ["feature%2Fnew", "a?b", "ü x"])
def test_a_folder_of_any_name_holds_the_store_that_a_command_in_it_finds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    path = write(folder, '[serving]\nmodel = "m"\n')
    monkeypatch.chdir("/")

    settings = load_settings(path)

    assert make_url(settings.store.url).database == f"{folder}/.sidecar/store.db"
    assert settings.bus.url == f"sqlite:///{folder}/.sidecar/outbox.db"


@pytest.mark.parametrize("text", ["", "\n", "# all of it commented out\n"])
def test_a_file_without_a_setting_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError, match=r"holds no setting; write one, or leave --config out"):
        load_settings(write(tmp_path, text))
