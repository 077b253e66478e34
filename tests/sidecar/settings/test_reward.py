"""The section of the reward: what it takes, and what it refuses by the name that a person wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.settings import load_settings, shown_settings
from sidecar.settings.judge import HttpVerifier, LengthVerifier


def write(folder: Path, text: str) -> Path:
    path = folder / "sidecar.toml"
    path.write_text(f'state_dir = "{folder}/state"\n{text}\n')
    return path


def test_verifiers_are_tables_by_name(tmp_path: Path) -> None:
    settings = load_settings(
        write(
            tmp_path,
            '[reward.verifiers.short]\nkind = "length"\n'
            "max_tokens = 300\ngate = true\n[reward.verifiers.calls]\nkind = 'tool_calls'\n",
        )
    )

    short = settings.reward.verifiers["short"]
    assert isinstance(short, LengthVerifier)
    assert (short.max_tokens, short.gate, short.timeout_s) == (300, True, 2.0)
    assert list(settings.reward.verifiers) == ["short", "calls"]


def test_a_token_comes_from_the_environment_and_is_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_REWARD__VERIFIERS", '{"shop": {"token": "tok-12345"}}')
    path = write(
        tmp_path, '[reward.verifiers.shop]\nkind = "http"\nurl = "http://u:pw@127.0.0.1:9/x"'
    )

    settings = load_settings(path)

    shop = settings.reward.verifiers["shop"]
    assert isinstance(shop, HttpVerifier)
    assert shop.token is not None
    assert shop.token.get_secret_value() == "tok-12345"
    shown = str(shown_settings(settings)["reward"])
    assert "tok-12345" not in shown
    assert "pw" not in shown
    assert shown_settings(settings)["tasks"]["key"] == "header", "no secret, for all its name"
