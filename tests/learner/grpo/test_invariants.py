"""What must hold for every batch: order, packs, masks, advantages, and the adapter switched off."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from learner.grpo import losses, optimizer
from learner.grpo.losses import LOSSES, objective
from learner.grpo.optimizer import SignalAdamW
from learner.grpo.trainer import accumulate, rate_of, run_steps
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import Parent, TrainableRow, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import job_of

SETTINGS = Learner(rank=4, alpha=8, precision="float32", threads=1, groups_per_step=9)
PROPERTY = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
IDS = st.integers(0, 47)


@pytest.fixture(scope="module")
def policy(tiny_base: Path) -> Policy:
    return with_adapter(tiny_base)


def with_adapter(base: Path) -> Policy:
    """An adapter that is not the base: its B matrices are random and not 0."""
    found = load_policy(str(base), Parent(name="base"), SETTINGS)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.normal_(0, 0.05)
    return found


@st.composite
def batches(draw: st.DrawFn) -> list[TrainingGroup]:
    """One to three groups of two to five answers, off-policy, of all temperatures, some masked."""
    groups = []
    for number in range(draw(st.integers(1, 3))):
        rows = []
        for _ in range(draw(st.integers(2, 5))):
            ids = draw(st.lists(IDS, min_size=1, max_size=6))
            kept = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            rows.append(
                TrainableRow(
                    token_ids=tuple(ids),
                    logprobs=tuple(draw(st.floats(-6, 0)) for _ in ids),
                    start=tuple(draw(st.floats(-6, 0)) for _ in ids),
                    advantage=draw(st.floats(-1, 1)),
                    temperature=draw(st.sampled_from([0.5, 1.0, 1.3])),
                    trainable=draw(st.integers(0, 4)) > 0,
                    kept=tuple(kept) if any(kept) else (),
                )
            )
        rows[0] = replace(rows[0], trainable=True)
        groups.append(
            TrainingGroup(
                group_id=str(number),
                adapter="base",
                prompt_token_ids=tuple(draw(st.lists(IDS, min_size=1, max_size=4))),
                rows=tuple(rows),
                scores=(0.5,) * len(rows),
            )
        )
    return groups


def step(
    policy: Policy, groups: list[TrainingGroup], loss: str = "dppo_tv", pack_tokens: int = 1000
) -> tuple[float, torch.Tensor]:
    """Loss and flat LoRA gradient of one step."""
    chosen = SETTINGS.model_copy(update={"loss": loss, "pack_tokens": pack_tokens})
    parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    optimizer = SignalAdamW(parameters, rate_of(chosen, 576))
    sums = accumulate(policy, groups, job_of(groups, chosen), objective(chosen), optimizer)
    gradient = torch.cat([one.flatten() for one in optimizer.gradient.values()])
    return sums.loss / sums.denominator, gradient


def same(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> None:
    scale = max(1.0, float(expected[1].norm()))
    assert found[0] == pytest.approx(expected[0], abs=1e-5 * max(1.0, abs(expected[0])))
    assert float((found[1] - expected[1]).norm()) <= 1e-5 * scale


@PROPERTY
@given(batch=batches(), loss=st.sampled_from(sorted(LOSSES)), seed=st.integers(0, 99))
def test_order_and_packs_do_not_matter(
    policy: Policy, batch: list[TrainingGroup], loss: str, seed: int
) -> None:
    chance = random.Random(seed)
    shuffled = [replace(one, rows=tuple(chance.sample(one.rows, len(one.rows)))) for one in batch]
    chance.shuffle(shuffled)

    expected = step(policy, batch, loss)

    same(step(policy, shuffled, loss), expected)
    same(step(policy, batch, loss, pack_tokens=2), expected)


@PROPERTY
@given(batch=batches(), loss=st.sampled_from(sorted(LOSSES)))
def test_what_is_masked_has_no_part_whatever_was_recorded_of_it(
    policy: Policy, batch: list[TrainingGroup], loss: str
) -> None:
    """Values, advantages and starts of masked answers and tokens are changed at will."""

    def changed(row: TrainableRow) -> TrainableRow:
        if not row.trainable:
            return replace(row, logprobs=(-30.0,) * len(row.token_ids), advantage=1e6)
        kept = row.kept or (True,) * len(row.token_ids)
        return replace(
            row,
            logprobs=tuple(v if k else -30.0 for v, k in zip(row.logprobs, kept, strict=True)),
            start=tuple(v if k else -30.0 for v, k in zip(row.start, kept, strict=True)),
        )

    other = [replace(one, rows=tuple(map(changed, one.rows))) for one in batch]

    found, expected = step(policy, other, loss), step(policy, batch, loss)

    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


@PROPERTY
@given(batch=batches(), loss=st.sampled_from(sorted(LOSSES)))
def test_without_an_advantage_there_is_no_gradient(
    policy: Policy, batch: list[TrainingGroup], loss: str
) -> None:
    """At ratio 1, where the pull of `dppo_tv` has none either but for rounding."""
    flat = [
        replace(one, rows=tuple(replace(row, advantage=0.0) for row in on_policy(policy, one).rows))
        for one in batch
    ]

    assert step(policy, flat, loss)[1].abs().max() < 1e-7


@PROPERTY
@given(batch=batches(), loss=st.sampled_from(sorted({*LOSSES} - {"dr_grpo"})))
def test_at_ratio_one_the_gradient_is_reinforce(
    policy: Policy, batch: list[TrainingGroup], loss: str
) -> None:
    batch = [on_policy(policy, one) for one in batch]
    rows = [row for one in batch for row in one.rows if row.trainable]
    tokens = sum(row.kept_tokens for row in rows)
    policy.model.zero_grad()
    for one in batch:
        (pack,) = pack_group(one, max_tokens=1000)
        by_answer = loss in ("grpo", "gspo")
        lengths = [pack.answers.count(answer) for answer in pack.answers]
        weights = [
            advantage / (length * len(rows) if by_answer else tokens)
            for advantage, length in zip(pack.advantages, lengths, strict=True)
        ]
        (-(policy.logprobs(pack)[0] * torch.tensor(weights)).sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.requires_grad])
    policy.model.zero_grad()

    found = step(policy, batch, loss)[1]

    assert float((found - expected).norm()) <= 1e-5 * max(1.0, float(expected.norm()))


def on_policy(policy: Policy, group: TrainingGroup) -> TrainingGroup:
    """The group with the policy's own log-probabilities as recorded ones."""
    whole = replace(group, rows=tuple(replace(row, kept=()) for row in group.rows))
    (pack,) = pack_group(whole, max_tokens=1000)
    with torch.no_grad():
        values = iter(policy.logprobs(pack)[0].tolist())
    rows = []
    for row in group.rows:
        if row.trainable:
            pi = tuple(next(values) for _ in row.token_ids)
            row = replace(row, logprobs=pi, start=pi)
        rows.append(row)
    return replace(group, rows=tuple(rows))


