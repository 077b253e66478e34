"""A step's loss and LoRA gradients equal those of TRL's own `GRPOTrainer._compute_loss`.

Both get the same model, the same adapter and the same answers; TRL pads them into rows, this
project packs them behind one prompt. TRL divides by its own denominators: the same ones for each
loss, but for `dr_grpo`'s constant, which is its `max_completion_length`. Answers without a part in
the loss are left out of TRL's batch, and tokens without one are masked by its `tool_mask`.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.grpo.advantages import assign
from learner.grpo.base_kl import base_logprobs
from learner.grpo.objective import objective
from learner.grpo.optimizer import SignalAdamW
from learner.grpo.trainer import accumulate, update_rule
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Parent, TrainableRow, TrainingGroup, TrainingJob
from sidecar.settings import Learner

VOCABULARY = 48  # of the tiny base
LENGTH = 12
PROMPT = (1, 2, 3, 4)
PAD = 0


@pytest.fixture(scope="module")
def policy(tiny_base: Path) -> Policy:
    """An adapter that is not the base: its B matrices are random and not 0."""
    settings = Learner(rank=4, alpha=8, precision="float32", threads=1)
    policy = load_policy(str(tiny_base), Parent(name="base"), settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0, 0.05)
    return policy


@pytest.fixture(scope="module")
def groups(policy: Policy) -> list[TrainingGroup]:
    """Two groups of four answers, 1 to 12 tokens, sampled by a policy that differs from ours."""
    chance = random.Random(9)
    found = []
    for number in range(2):
        rows = []
        for advantage in (0.5, 0.1, -0.2, -0.4):
            ids = tuple(chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, LENGTH)))
            rows.append(_row(ids, advantage, (0.0,) * len(ids), (0.0,) * len(ids)))
        prompt = (*PROMPT, 5 + number)
        found.append(_recorded(policy, prompt, rows, chance, f"g{number}"))
    return found


@pytest.fixture(scope="module")
def masked(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    """The same groups; a third of the tokens is not kept, and one answer is left out."""
    chance = random.Random(4)
    found = []
    for group in groups:
        rows = []
        for row in group.rows:
            kept = [chance.random() < 0.67 for _ in row.token_ids]
            kept[chance.randrange(len(kept))] = True
            rows.append(replace(row, kept=tuple(kept)))
        rows[2] = replace(rows[2], trainable=False)
        found.append(replace(group, rows=tuple(rows)))
    assert any(not all(row.kept) for group in found for row in group.rows)
    return found


def _row(
    ids: tuple[int, ...], advantage: float, mu: tuple[float, ...], start: tuple[float, ...]
) -> TrainableRow:
    return TrainableRow(
        token_ids=ids,
        logprobs=mu,
        start=start,
        advantage=advantage,
        temperature=1.0,
        trainable=True,
    )


def _recorded(
    policy: Policy,
    prompt: tuple[int, ...],
    rows: list[TrainableRow],
    chance: random.Random,
    group_id: str,
) -> TrainingGroup:
    """The group with mu and pi_0 some tenths of a nat away from pi, and some tokens far away."""
    bare = TrainingGroup(
        group_id=group_id,
        adapter="base",
        prompt_token_ids=prompt,
        rows=tuple(rows),
        scores=(0.5,) * 4,
    )
    (pack,) = pack_group(bare, max_tokens=10_000)
    with torch.no_grad():
        values = iter(policy.logprobs(pack)[0].tolist())
    made = []
    for row in rows:
        pi = [next(values) for _ in row.token_ids]
        start = tuple(value + chance.gauss(0, 0.2) for value in pi)
        far = [chance.choice((0.0, 0.0, 0.0, -1.5, 1.5)) for _ in pi]
        mu = tuple(
            value + chance.gauss(0, 0.3) + one for value, one in zip(start, far, strict=True)
        )
        made.append(_row(row.token_ids, row.advantage, mu, start))
    return TrainingGroup(
        group_id=group_id,
        adapter="base",
        prompt_token_ids=prompt,
        rows=tuple(made),
        scores=(0.5,) * 4,
    )


def ours(
    policy: Policy, groups: Sequence[TrainingGroup], *, kl_coef: float = 0.0, **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and LoRA gradients of one step; small packs, so that groups are split.

    kl_coef: the divergence from the base has its gradient, and no part in the loss that is told.
    """
    learner = Learner(rank=4, alpha=8, precision="float32", threads=1, pack_tokens=24, **settings)
    parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    optimizer = SignalAdamW(parameters, update_rule(learner))
    job = TrainingJob(
        base_model_path="",
        parent=Parent(name="base"),
        groups=tuple(groups),
        settings=learner,
        folder=Path("unused"),
        check_stop=lambda: None,
    )
    sums = accumulate(policy, groups, job, objective(learner), optimizer, kl_coef)
    return sums.loss / sums.denominator, dict(optimizer.gradient)


