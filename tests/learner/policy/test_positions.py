"""Rotary frequencies are the server's, whatever the length of an input or of a pack."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from learner.errors import ParentError
from learner.grpo.checks import follow_server
from learner.policy import self_test
from learner.policy.adapter_io import load_policy
from learner.policy.architecture import architecture, fix_positions
from learner.policy.logprobs import Policy, packs_of
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row

SMALL: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ORIGINAL = 64
SHORT, LONG = [1.0, 1.0, 1.02, 1.03], [1.03, 1.5, 15.0, 60.0]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
PLAIN = 1e4 ** -(torch.arange(0, 8, 2) / 8)
"""Frequencies of a head of 8 numbers, theta 10,000."""


def saved(folder: Path, name: str, rotary: dict[str, Any], **changes: Any) -> Path:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**SMALL, rope_parameters=rotary, **changes)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


def rotary_of(policy: Policy) -> Any:
    return policy.model.get_base_model().model.rotary_emb


@pytest.fixture
def longrope(tmp_path: Path, learner_settings: Learner) -> Policy:
    base = saved(tmp_path, "Phi3", LONGROPE, original_max_position_embeddings=ORIGINAL)
    return load_policy(str(base), Parent(name="base"), learner_settings)


def logprobs(policy: Policy, group: TrainingGroup) -> torch.Tensor:
    with torch.no_grad():
        packs = packs_of(policy, group, 4_096)
        return torch.cat([policy.logprobs(pack)[0] for pack in packs])


def test_the_long_factors_hold_for_short_inputs_too(longrope: Policy) -> None:
    """vLLM with a larger `--max-model-len` than the original length, which is the default here."""
    drawn = torch.randint(3, 48, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    scale = math.sqrt(1 + math.log(512 / ORIGINAL) / math.log(ORIGINAL))

    expected = PLAIN / torch.tensor(LONG)
    for prompt, length in ((20, 8), (50, 8), (50, 30), (90, 8)):  # within, across, beyond
        found = logprobs(
            longrope, make_group(drawn[:prompt], [make_row(drawn[-length:]), make_row([5, 6])])
        )
        assert bool(torch.isfinite(found).all())
        torch.testing.assert_close(rotary_of(longrope).inv_freq, expected)
    assert rotary_of(longrope).attention_scaling == pytest.approx(scale)


def test_short_factors_and_their_own_scale(tmp_path: Path, learner_settings: Learner) -> None:
    rotary = {**LONGROPE, "short_mscale": 1.25, "long_mscale": 1.5}
    base = saved(tmp_path, "Phi3", rotary, original_max_position_embeddings=ORIGINAL)
    policy = load_policy(str(base), Parent(name="base"), learner_settings)
    assert rotary_of(policy).attention_scaling == 1.5

    fix_positions(policy.model, stretched=False)

    torch.testing.assert_close(rotary_of(policy).inv_freq, PLAIN / torch.tensor(SHORT))
    assert rotary_of(policy).attention_scaling == 1.25


def test_dynamic_frequencies_are_the_plain_ones_at_any_length(
    tmp_path: Path, learner_settings: Learner
) -> None:
    base = saved(tmp_path, "Llama", DYNAMIC)
    policy = load_policy(str(base), Parent(name="base"), learner_settings)
    group_of = make_group([3] * 600, [make_row([4, 5])])

    logprobs(policy, group_of)
    torch.testing.assert_close(rotary_of(policy).inv_freq, PLAIN)
    # before vLLM pull request 41277: theta times (4 * 4 - 3) to the power of 8 / 6
    fix_positions(policy.model, stretched=True)
    logprobs(policy, group_of)
    theta = 1e4 * 13 ** (8 / 6)
    expected = theta ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(rotary_of(policy).inv_freq, expected)


@pytest.mark.parametrize("stretched", [False, True])
@pytest.mark.parametrize("name", ["Phi3", "Llama"])
def test_the_records_tell_which_frequencies_the_server_uses(
    name: str, stretched: bool, tmp_path: Path, learner_settings: Learner
) -> None:
    more = {"original_max_position_embeddings": ORIGINAL} if name == "Phi3" else {}
    base = saved(tmp_path, name, LONGROPE if name == "Phi3" else DYNAMIC, **more)
    policy = load_policy(str(base), Parent(name="base"), learner_settings)
    drawn = torch.randint(3, 48, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    asked = make_group(drawn[:30], [make_row(drawn[30:])], adapter="base")
    fix_positions(policy.model, stretched=stretched)
    of_server, frequencies = logprobs(policy, asked), rotary_of(policy).inv_freq.clone()
    noisy = tuple((of_server + 0.01).tolist())
    fix_positions(policy.model, stretched=not stretched)

    known = replace(asked, rows=(replace(asked.rows[0], logprobs=noisy),))
    job = job_of([known], learner_settings)
    follow_server(policy, job)

    torch.testing.assert_close(rotary_of(policy).inv_freq, frequencies)
    # without a record that tells, as it was loaded
    follow_server(policy, replace(job, groups=()))
    fix_positions(policy.model, stretched=name == "Phi3")
    usual = rotary_of(policy).inv_freq.clone()
    follow_server(policy, replace(job, groups=()))
    torch.testing.assert_close(rotary_of(policy).inv_freq, usual)


def test_what_cannot_be_fixed_is_refused_by_name(tmp_path: Path, learner_settings: Learner) -> None:
    layers = ["sliding_attention", "full_attention"]
    rotary = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, layers[1]: DYNAMIC}
    config = transformers.Gemma3TextConfig(**SMALL, layer_types=layers, rope_parameters=rotary)
    config.save_pretrained(tmp_path)

    with pytest.raises(ParentError, match=r"rotary frequencies, some by dynamic.*name another"):
        load_policy(str(tmp_path), Parent(name="base"), learner_settings)


# -- the self-test at the lengths where the arithmetic changes


def test_lengths_at_which_a_config_changes_its_arithmetic_are_read() -> None:
    phi = transformers.Phi3Config(
        **SMALL,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=ORIGINAL,
        sliding_window=99,
    )
    assert architecture(phi).turns == (ORIGINAL, 99)
    assert architecture(transformers.LlamaConfig(**SMALL)).turns == ()


@pytest.mark.parametrize(("most", "found"), [(200, True), (100, False)])
def test_a_window_that_is_computed_wrong_is_found_where_inputs_may_be_so_long(
    most: int,
    found: bool,
    tmp_path: Path,
    learner_settings: Learner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from learner.policy import adapter_io

    def wrong(config: Any) -> Any:
        told = architecture(config)
        return replace(told, windows={"full_attention": 88})

    config = transformers.MistralConfig(**SMALL, sliding_window=90)
    torch.manual_seed(1)
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr(adapter_io, "architecture", wrong)

    policy = load_policy(
        str(tmp_path),
        Parent(name="base"),
        learner_settings.model_copy(update={"pack_tokens": most}),
    )

    # 90 tokens less the shorter answer and the margin
    length = 90 - self_test.ANSWERS[0] - self_test.MARGIN
    assert policy.shape.packs != found
    assert (f"the model's own behind {length} tokens" in policy.shape.why) == found
