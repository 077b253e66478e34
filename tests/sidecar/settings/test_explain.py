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
@pytest.mark.parametrize("value", ["true", '"s3cret x"', "1.5", "[[1]]", "{s3cret = {a = 1}}"])
def test_every_refusal_is_a_sentence_of_ours(tmp_path: Path, section: str, value: str) -> None:
    model: Any = SECTIONS[section]

    for key in model.model_fields:
        said = refused(tmp_path, f"[{section}]\n{key} = {value}\n")
        if said is not None:
            assert not any(word in said for word in PYDANTIC), said
            assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[judge]\nmodle = 'x'", "unknown setting judge.modle; did you mean judge.model?"),
        ("[groups]\nsise = 4", "unknown setting groups.sise; did you mean groups.size?"),
        # The most similar names are no likely ones: `params`, `context_tokens`, `rate`, `access`.
        ("[judge]\ntemperature = 1", "unknown setting judge.temperature; [judge] has no such key"),
        ("[judge]\nmax_tokens = 9", "unknown setting judge.max_tokens; [judge] has no such key"),
        ("[groups]\nbatch = 4", "unknown setting groups.batch; [groups] has no such key"),
        (
            "[learner]\nbeta = 0.1",
            "unknown setting learner.beta; the weight of the divergence from ",
        ),
        ("[learner]\nlr = 1e-5", "unknown setting learner.lr; did you mean learner.learning_rate?"),
        ("[learner]\nepochs = 2", "unknown setting learner.epochs; each group is used once, "),
        (
            "[learner]\nnum_generations = 8",
            "unknown setting learner.num_generations; the number of answers in a group is groups.",
        ),
        ("[rewards]\nbatch = 4", "unknown setting rewards; did you mean reward?"),
        ("[cluster]\nbatch = 4", "unknown setting cluster; the sections are state_dir, "),
        (
            '[reward.verifiers.v]\nkind = "http"\nurl = "http://127.0.0.1:9"\nretries = 3',
            "unknown setting reward.verifiers.v.retries; a verifier of kind http has weight, ",
        ),
        ('[reward.verifiers.v]\nkind = "lenght"', "exact, length, entry_point, http; did you mean"),
        ("[proxy]\nport = 80.5", "setting proxy.port: must be a whole number, without a fraction"),
        ("[learner]\npack_tokens = 'big'", 'pack_tokens: must be a whole number, or "auto"'),
        ("[learner]\nlearning_rate = 'low'", 'learning_rate: must be a number, or "auto"'),
        ("[learner]\npack_tokens = 1.5", "pack_tokens: must be a whole number, without a fraction"),
        (f"[learner]\npack_tokens = {10**400}", "pack_tokens: 1000000000"),
        ("[best_of]\nenabled = 'maybe'", "setting best_of.enabled: must be true or false"),
        ("[access]\nmode = 'none'", "setting access.mode: must be 'open', 'keys' or 'upstream'"),
        ("[[judge.fallbacks]]\nprice = {}", "setting judge.fallbacks.model: is missing"),
    ],
)
def test_a_guess_is_a_near_name_of_the_same_section(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in str(refused(tmp_path, text))


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
