"""An adapter's modules against the base model's checkpoint: as PEFT and transformers write them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.engine.validation import Registered, ServingLimits, validate_folder
from deploy.errors import InvalidAdapterError
from learner.adapter_folder import CONFIG, WEIGHTS, folder_digest


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base, adapter): a small Llama and a LoRA of every linear layer, by the real libraries."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("real")
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=32,
        )
    )
    model.save_pretrained(folder / "base", max_shard_size="8KB")
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


@pytest.fixture
def copied(real: tuple[Path, Path], tmp_path: Path) -> tuple[str, Path]:
    """(path of the base, a copy of the adapter that may be changed)."""
    base, adapter = real
    (tmp_path / "adapter").mkdir()
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "adapter" / name).write_bytes((adapter / name).read_bytes())
    return str(base), tmp_path / "adapter"


def validate(folder: Path, base: str) -> None:
    limits = ServingLimits(max_rank=8, bases=frozenset(), base_model_path=base)
    validate_folder(folder, Registered(digest=folder_digest(folder)), limits)


def rename(folder: Path, before: str, after: str) -> None:
    """Another name for a module, in the weights and in the configuration."""
    content = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length].replace(before.encode(), after.encode())
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    config = json.loads((folder / CONFIG).read_text())
    config["target_modules"] = [m.replace(before, after) for m in config["target_modules"]]
    (folder / CONFIG).write_text(json.dumps(config))


def write_base(folder: Path, shapes: Mapping[str, list[int]], dtype: str = "BF16") -> str:
    """A checkpoint of zeros."""
    folder.mkdir()
    header: dict[str, Any] = {}
    place = 0
    for name, shape in shapes.items():
        end = place + 2 * shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(place)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_what_peft_writes_for_the_base_is_taken(copied: tuple[str, Path]) -> None:
    base, folder = copied

    assert len(list(Path(base).glob("*.safetensors"))) > 1
    validate(folder, base)


@pytest.mark.parametrize(
    ("before", "after"), [("layers.1.", "layers.7."), ("mlp.up_proj", "mlp.top_proj")]
)
def test_a_module_that_the_base_does_not_have_is_refused(
    copied: tuple[str, Path], before: str, after: str
) -> None:
    base, folder = copied
    rename(folder, before, after)

    with pytest.raises(InvalidAdapterError, match=f"the base model has no module .*{after}"):
        validate(folder, base)
    validate(folder, "")


def test_a_module_of_another_shape_is_refused(copied: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = copied
    keep_only(folder, "model.layers.0.mlp.down_proj")
    wider = write_base(tmp_path / "wider", {"model.layers.0.mlp.down_proj.weight": [16, 64]})

    with pytest.raises(InvalidAdapterError, match="is 16 x 32, the base model's is 16 x 64"):
        validate(folder, wider)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.mlp.down_proj.weight", [16, 32], "BF16"),
        ("language_model.model.layers.0.mlp.down_proj.weight", [16, 32], "BF16"),
        ("model.layers.0.mlp.down_proj.weight", [32, 16], "BF16"),  # as GPT-2's
        ("model.layers.0.mlp.down_proj.qweight", [4, 32], "I32"),
        ("model.layers.0.mlp.down_proj.weight", [256, 1], "U8"),
        ("transformer.encoder.mlp.down_proj.weight", [16, 32], "BF16"),  # names of its own
    ],
)
def test_a_checkpoint_that_names_or_packs_its_weights_otherwise_is_no_reason_to_refuse(
    copied: tuple[str, Path], tmp_path: Path, name: str, shape: list[int], dtype: str
) -> None:
    _, folder = copied
    keep_only(folder, "model.layers.0.mlp.down_proj")

    validate(folder, write_base(tmp_path / "base", {name: shape}, dtype))


@pytest.mark.parametrize("base", ["no/such-model", "/no/such/folder", "{tmp}", "{tmp}/unreadable"])
def test_a_base_that_is_not_here_is_no_reason_to_refuse(
    copied: tuple[str, Path], tmp_path: Path, base: str
) -> None:
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable" / "model.safetensors").write_bytes(b"version https://git-lfs")

    validate(copied[1], base.format(tmp=tmp_path))


def keep_only(folder: Path, module: str) -> None:
    """An adapter of one module alone."""
    from safetensors.torch import load_file, save_file

    weights = {name: one for name, one in load_file(folder / WEIGHTS).items() if module in name}
    save_file(weights, folder / WEIGHTS)
    config = json.loads((folder / CONFIG).read_text())
    config["target_modules"] = [module]
    (folder / CONFIG).write_text(json.dumps(config))
