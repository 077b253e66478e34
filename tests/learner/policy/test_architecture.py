"""Answers of every family have the log-probabilities and gradients of the model's own forward pass.

The models are tiny and random, with windows shorter than the answers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from learner.errors import ParentError
from learner.policy import self_test
from learner.policy.adapter_io import load_policy
from learner.policy.architecture import architecture
from learner.policy.logprobs import Policy, packs_of
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row, with_effect

VOCABULARY = 48
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 4
MIXED = ["sliding_attention", "full_attention"]
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2, mixed windows": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 8},
    ),
    "cohere": ("Cohere", {"logit_scale": 0.0625}),
    "granite": ("Granite", {"logits_scaling": 8.0}),
    "gpt-oss": (
        "GptOss",
        {
            "sliding_window": WINDOW, "layer_types": MIXED, "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}  # fmt: skip
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8,
        },
    ),
    "lfm2": (
        "Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}  # fmt: skip

FALLS_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4, "head_dim": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
            "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8, "moe_intermediate_size": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon, alibi": ("Falcon", {"alibi": True, "head_dim": None}),
}  # fmt: skip
"""Models that our kernels, or any mask of a pack, cannot compute: the self-test finds out."""
IN_ONE_PACK = {*PACKED, "deepseek_v3"}
FORMS = {"gemma2": "dense", "gpt-oss": "dense", "deepseek_v3": "paths"}
"""The form of attention, where it is not the CPU's own."""


def saved(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    """Save a random model of this family."""
    torch.manual_seed(1)
    given = {one: value for one, value in {**SMALL, **changes}.items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**given)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, settings: Learner) -> Policy:
    return with_effect(load_policy(str(folder), Parent(name="base"), settings))


@pytest.fixture
def answers() -> TrainingGroup:
    """Three answers, two of them longer than the window; the last shares no token with them."""
    return make_group(
        [3, 17, 5, 9, 11, 23],
        [
            make_row([7, 8, 9, 10, 11, 12, 13]),
            make_row([9, 4]),
            make_row([40, 41, 42, 43, 44, 45, 46]),
        ],
    )


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }
    policy.model.zero_grad()
    return found


def ours(policy: Policy, group: TrainingGroup) -> torch.Tensor:
    return torch.cat([policy.logprobs(pack)[0] for pack in packs_of(policy, group, 1_000)])


def own(policy: Policy, group: TrainingGroup) -> torch.Tensor:
    """The model's own forward pass over each prompt and answer alone."""
    values = []
    prompt = list(group.prompt_token_ids)
    for answer in group.rows:
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        told = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        values.append(told.gather(-1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(values)


@pytest.mark.parametrize("family", [*PACKED, *ROWS, *FALLS_BACK])
def test_answers_are_computed_as_the_model_computes_a_row(
    family: str, tmp_path: Path, learner_settings: Learner, answers: TrainingGroup
) -> None:
    name, changes = (PACKED | ROWS | FALLS_BACK)[family]
    policy = load(saved(tmp_path, name, changes), learner_settings)

    found, expected = ours(policy, answers), own(policy, answers)

    assert policy.shape.packs == (family in IN_ONE_PACK), policy.shape.why
    if family in IN_ONE_PACK:
        assert policy.form == FORMS.get(family, "segments")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(found))
    (found * weights).sum().backward()
    one = gradients(policy)
    (expected * weights).sum().backward()
    other = gradients(policy)
    assert one.keys() == other.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in one.values())
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", ROWS)
def test_a_state_that_leaks_between_answers_is_found_out_without_the_config(
    family: str,
    tmp_path: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from learner.policy import adapter_io
    from learner.policy.architecture import Architecture

    monkeypatch.setattr(adapter_io, "architecture", lambda config: Architecture())
    name, changes = ROWS[family]

    policy = load_policy(str(saved(tmp_path, name, changes)), Parent(name="base"), learner_settings)

    assert not policy.shape.packs
    # The attention of Jamba in transformers 5.5 refuses the pack's mask.
    assert re.search("packed answers (differ by|cannot be computed)", policy.shape.why)


def test_a_model_that_neither_way_computes_is_refused_in_words(
    tmp_path: Path, learner_settings: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from learner.policy import adapter_io
    from learner.policy.architecture import Architecture

    monkeypatch.setattr(adapter_io, "architecture", lambda config: Architecture(softcap=0.5))
    base = saved(tmp_path, "Llama", {})

    with pytest.raises(ParentError, match="does not compute this architecture's log-probabilities"):
        load_policy(str(base), Parent(name="base"), learner_settings)


def test_a_model_that_peft_does_not_adapt_is_refused_before_its_weights_are_read(
    tmp_path: Path, learner_settings: Learner
) -> None:
    config = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    transformers.MambaConfig(**config).save_pretrained(tmp_path)

    with pytest.raises(ParentError, match=r"peft adapts no layer of .* serve it without a learner"):
        load_policy(str(tmp_path), Parent(name="base"), learner_settings)


def test_a_model_whose_adapted_layers_cannot_be_computed_is_refused_in_words(
    tmp_path: Path, learner_settings: Learner
) -> None:
    """Llama 4's router is a linear layer that returns two values: no LoRA can be added to it."""
    torch.manual_seed(1)
    config = transformers.Llama4TextConfig(
        **SMALL, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=48,
        interleave_moe_layer_step=2, no_rope_layers=[1, 0],
    )  # fmt: skip
    transformers.Llama4ForCausalLM(config).save_pretrained(tmp_path)

    with pytest.raises(ParentError, match=r"its own forward pass fails.*serve it without a learn"):
        load_policy(str(tmp_path), Parent(name="base"), learner_settings)


def test_the_self_test_of_bf16_passes_where_rounding_alone_differs(
    tiny_base: Path, learner_settings: Learner
) -> None:
    half = learner_settings.model_copy(update={"precision": "bfloat16"})

    policy = load_policy(str(tiny_base), Parent(name="base"), half)

    assert policy.shape.packs
    assert self_test.TOLERANCE < self_test.BF16_TOLERANCE


def test_windows_are_read_from_the_config() -> None:
    def read(name: str, **changes: Any) -> dict[str, int | None]:
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
        return dict(architecture(config).windows)

    full = {"full_attention": None}
    assert read("Llama") == full
    assert read("Mistral", sliding_window=7) == {"full_attention": 7}
    assert read("Mistral", sliding_window=None) == full
    assert read("Qwen2", use_sliding_window=False, sliding_window=7) == full
    assert read("Gemma3Text", sliding_window=7, layer_types=MIXED) == {
        "full_attention": None, "sliding_attention": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        (
            {
                **{"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
            128,  # it bends frequencies within the positions that the config names
        ),
        ({"rope_type": "linear", "factor": 1e9}, 128),
    ],
)
def test_positions_are_those_behind_a_rotary_scale(scaling: dict[str, Any], expected: int) -> None:
    scaled = {**SMALL, "max_position_embeddings": 128}
    config = transformers.LlamaConfig(**scaled, rope_parameters={"rope_theta": 1e4, **scaling})

    assert architecture(config).positions == expected


def test_a_model_may_have_no_limit_of_positions() -> None:
    assert architecture(transformers.BloomConfig()).positions is None
    assert architecture(transformers.BloomConfig(max_position_embeddings=0)).positions is None
