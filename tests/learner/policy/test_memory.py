"""Checkpointing: the same gradients for less memory, and when it is switched on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from structlog.testing import capture_logs
from transformers import OPTConfig, OPTForCausalLM

from learner.policy import costs as of_sizes, memory
from learner.policy.adapter_io import load_policy
from learner.policy.costs import (
    CHUNK_BYTES,
    CHUNK_BYTES_ON_CUDA,
    KEPT_BF16_BYTES,
    MOMENTS,
    Sizes,
    longest_pack,
    pack_bytes,
    sizes,
    with_allocator,
)
from learner.policy.logprobs import Policy
from learner.policy.memory import Prepared, estimate, free_bytes, prepare, recompute_layers
from learner.policy.packing import pack_group
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row, with_effect

CPU = torch.device("cpu")
SMOLLM2 = Sizes(layers=30, hidden=576, queries=576, keys=192, inner=1536)
QWEN3_8B = Sizes(layers=36, hidden=4096, queries=4096, keys=1024, inner=12288)


@pytest.fixture
def policy(tiny_base: Path, learner_settings: Learner) -> Policy:
    return with_effect(load_policy(str(tiny_base), Parent(name="base"), learner_settings))


@pytest.fixture
def answers() -> TrainingGroup:
    return make_group(
        list(range(3, 40)), [make_row([7, 8, 9, 10]), make_row([9, 4]), make_row([40, 41, 42])]
    )


def backward(policy: Policy, group: TrainingGroup) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Values, gradients, and the bytes that autograd kept between the passes."""
    (pack,) = pack_group(group, max_tokens=1_000)
    kept: dict[int, int] = {}
    ours = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        values, _ = policy.logprobs(pack)
        values.sum().backward()
    gradients = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    policy.model.zero_grad()
    return values.detach(), torch.cat(gradients), sum(kept.values())


