"""One step's forward and backward pass by each contender, on the same model and adapter."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from learner.grpo.losses import LossRule, Objective, objective, tokens_of
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import Pack
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner

SETTINGS: dict[str, Any] = {"loss": "dapo"}
"""The loss that TRL's default is, with the same constants."""
ON_CPU = {
    "num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1_536, "vocab_size": 1_024,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
"""Two layers of Qwen3's proportions. The head is 8 % of all weights, as in Qwen3-8B."""
ON_CUDA = {
    "num_hidden_layers": 28, "hidden_size": 2_048, "intermediate_size": 6_144,
    "vocab_size": 151_936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Qwen3-1.7B's config."""
QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4_096, "intermediate_size": 12_288,
    "vocab_size": 151_936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1_536,
    "vocab_size": 49_152, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
}  # fmt: skip
"""Its sizes; the architecture is Qwen3's, as of the others."""


def make_policy(
    folder: Path, shape: dict[str, int], device: str, precision: str, drawn_on: str = ""
) -> Policy:
    """Draw a model of this shape with a LoRA that is not the base, through the product's loader.

    drawn_on: device whose random numbers the weights are; empty: `device`. With "cpu" a card gets
        the weights that a CPU gets.
    """
    settings = Learner.model_validate({"rank": 8, "device": device, "precision": precision})
    with drawn_base(folder, shape, drawn_on or device):
        policy = load_policy(str(folder), Parent(name="base"), settings)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=draw))
    return policy


@contextmanager
def drawn_base(folder: Path, shape: dict[str, int], device: str) -> Iterator[None]:
    """Let the product's loader draw a base of this shape where it would read its weights.

    A file of 16 GB, which a lent machine has no minutes for, is neither written nor read.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config

    tied: dict[str, Any] = {"tie_word_embeddings": True, **shape}
    config = Qwen3Config(**tied, max_position_embeddings=40_960)
    config.save_pretrained(folder)

    def draw(_: str, *, dtype: torch.dtype, **options: Any) -> Any:
        torch.manual_seed(1)
        with torch.device(device):  # in bf16 first, so that each precision gets the same weights
            base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
        for one in base.parameters():  # not `base.to`, which rounds the rotary frequencies as well
            one.data = one.data.to(dtype)
        return base.eval()

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", draw):
        yield


def ours(policy: Policy, packs: Sequence[Pack]) -> float:
    """Compute the step's loss and its gradient, pack by pack. Returns: the loss."""
    loss = gradients(policy, packs)
    policy.model.zero_grad()
    return loss


def gradients(policy: Policy, packs: Sequence[Pack]) -> float:
    """As `ours`; the gradient stays in the parameters."""
    aim: Objective = replace(
        objective(Learner.model_validate(SETTINGS)), rule=LossRule(negative_bound=1_000)
    )
    denominator = aim.denominator(packs)
    total = 0.0
    for pack in packs:
        logprobs_N, _ = policy.logprobs(pack)
        found = aim.sums(tokens_of(pack, logprobs_N))
        (found.loss / denominator).backward()
        total += float(found.loss)
    return total / denominator


class Trl:
    """TRL's `GRPOTrainer._compute_loss` and its backward pass, one padded batch."""

    def __init__(self, policy: Policy, folder: Path, answer: int) -> None:
        """Raises: ImportError without trl."""
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from datasets import Dataset
            from tokenizers import Tokenizer, models
            from transformers import PreTrainedTokenizerFast
            from trl import GRPOConfig, GRPOTrainer

            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(
                    models.WordLevel({"w0": 0, "w1": 1, "w2": 2}, unk_token="w1")
                ),
                pad_token="w0",
                eos_token="w2",
            )
            self._trainer = GRPOTrainer(
                model=policy.model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=GRPOConfig(
                    output_dir=str(folder),
                    use_cpu=policy.device.type == "cpu",
                    bf16=policy.autocast,
                    report_to="none",
                    per_device_train_batch_size=2,
                    num_generations=2,
                    max_completion_length=answer,
                    gradient_checkpointing=False,
                    epsilon_high=0.28,
                ),
                train_dataset=Dataset.from_list([{"prompt": "w1 w2"}] * 2),
                processing_class=tokenizer,
            )
            self._trainer.current_gradient_accumulation_steps = 1

    def step(self, policy: Policy, group: TrainingGroup) -> float:
        """Compute the loss and its gradient. Returns: the loss."""
        inputs = batch(group, policy.device)
        with policy.precision():
            loss = self._trainer._compute_loss(policy.model, inputs)
        loss.backward()
        policy.model.zero_grad()
        return float(loss)


def batch(group: TrainingGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the group as TRL's padded batch: histories of turns are tokens that it masks."""
    rows = group.rows
    width = max(len(row.token_ids) for row in rows)

    def padded(values: Sequence[Sequence[float]], kind: torch.dtype) -> torch.Tensor:
        rows_BS = [[*one, *[0] * (width - len(one))] for one in values]
        return torch.tensor(rows_BS, dtype=kind, device=device)

    mask = padded([[1] * len(row.token_ids) for row in rows], torch.long)
    kept = padded([row.kept or (True,) * len(row.token_ids) for row in rows], torch.long)
    prompt = torch.tensor([group.prompt_token_ids] * len(rows), device=device)
    return {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": padded([row.token_ids for row in rows], torch.long),
        "completion_mask": mask,
        "tool_mask": kept,
        "advantages": torch.tensor([row.advantage for row in rows], device=device),
        "old_per_token_logps": padded([row.logprobs for row in rows], torch.float32),
        "num_items_in_batch": kept.sum(),
    }