@PROPERTY
@given(batch=batches())
def test_with_the_adapter_switched_off_it_is_the_base_bit_for_bit(
    policy: Policy, tiny_base: Path, batch: list[TrainingGroup]
) -> None:
    from transformers import AutoModelForCausalLM

    attention = policy.model.get_base_model().config._attn_implementation
    bare = AutoModelForCausalLM.from_pretrained(
        tiny_base, dtype=torch.float32, attn_implementation=attention
    )
    wrapped = policy.model.get_base_model().named_parameters()
    loaded = {name.replace(".base_layer", ""): parameter for name, parameter in wrapped}
    for name, parameter in bare.named_parameters():
        assert torch.equal(parameter, loaded[name])
        # In the same memory: where weights begin in it decides how their products are rounded.
        parameter.data = loaded[name].data
    base = replace(policy, model=_Bare(bare))
    for group in batch:
        (pack,) = pack_group(group, max_tokens=1000)
        with torch.no_grad(), policy.model.disable_adapter():
            off_N = policy.logprobs(pack)[0]
        with torch.no_grad():
            assert torch.equal(off_N, base.logprobs(pack)[0])
            assert not torch.equal(off_N, policy.logprobs(pack)[0])


class _Bare:
    """A model without peft, where a policy expects one with it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def get_base_model(self) -> torch.nn.Module:
        return self._model


def test_a_rate_that_nobody_gave_follows_the_width_of_the_base() -> None:
    rates = [rate_of(Learner(), width) for width in (576, 2_048, 4_096)]

    assert rates == pytest.approx([4e-4, 5.97e-5, 2.11e-5], rel=1e-2)
    assert rate_of(Learner(learning_rate=0.03), 4_096) == 0.03


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        pytest.param({"learning_rate": 0.02}, 2.0, id="rate"),
        pytest.param({"REFERENCE_SPREAD": 1.0}, 0.5, id="reference"),
    ],
)
def test_a_run_moves_as_far_as_the_settings_say(
    tiny_base: Path, changes: dict[str, Any], factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of a group whose advantages are 0.5."""
    moved = []
    monkeypatch.setattr(losses, "LOSS_LENGTH", 1)
    for chosen in ({}, changes):
        reference = chosen.get("REFERENCE_SPREAD", 0.5)
        monkeypatch.setattr(optimizer, "REFERENCE_SPREAD", reference)
        learner = SETTINGS.model_copy(
            update={
                "learning_rate": 0.01,
                "loss": "dr_grpo",
                **chosen,
            }
        )
        fresh = with_adapter(tiny_base)
        rows = [
            TrainableRow(
                token_ids=ids, logprobs=(0.0,) * 4, advantage=a, temperature=1.0, trainable=True
            )
            for ids, a in (((10, 11, 12, 13), 0.5), ((20, 21, 22, 23), -0.5))
        ]
        group = TrainingGroup(
            group_id="g",
            adapter="base",
            prompt_token_ids=(1, 2, 3),
            rows=tuple(rows),
            scores=(1.0, 0.0),
        )
        outcome, _ = run_steps(fresh, job_of([on_policy(fresh, group)], learner))
        moved.append(outcome.metrics[0].update_norm)

    assert moved[1] / moved[0] == pytest.approx(factor, rel=0.02)