@pytest.fixture(scope="module")
def trl_trainer(policy: Policy, tiny_base: Path, tmp_path_factory: Any) -> Iterator[Any]:
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
                output_dir=str(tmp_path_factory.mktemp("trl")),
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
        yield trainer


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
        {"loss": "dr_grpo", "negative_bound": 1000, "loss_length": LENGTH},
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
        {"loss_type": "grpo", "level": "sequence", "low": 3e-4, "high": 4e-4},
    ),
    "cispo": (
        {"loss": "cispo", "negative_bound": 1000},
        {"loss_type": "cispo", "high": 5.0},
    ),
    "stale_negatives": (
        {"loss": "dapo", "negative_bound": 1000, "stale_limit": 0.05},
        {"loss_type": "dapo", "opsm": 0.05},
    ),
    "ppo_decoupled": (
        {"loss": "ppo_decoupled", "negative_bound": 1000},
        {"loss_type": "dapo", "cap": 1e9},
    ),
    "ppo_decoupled_truncated": (
        {"loss": "ppo_decoupled", "negative_bound": 1000, "tis_cap": 1.2},
        {"loss_type": "dapo", "cap": 1.2},
    ),
    "dapo_tis": (
        {"loss": "dapo", "negative_bound": 1000, "tis_cap": 2.0},
        {"loss_type": "dapo", "cap": 2.0},
    ),
    "grpo_tis": (
        {"loss": "grpo", "negative_bound": 1000, "tis_cap": 1.1},
        {"loss_type": "grpo", "cap": 1.1},
    ),
    "dr_grpo_stale_negatives_bounded_tis": (
        {
            "loss": "dr_grpo",
            "negative_bound": 2.0,
            "loss_length": LENGTH,
            "tis_cap": 1.5,
            "stale_limit": 0.02,
        },
        {"loss_type": "dr_grpo", "delta": 2.0, "cap": 1.5, "opsm": 0.02},
    ),
    "narrow_clip": (
        {"loss": "dapo", "negative_bound": 1000, "clip_low": 0.05, "clip_high": 0.1},
        {"loss_type": "dapo", "low": 0.05, "high": 0.1},
    ),
}


def same(
    found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    same_gradients(found[1], expected[1])


def same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal to 1e-6 in each coordinate, and to 1e-6 of the whole gradient's length in all."""
    assert found.keys() == expected.keys()
    whole = torch.cat([one.flatten() for one in expected.values()])
    ours = torch.cat([found[name].flatten() for name in expected])
    assert whole.abs().max() > 1e-3, "a test without a gradient shows nothing"
    torch.testing.assert_close(ours, whole, atol=1e-6, rtol=0)
    assert (ours - whole).norm() <= 3e-6 * whole.norm()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", ["whole", "masked"])
@pytest.mark.filterwarnings("ignore")
def test_values_and_gradients_equal_trls(
    case: str,
    batch: str,
    policy: Policy,
    groups: list[TrainingGroup],
    masked: list[TrainingGroup],
    trl_trainer: Any,
) -> None:
    settings, options = CASES[case]
    used = groups if batch == "whole" else masked

    same(ours(policy, used, **settings), theirs(trl_trainer, policy, used, **options))


@pytest.mark.parametrize("advantage", ["mean", "leave_one_out", "std", "rank"])
@pytest.mark.filterwarnings("ignore")
def test_with_every_kind_of_advantage(
    advantage: str, policy: Policy, groups: list[TrainingGroup], trl_trainer: Any
) -> None:
    rewards = (0.9, 0.4, 0.4, 0.1)
    found = assign(rewards, (True,) * 4, advantage)
    if advantage == "std":  # TRL's `scale_rewards="group"`
        centred = torch.tensor(rewards) - torch.tensor(rewards).mean()
        expected = (centred / (torch.tensor(rewards).std() + 1e-4)).tolist()
        assert found == pytest.approx(expected, abs=1e-6)
    used = [
        replace(
            group,
            rows=tuple(replace(row, advantage=a) for row, a in zip(group.rows, found, strict=True)),
        )
        for group in groups
    ]
    settings, options = CASES["dapo"]

    same(ours(policy, used, **settings), theirs(trl_trainer, policy, used, **options))


@pytest.mark.filterwarnings("ignore")
def test_at_another_temperature(
    policy: Policy, groups: list[TrainingGroup], trl_trainer: Any
) -> None:
    used = [
        replace(group, rows=tuple(replace(row, temperature=0.7) for row in group.rows))
        for group in groups
    ]
    settings, options = CASES["dapo"]

    found = ours(policy, used, **settings)

    same(found, theirs(trl_trainer, policy, used, temperature=0.7, **options))
    assert found[0] != pytest.approx(ours(policy, groups, **settings)[0], abs=1e-4)


@pytest.mark.parametrize("batch", ["whole", "masked"])
@pytest.mark.filterwarnings("ignore")
def test_with_the_divergence_from_the_base(
    batch: str,
    policy: Policy,
    groups: list[TrainingGroup],
    masked: list[TrainingGroup],
    trl_trainer: Any,
) -> None:
    settings, options = CASES["dapo"]
    used = groups if batch == "whole" else masked

    _, found = ours(policy, used, kl_coef=0.3, **settings)
    _, expected = theirs(trl_trainer, policy, used, beta=0.3, **options)

    same_gradients(found, expected)
    _, without = ours(policy, used, **settings)
    assert any((found[name] - one).abs().max() > 1e-4 for name, one in without.items())


@pytest.mark.filterwarnings("ignore")
def test_the_cases_differ_from_each_other(
    policy: Policy, groups: list[TrainingGroup], trl_trainer: Any
) -> None:
    """The batch reaches each rule: no two configurations give the same loss."""
    values = [theirs(trl_trainer, policy, groups, **options)[0] for _, options in CASES.values()]
    assert len({round(value, 7) for value in values}) == len(values)
