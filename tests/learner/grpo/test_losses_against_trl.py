"""A step's loss and LoRA gradients equal those of TRL's own `GRPOTrainer._compute_loss`.

Both get the same model, the same adapter and the same answers; TRL pads them into rows, this
project packs them behind one prompt. TRL divides by its own denominators: the same ones for each
loss, but for `dr_grpo`'s constant, which is its `max_completion_length`. Answers without a part in
the loss are left out of TRL's batch, and tokens without one are masked by its `tool_mask`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.grpo import losses
from learner.grpo.advantages import assign
from learner.grpo.losses import LossRule, objective
from learner.grpo.optimizer import SignalAdamW
from learner.grpo.trainer import accumulate, rate_of
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Parent, TrainableRow, TrainingGroup, TrainingJob
from sidecar.settings import Advanced, Learner
from tests.learner.grpo.trl_side import CASES, LENGTH, VOCABULARY, make_trainer, theirs

PROMPT = (1, 2, 3, 4)


@pytest.fixture(scope="module", params=["float32", "float64"])
def policy(request: pytest.FixtureRequest, tiny_base: Path) -> Iterator[Policy]:
    """An adapter that is not the base: its B matrices are random and not 0.

    In fp32, as both programs compute, and in float64, where rounding hides no difference: both name
    fp32 in their heads, norms and kernels, and that name gives float64 then.
    """
    settings = Learner(rank=4, alpha=8, precision="float32", threads=1)
    policy = load_policy(str(tiny_base), Parent(name="base"), settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0, 0.05)
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
    job = TrainingJob(
        base_model_path="",
        parent=Parent(name="base"),
        groups=tuple(groups),
        settings=learner,
        folder=Path("unused"),
        check_stop=lambda: None,
    )
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


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "gspo", "cispo"])
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


@pytest.mark.filterwarnings("ignore")
def test_with_answers_of_one_length_the_divergence_of_grpo_is_trls(
    policy: Policy, groups: list[TrainingGroup], trl_trainer: Any
) -> None:
    """The mean over tokens is then the mean over answers; with other lengths it is not."""
    settings, options = CASES["grpo"]

    def cut(row: TrainableRow) -> TrainableRow:
        start, nats = row.start[:4], row.logprobs[:4]
        return replace(row, token_ids=row.token_ids[:4], start=start, logprobs=nats)

    def pair(used: list[TrainingGroup]) -> tuple[dict[str, torch.Tensor], ...]:
        _, found = ours(policy, used, kl_coef=0.3, **settings)
        _, expected = theirs(trl_trainer, policy, used, beta=0.3, **options)
        return found, expected

    short = [
        replace(one, rows=tuple(cut(row) for row in one.rows if len(row.token_ids) >= 4))
        for one in groups
    ]
    same_gradients(*pair(short))
    found, expected = pair(groups)
    assert any((found[name] - one).abs().max() > 1e-4 for name, one in expected.items())


@pytest.mark.filterwarnings("ignore")
def test_the_cases_differ_from_each_other(
    policy: Policy, batches: dict[str, list[TrainingGroup]], trl_trainer: Any
) -> None:
    """The batches reach each rule: no two configurations give the same losses."""
    values = {
        tuple(
            round(theirs(trl_trainer, policy, batches[batch], **options)[0], 7)
            for batch in ("whole", "turned")
        )
        for _, options in CASES.values()
    }
    assert len(values) == len(CASES)
