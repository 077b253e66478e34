"""A large base with the default learning rate is warned of; the config alone is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.main import main
from deploy.preflight.peers import parameters_of

QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4_096, "intermediate_size": 12_288, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151_936,
    "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1_536,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
}  # fmt: skip
QWEN3_30B_A3B = {
    "num_hidden_layers": 48, "hidden_size": 2_048, "intermediate_size": 6_144, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151_936,
    "tie_word_embeddings": False,
}  # fmt: skip


def base_with(folder: Path, config: Any) -> Path:
    base = folder / "base"
    base.mkdir()
    (base / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return base


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (QWEN3_8B, 8.19),
        ({"text_config": QWEN3_8B, "hidden_size": 1}, 8.19),
        (SMOLLM2_135M, 0.135),
        (QWEN3_30B_A3B, 3.35),
    ],
    ids=["Qwen3-8B", "multimodal", "SmolLM2-135M", "Qwen3-30B-A3B"],
)
def test_the_parameters_are_those_that_the_makers_state(
    tmp_path: Path, config: dict[str, Any], billions: float
) -> None:
    found = parameters_of(str(base_with(tmp_path, config)))

    assert found is not None
    assert found / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("config", ["{", "[]", "3", "{}", '{"num_attention_heads": 0}'])
def test_a_config_that_cannot_be_read_tells_nothing(tmp_path: Path, config: str) -> None:
    assert parameters_of(str(base_with(tmp_path, config))) is None
    assert parameters_of(str(tmp_path / "none")) is None
    assert parameters_of("nobody/no-such-model-here") is None
    assert parameters_of("no name // of the hub") is None


@pytest.mark.parametrize(
    ("config", "rate", "warned"),
    [(QWEN3_8B, "", True), (QWEN3_8B, "learning_rate = 0.001", False), (SMOLLM2_135M, "", False)],
)
def test_a_large_base_with_the_default_rate_is_warned_of(
    tmp_path: Path,
    config: dict[str, Any],
    rate: str,
    warned: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = base_with(tmp_path, config)
    path = tmp_path / "sidecar.toml"
    path.write_text(
        f'state_dir = "{tmp_path}/state"\n[serving]\nbase_model_path = "{base}"\n'
        f"[learner]\n{rate}\n"
    )

    assert main(["--config", str(path), "config", "check"]) == 0

    told = capsys.readouterr().err
    assert ("warning: learner.learning_rate is left at its default, 0.001, " in told) is warned
    assert ("8.2 billion" in told) is warned
