"""The estimate of a pack's memory for mixtures of experts, by what autograd keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file

from learner.adapter_folder import CONFIG, WEIGHTS
from learner.origin import not_plain_lora
from learner.policy import costs as of_sizes
from learner.policy.adapter_io import load_policy, save_adapter
from learner.policy.costs import KEPT_BY_ALLOCATOR, prices, sizes
from learner.policy.logprobs import Policy
from learner.policy.memory import pack_estimate
from learner.policy.packing import Pack, pack_group
from learner.records import Parent
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row

Precision = Literal["float32", "bfloat16"]

BAND = (0.7, 1.15)
"""Measured over estimated."""
PROMPT, ANSWER, ANSWERS = 500, 20, 4
COMMON = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "pad_token_id": 0}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "kv_lora_rank": 64,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 16,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Hidden width, experts a token, and widths in the proportions of the models named.
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2MoeConfig",
        {
            "intermediate_size": 704,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 176,
            "shared_expert_intermediate_size": 704,
        },
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2Config",
        {
            **LATENT,
            "intermediate_size": 1368,
            "moe_intermediate_size": 176,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
        },
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        {
            "intermediate_size": 256,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
Load = Callable[[str, Precision], Policy]


def config_of(name: str) -> Any:
    of_class, changes = SHAPES[name]
    return getattr(transformers, of_class)(**COMMON, **changes)


@pytest.fixture
def load(tmp_path: Path, learner_settings: Learner) -> Load:
    def made(name: str, precision: Precision) -> Policy:
        torch.manual_seed(0)
        base: Any = transformers.AutoModelForCausalLM.from_config(config_of(name))
        base.save_pretrained(tmp_path / "base")
        settings = learner_settings.model_copy(update={"precision": precision})
        return load_policy(str(tmp_path / "base"), Parent(name="base"), settings)

    return made


@pytest.fixture
def pack() -> Pack:
    rows = [make_row([place * 37 + n for n in range(ANSWER)]) for place in range(ANSWERS)]
    (found,) = pack_group(make_group([n % 500 for n in range(PROMPT)], rows), max_tokens=1_000)
    return found


def kept_by(policy: Policy, pack: Pack) -> int:
    """Bytes of what autograd keeps between the passes, without the model's own weights."""
    seen: dict[int, tuple[int, torch.Tensor]] = {}
    ours = {one.untyped_storage().data_ptr() for one in policy.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            seen[storage.data_ptr()] = storage.nbytes(), tensor  # held, so no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.logprobs(pack)
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_the_estimate_is_near_what_autograd_keeps_with_experts(
    load: Load, pack: Pack, monkeypatch: pytest.MonkeyPatch, name: str, precision: Precision
) -> None:
    monkeypatch.setattr(of_sizes, "CHUNK_BYTES", 0)
    policy = load(name, precision)
    gathered = sum(one.position + one.length for one in pack.segments)

    said = pack_estimate(policy, len(pack.input_ids), gathered)[0] / KEPT_BY_ALLOCATOR

    least, most = BAND
    if name.startswith("gpt-oss"):
        least = 0.6  # its attention's scores are counted at their most (`KEPT_SCORES`)
    assert least <= kept_by(policy, pack) / said <= most, (name, kept_by(policy, pack) / said)


def test_the_sizes_of_experts_are_read_from_the_config() -> None:
    """Shared experts are taken by every token, the others by those that chose them."""
    qwen, deepseek = sizes(config_of("Qwen1.5-MoE-A2.7B")), sizes(config_of("DeepSeek-V2-Lite"))

    assert (qwen.inner, qwen.chosen, qwen.expert) == (704, 4, 176)
    assert qwen.linear_weights == 256 * (4 * 256 + 3 * (704 + 4 * 176))
    assert (deepseek.inner, deepseek.chosen, deepseek.expert) == (352, 6, 176)
    assert (deepseek.queries, deepseek.keys) == (4 * 96, 4 * 96)
    assert prices(qwen).pair == pytest.approx(14 * 256 / (4 * qwen.linear_weights))


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_new_adapter_of_a_mixture_of_experts_can_be_served_and_continued(
    load: Load, name: str, tmp_path: Path
) -> None:
    """For "all-linear" peft adapts the experts of most as parameters, which is no plain LoRA."""
    policy = load(name, "float32")

    save_adapter(policy, tmp_path)

    config = json.loads((tmp_path / CONFIG).read_text())
    assert not_plain_lora(config) is None
    assert not config["rank_pattern"]
    adapted = {key.split(".lora_")[0].rpartition(".")[2] for key in load_file(tmp_path / WEIGHTS)}
    assert "o_proj" in adapted
    assert len(adapted) >= 4
