"""What is said of a value that is no such value, and of a name that there is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sidecar.errors import SettingsError
from sidecar.settings import Settings, load_settings

SECTIONS = {
    name: field.annotation
    for name, field in Settings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
PYDANTIC = ("Input", "validation", "should be a valid", "discriminator", " tag", "instance of")


def refused(folder: Path, text: str) -> str | None:
    """Return what is said of these settings; None when they are taken."""
    path = folder / "sidecar.toml"
    path.write_text(text)
    try:
        load_settings(path)
    except SettingsError as error:
        return str(error)
    return None


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("value", ['"s3cret x"', "[[1]]", "{s3cret = {a = 1}}"])
def test_every_refusal_is_a_sentence_of_ours(tmp_path: Path, section: str, value: str) -> None:
    model: Any = SECTIONS[section]

    for key in model.model_fields:
        said = refused(tmp_path, f"[{section}]\n{key} = {value}\n")
        if said is not None:
            assert not any(word in said for word in PYDANTIC), said
            assert "\n" not in said


def test_a_table_of_the_environment_that_is_no_json_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDECAR_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("SIDECAR_JUDGE__MODEL", "no json, and need not be")
    monkeypatch.setenv("SIDECAR_CANARY__STEPS", json.dumps([100]))
    monkeypatch.setenv("SIDECAR_JUDGE__PARAMS", "s3cret=1")

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert str(caught.value).startswith("environment variable SIDECAR_JUDGE__PARAMS: lists and")
    assert "s3cret" not in str(caught.value)
