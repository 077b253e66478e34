"""TRL's own `GRPOTrainer._compute_loss` on our groups, and the configurations that both have.

TRL pads the answers into rows. It divides by its own denominators: the same ones for each loss, but
for `dr_grpo`'s constant, which is its `max_completion_length`. Answers without a part in the loss
are left out of its batch, and tokens without one are masked by its `tool_mask`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from learner.grpo.base_kl import base_logprobs
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import TrainingGroup

VOCABULARY = 48  # of the tiny base
LENGTH = 12
PAD = 0


def make_trainer(policy: Policy, folder: Path) -> Any:  # Any: TRL is not typed
    """Return TRL's trainer of the policy's own model. folder: where it may write."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        words = {f"w{number}": number for number in range(VOCABULARY)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
            pad_token="w0",
            eos_token="w2",
        )
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=str(folder),
                use_cpu=True,
                bf16=False,
                report_to="none",
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=LENGTH,
                gradient_checkpointing=False,
                beta=0.0,
                temperature=1.0,
            ),
            train_dataset=Dataset.from_list([{"prompt": "w1 w2"}] * 8),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1
        return trainer


def theirs(
    trainer: Any,
    policy: Policy,
    groups: Sequence[TrainingGroup],
    *,
    cap: float | None = None,
    **args: Any,
) -> tuple[float, dict[str, torch.Tensor]]:
    """TRL's loss and gradients on the same answers.

    cap: with it, pi_0 is TRL's old policy, as its trainer computes it, and the importance sampling
    weight is min(pi_0 / mu, cap). Without it, mu is the old policy.
    """
    loss_type = args.pop("loss_type")
    trainer.loss_type = loss_type
    trainer.importance_sampling_level = args.pop("level", "token")
    trainer.epsilon_low = args.pop("low", 0.2)
    trainer.epsilon_high = args.pop("high", 0.28)
    trainer.args.delta = args.pop("delta", None)
    trainer.off_policy_mask_threshold = args.pop("opsm", None)
    trainer.use_vllm = cap is not None
    trainer.vllm_importance_sampling_correction = cap is not None
    trainer.beta = args.pop("beta", 0.0)
    trainer.args.use_bias_correction_kl = False
    _divide_logits(trainer, args.pop("temperature", 1.0))
    assert not args
    rows = [(g.prompt_token_ids, row) for g in groups for row in g.rows if row.trainable]
    width = max(len(row.token_ids) for _, row in rows)

    def padded(values: list[tuple[float, ...]], kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*one, *[PAD] * (width - len(one))] for one in values], dtype=kind)

    completion = padded([row.token_ids for _, row in rows], torch.long)
    mask = padded([(1,) * len(row.token_ids) for _, row in rows], torch.long)
    kept = padded([row.kept or (1,) * len(row.token_ids) for _, row in rows], torch.long)
    mu = padded([row.logprobs for _, row in rows], torch.float32)
    start = padded([row.start for _, row in rows], torch.float32)
    prompt = torch.tensor([ids for ids, _ in rows])
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": torch.ones_like(prompt),
        "completion_ids": completion,
        "completion_mask": mask,
        "advantages": torch.tensor([row.advantage for _, row in rows]),
        "old_per_token_logps": start if cap is not None else mu,
        "sampling_per_token_logps": mu,
        "tool_mask": kept,
        "num_items_in_batch": (mask * kept).sum(),
    }
    if cap is not None:
        inputs["importance_sampling_ratio"] = (start - mu).exp().clamp(max=cap)
    if trainer.beta:
        inputs["ref_per_token_logps"] = padded(_base_values(policy, groups), torch.float32)
    policy.model.zero_grad()
    loss = trainer._compute_loss(policy.model, inputs)
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    policy.model.zero_grad()
    return float(loss), gradients


def _divide_logits(trainer: Any, temperature: float) -> None:
    """TRL's head divides by one temperature for the whole batch, which it is made with."""
    from trl.trainer.utils import add_fused_lm_head

    if trainer.temperature != temperature:
        trainer.temperature = temperature
        add_fused_lm_head(
            trainer.model.get_base_model(),
            temperature=temperature,
            cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy"),
        )


def _base_values(policy: Policy, groups: Sequence[TrainingGroup]) -> list[tuple[float, ...]]:
    """Log-probabilities of all tokens of the trainable answers, with the adapter switched off."""
    found = []
    for group in groups:
        whole = replace(group, rows=tuple(replace(row, kept=()) for row in group.rows))
        (pack,) = pack_group(whole, max_tokens=10_000)
        values = iter(base_logprobs(policy, pack).tolist())
        found += [tuple(next(values) for _ in row.token_ids) for row in whole.rows if row.trainable]
    return found


GSPO = {"level": "sequence", "low": 3e-4, "high": 4e-4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        {"loss": "grpo", "negative_bound": 1000},
        {"loss_type": "grpo"},
    ),
    "grpo_bounded": (
        {"loss": "grpo", "negative_bound": 1.5},
        {"loss_type": "grpo", "delta": 1.5},
    ),
    "dr_grpo": (
        {"loss": "dr_grpo", "negative_bound": 1000},
        {"loss_type": "dr_grpo"},
    ),
    "dapo": (
        {"loss": "dapo", "negative_bound": 1000},
        {"loss_type": "dapo"},
    ),
    "dapo_bounded": (
        {"loss": "dapo", "negative_bound": 2.0},
        {"loss_type": "dapo", "delta": 2.0},
    ),
    "gspo": (
        {"loss": "gspo", "negative_bound": 1000},
        {"loss_type": "grpo", **GSPO},
    ),
    "cispo": (
        {"loss": "cispo", "negative_bound": 1000},
        {"loss_type": "cispo", "high": 5.0},
    ),
    "ppo_decoupled": (
        {"loss": "ppo_decoupled", "negative_bound": 1000},
        {"loss_type": "dapo", "cap": 1e9},
    ),
    "gspo_bounded": (
        {"loss": "gspo", "negative_bound": 1.05},
        {"loss_type": "grpo", **GSPO, "delta": 1.05},
    ),
    "narrow_clip": (
        {"loss": "dapo", "negative_bound": 1000, "clip_low": 0.05, "clip_high": 0.1},
        {"loss_type": "dapo", "low": 0.05, "high": 0.1},
    ),
}
