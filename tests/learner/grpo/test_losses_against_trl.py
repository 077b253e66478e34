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
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.grpo import losses
from learner.grpo.advantages import assign
from learner.grpo.base_kl import base_logprobs
from learner.grpo.losses import LossRule, objective
from learner.grpo.optimizer import SignalAdamW
from learner.grpo.trainer import accumulate, rate_of
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Parent, TrainableRow, TrainingGroup
from sidecar.settings import Advanced, Learner
from tests.learner.conftest import job_of, make_group, make_row, own_logprobs, with_effect

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


PROMPT = (1, 2, 3, 4)


@pytest.fixture(scope="module", params=["float32", "float64"])
def policy(request: pytest.FixtureRequest, tiny_base: Path) -> Iterator[Policy]:
    """An adapter that is not the base: its B matrices are random and not 0.

    In fp32, as both programs compute, and in float64, where rounding hides no difference: both name
    fp32 in their heads, norms and kernels, and that name gives float64 then.
    """
    settings = Learner(rank=4, alpha=8, precision="float32", threads=1)
    policy = load_policy(str(tiny_base), Parent(name="base"), settings)
    with_effect(policy, 0.05)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "float64":
            policy.model.double()
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            torch.set_default_dtype(torch.float64)
        yield policy
    torch.set_default_dtype(torch.float)


@pytest.fixture(scope="module")
def groups(policy: Policy) -> list[TrainingGroup]:
    """Two groups of four answers, 1 to 12 tokens, sampled by a policy that differs from ours."""
    chance = random.Random(9)
    found = []
    for number in range(2):
        rows = []
        for advantage in (0.5, 0.1, -0.2, -0.4):
            ids = tuple(chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, LENGTH)))
            rows.append(make_row(ids, advantage))
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


@pytest.fixture(scope="module")
def turned(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    """The same groups with the signs of their advantages changed: the bad answers are likelier than
    they were, so that a bound of their ratio is reached in the mean over an answer too."""
    return [
        replace(one, rows=tuple(replace(row, advantage=-row.advantage) for row in one.rows))
        for one in groups
    ]


@pytest.fixture(scope="module")
def batches(
    groups: list[TrainingGroup], masked: list[TrainingGroup], turned: list[TrainingGroup]
) -> dict[str, list[TrainingGroup]]:
    return {"whole": groups, "masked": masked, "turned": turned}


def _recorded(
    policy: Policy,
    prompt: tuple[int, ...],
    rows: list[TrainableRow],
    chance: random.Random,
    group_id: str,
) -> TrainingGroup:
    """The group with mu and pi_0 some tenths of a nat away from pi, and some tokens far away."""
    bare = replace(make_group(prompt, rows, group_id=group_id), scores=(0.5,) * 4)
    made = []
    for row, pi in zip(rows, own_logprobs(policy, bare), strict=True):
        start = tuple(value + chance.gauss(0, 0.2) for value in pi)
        far = [chance.choice((0.0, 0.0, 0.0, -1.5, 1.5)) for _ in pi]
        mu = tuple(
            value + chance.gauss(0, 0.3) + one for value, one in zip(start, far, strict=True)
        )
        made.append(replace(row, logprobs=mu, start=start))
    return replace(bare, rows=tuple(made))


def ours(
    policy: Policy, groups: Sequence[TrainingGroup], *, kl_coef: float = 0.0, **settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and LoRA gradients of one step; small packs, so that groups are split.

    kl_coef: the divergence from the base has its gradient, and no part in the loss that is told.
    """
    loss = settings.pop("loss", "dppo_tv")
    names = {one.name for one in fields(LossRule)} & settings.keys()
    rule = {name: settings.pop(name) for name in names}
    learner = Learner(
        rank=4,
        alpha=8,
        precision="float32",
        threads=1,
        pack_tokens=24,
        loss=loss,
        advanced=Advanced(**settings),
    )
    parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    optimizer = SignalAdamW(parameters, rate_of(learner, 576))
    job = job_of(groups, learner)
    aim = objective(learner)
    aim = replace(aim, rule=replace(aim.rule, **rule))
    sums = accumulate(policy, groups, job, aim, optimizer, kl_coef)
    return sums.loss / sums.denominator, dict(optimizer.gradient)


@pytest.fixture(autouse=True)
def same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOSS_LENGTH", LENGTH)


@pytest.fixture(scope="module")
def trl_trainer(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(policy, tmp_path_factory.mktemp("trl"))


def same(
    found: tuple[float, dict[str, torch.Tensor]], expected: tuple[float, dict[str, torch.Tensor]]
) -> None:
    exact = torch.get_default_dtype() == torch.float64
    assert found[0] == pytest.approx(expected[0], abs=1e-12 if exact else 1e-6)
    same_gradients(found[1], expected[1])


def same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """In float64 equal to 1e-12 of the whole gradient's length; measured: 2e-15.

    In fp32 equal to 1e-6 in each coordinate, and to 3e-6 of the length: each side rounds its own
    sums, TRL's over padded rows and ours over packs; measured: 0.6e-6 to 1.8e-6.
    """
    assert found.keys() == expected.keys()
    whole = torch.cat([one.flatten() for one in expected.values()])
    ours = torch.cat([found[name].flatten() for name in expected])
    assert whole.abs().max() > 1e-3, "a test without a gradient shows nothing"
    torch.testing.assert_close(ours, whole, atol=1e-6, rtol=0)
    exact = torch.get_default_dtype() == torch.float64
    assert ours.dtype == torch.get_default_dtype()
    assert (ours - whole).norm() <= (1e-12 if exact else 3e-6) * whole.norm()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", ["whole", "masked", "turned"])
@pytest.mark.filterwarnings("ignore")
def test_values_and_gradients_equal_trls(
    case: str,
    batch: str,
    policy: Policy,
    batches: dict[str, list[TrainingGroup]],
    trl_trainer: Any,
) -> None:
    settings, options = CASES[case]
    used = batches[batch]

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


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "gspo", "cispo"])
@pytest.mark.filterwarnings("ignore")
def test_the_divergence_is_a_mean_over_tokens_whatever_the_loss_is_a_mean_of(
    loss: str, policy: Policy, batches: dict[str, list[TrainingGroup]], trl_trainer: Any
) -> None:
    """TRL's term has the mean of its loss, so it is taken from TRL's `dapo`, whose mean is ours."""
    settings, options = CASES[loss]
    _, plain = CASES["dapo"]
    for used in batches.values():
        _, found = ours(policy, used, kl_coef=0.3, **settings)
        _, expected = theirs(trl_trainer, policy, used, **options)
        _, with_term = theirs(trl_trainer, policy, used, beta=0.3, **plain)
        _, without = theirs(trl_trainer, policy, used, **plain)
        summed = {n: one + with_term[n] - without[n] for n, one in expected.items()}

        same_gradients(found, summed)