def test_layers_that_are_computed_twice_give_the_same_and_keep_less(
    policy: Policy, answers: TrainingGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_return_freed_blocks", lambda: None)
    values, gradients, kept = backward(policy, answers)

    recompute_layers(policy)
    again, gradients_again, kept_again = backward(policy, answers)

    assert torch.equal(values, again)
    torch.testing.assert_close(gradients, gradients_again, atol=1e-6, rtol=1e-6)
    assert gradients.abs().max() > 1e-3
    assert kept_again < 0.5 * kept


def test_without_copies_of_its_inputs_lora_has_the_same_gradients_and_keeps_less(
    tiny_base: Path, answers: TrainingGroup, learner_settings: Learner
) -> None:
    """The types of a card: bf16 weights, an fp32 adapter, bf16 products."""
    settings = learner_settings.model_copy(update={"precision": "bfloat16"})
    policy = with_effect(load_policy(str(tiny_base), Parent(name="base"), settings))
    for parameter in policy.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    layers = [one for one in policy.model.modules() if isinstance(one, BaseTunerLayer)]
    assert not any(one.cast_input_dtype_enabled for one in layers)

    values, gradients, kept = backward(policy, answers)
    for one in layers:
        one.cast_input_dtype_enabled = True
    same_values, same_gradients, kept_copies = backward(policy, answers)

    assert torch.equal(values, same_values)
    assert torch.equal(gradients, same_gradients)
    assert gradients.abs().max() > 1e-3
    assert kept < 0.95 * kept_copies


def test_dropout_of_the_model_stays_off(policy: Policy) -> None:
    before = {name for name, module in policy.model.named_modules() if module.training}

    recompute_layers(policy)

    after = {name for name, module in policy.model.named_modules() if module.training}
    stem = "base_model.model.model.layers"
    assert after - before == {f"{stem}.0", f"{stem}.1"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_is_within_a_factor_of_what_autograd_keeps(
    policy: Policy,
    answers: TrainingGroup,
    monkeypatch: pytest.MonkeyPatch,
    checkpointing: bool,
) -> None:
    """Factor 2: in a model so small, norms and LoRA count for as much as the rest. The layer that
    is computed again is not yet kept where this counts."""
    monkeypatch.setattr(memory, "_return_freed_blocks", lambda: None)
    monkeypatch.setattr(of_sizes, "CHUNK_BYTES", 0)
    if checkpointing:
        recompute_layers(policy)
    (pack,) = pack_group(answers, max_tokens=1_000)
    _, _, kept = backward(policy, answers)
    head = len(pack.targets) * 48 * 4  # the logits of the head, which fit into one piece here

    model = sizes(policy.model.get_base_model().config)
    said = pack_bytes(model, len(pack.input_ids), number_bytes=4.0, checkpointing=checkpointing)

    inputs = len(pack.input_ids) * model.layers * model.hidden * 4
    assert (inputs if checkpointing else said / 2) <= kept - head <= 2 * said


def test_what_was_measured_on_the_shipped_model_is_what_the_estimate_says() -> None:
    plain = pack_bytes(SMOLLM2, 1_024, number_bytes=4.0, checkpointing=False)
    saving = pack_bytes(SMOLLM2, 1_024, number_bytes=4.0, checkpointing=True)

    assert plain / 1_024 / 1_024 == pytest.approx(1_318, rel=0.1)
    assert saving / 1_024 / 1_024 < 214


def test_8_answers_to_a_prompt_of_16k_fit_80_gb_with_checkpointing_alone() -> None:
    """Qwen3-8B: 8.19 billion weights of 2 bytes, a LoRA of rank 8 with 22 million, and one pack."""
    prompt, answers = 16_384, 8
    tokens = prompt + answers * 499
    fixed = 8_190_000_000 * 2 + 21_823_488 * 4 * (1 + MOMENTS)

    def needed(*, checkpointing: bool, masks: int = 0) -> int:
        pack = pack_bytes(
            replace(QWEN3_8B, masks=masks),
            tokens,
            number_bytes=KEPT_BF16_BYTES,
            checkpointing=checkpointing,
        )
        return fixed + with_allocator(pack, cuda=True, checkpointing=checkpointing)

    # A token keeps 36 * 4,096 inputs of layers and one layer's 6 * 4,096 + 3 * 4,096 + 4 * 1,024 +
    # 4 * 12,288 numbers of 2.125 bytes, 504,832 in all.
    pack = 20_376 * 504_832 + 2 * CHUNK_BYTES_ON_CUDA
    assert needed(checkpointing=True) == fixed + int(1.15 * pack)
    assert needed(checkpointing=True) < 33e9
    assert needed(checkpointing=False) > 80e9
    assert needed(checkpointing=True, masks=1) - needed(checkpointing=True) > 0.9e9


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("cuda", [False, True])
def test_the_longest_pack_is_the_last_that_fits(cuda: bool, checkpointing: bool) -> None:
    """With 8 answers to a prompt that is nearly all of the pack."""
    room = 4 * 2**30

    found = longest_pack(
        SMOLLM2, room, number_bytes=4.0, cuda=cuda, checkpointing=checkpointing, answers=8
    )

    def needed(tokens: int) -> int:
        pack = pack_bytes(
            SMOLLM2,
            tokens,
            number_bytes=4.0,
            checkpointing=checkpointing,
            gathered=9 * tokens if cuda else 0,
        )
        return with_allocator(pack, cuda=cuda, checkpointing=checkpointing)

    assert needed(found) <= room < needed(found + 1)


def test_nothing_fits_where_the_head_does_not() -> None:
    assert longest_pack(SMOLLM2, CHUNK_BYTES, number_bytes=4.0, cuda=False, checkpointing=True) == 0


def test_a_pack_has_masks_in_the_dense_form_alone(policy: Policy) -> None:
    dense = replace(policy, form="dense")

    assert estimate(dense, 1_000)[1] - estimate(policy, 1_000)[1] == 1_000 * 1_000 * 4  # type: ignore[operator]


def test_paths_copy_a_key_for_each_query_of_its_group(policy: Policy) -> None:
    """The tiny base has 4 heads of queries, of 8 numbers, and 2 of keys."""
    copying = replace(policy, form="paths")

    before, after = estimate(copying, 1_000), estimate(copying, 1_000, 5_000_000)

    assert before == estimate(policy, 1_000, 5_000_000)
    assert before[1] is not None
    assert after[1] == before[1] + 2 * 32 * 5_000_000 * 4


def test_the_scores_of_a_models_own_attention_count_in_each_layer_that_keeps_them() -> None:
    own, tokens = replace(SMOLLM2, scores=2), 1_000

    def more(*, checkpointing: bool) -> int:
        with_scores, without = (
            pack_bytes(one, tokens, number_bytes=4.0, checkpointing=checkpointing)
            for one in (own, SMOLLM2)
        )
        return with_scores - without

    assert more(checkpointing=True) == 2 * tokens * tokens * 4
    assert more(checkpointing=False) == 30 * 2 * tokens * tokens * 4


@pytest.mark.parametrize(
    ("setting", "free", "on"),
    [
        ("auto", 2**40, False),
        ("auto", 2**20, True),
        ("auto", None, False),
        ("on", 2**40, True),
        ("off", 2**20, False),
    ],
)
def test_it_is_switched_on_by_setting_or_when_memory_is_short(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, setting: Any, free: int | None, on: bool
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    monkeypatch.setattr(memory, "_return_freed_blocks", lambda: None)

    with capture_logs() as logs:
        assert prepare(policy, setting, longest=100).checkpointing == 2 * on

    short = free is not None and free < 2**30
    assert [one["event"] for one in logs] == ["memory_may_not_do" if short else "memory_estimated"]
    assert logs[0]["checkpointing"] == 2 * on


@pytest.mark.parametrize(
    ("saved", "some", "twice"),
    [(0, True, 0), (0.2, True, 1), (0.5, True, 1), (0.6, True, 2), (0.2, False, 2)],
)
def test_as_many_layers_are_computed_twice_as_memory_asks_for(
    policy: Policy,
    answers: TrainingGroup,
    monkeypatch: pytest.MonkeyPatch,
    saved: float,
    some: bool,
    twice: int,
) -> None:
    """saved: part of what both layers save that has to be saved."""
    monkeypatch.setattr(memory, "_return_freed_blocks", lambda: None)
    values, gradients, kept = backward(policy, answers)
    plain, saving = estimate(policy, 1_000)
    assert plain is not None
    assert saving is not None
    limit = (plain - saved * (plain - saving)) / of_sizes.SHARE + 1
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(limit))

    assert prepare(policy, "auto", longest=1_000, some=some).checkpointing == twice

    again, same, kept_again = backward(policy, answers)
    assert torch.equal(values, again)
    torch.testing.assert_close(same, gradients, atol=1e-6, rtol=1e-6)
    assert kept_again / kept == pytest.approx({0: 1, 1: 0.6, 2: 0.2}[twice], abs=0.15)


def test_a_config_that_says_too_little_switches_nothing_on(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(config: Any, **_: Any) -> Sizes:
        raise AttributeError("no layers")

    monkeypatch.setattr(memory, "sizes", unreadable)

    assert estimate(policy, 100) == (None, None)
    assert prepare(policy, "auto", longest=100) == Prepared()


def test_several_groups_share_a_pack_as_far_as_memory_goes(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the longest pack's tokens, where memory is twice that; on a card alone."""
    needed, _ = estimate(policy, 100)
    assert needed is not None
    monkeypatch.setattr(memory, "free_bytes", lambda device: int(2 * needed / of_sizes.SHARE) + 1)
    assert prepare(policy, "auto", longest=100).joint == 0, "a CPU"
    for most, tokens in ((1_000, 200), (150, 150)):
        monkeypatch.setattr(memory, "JOINT_TOKENS", {"cpu": most})
        policy = replace(policy, form="segments")
        assert prepare(policy, "auto", longest=100).joint == tokens
    for form in ("dense", "paths"):
        assert prepare(replace(policy, form=form), "auto", longest=100).joint == 0
    assert prepare(policy, "on", longest=100).joint == 0


def test_free_memory_is_within_the_limit_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    whole = free_bytes(CPU)
    assert whole is not None
    assert whole > 2**26
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) is not None
    (tmp_path / "memory.max").write_text("5000000\n")
    assert free_bytes(CPU) == 4_000_000
    (tmp_path / "memory.max").write_text("900000\n")
    assert free_bytes(CPU) == 0


def test_a_block_that_drops_by_itself_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPT's layers call `dropout` with their own flag, which checkpointing sets."""
    config = OPTConfig(
        vocab_size=64, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, dropout=0.5,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    monkeypatch.setattr(memory, "_return_freed_blocks", lambda: None)
    base = OPTForCausalLM(config).eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        before = base(ids).logits
        wrapped = SimpleNamespace(get_base_model=lambda: base)
        recompute_layers(cast("Policy", SimpleNamespace(model=wrapped, device=ids.device)))
        again = base(ids).logits

    assert torch.equal(before, again)
