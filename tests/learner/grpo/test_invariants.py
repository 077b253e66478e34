"""What must hold for every batch: order, packs, masks, advantages, and the adapter switched off."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from learner.grpo.losses import LOSSES, objective
from learner.grpo.optimizer import SignalAdamW
from learner.grpo.trainer import accumulate, rate_of
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import Policy
from learner.records import Parent, TrainableRow, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import job_of, with_effect

SETTINGS = Learner(rank=4, alpha=8, precision="float32", threads=1, groups_per_step=9)
PROPERTY = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
IDS = st.integers(0, 47)


@pytest.fixture(scope="module")
def policy(tiny_base: Path) -> Policy:
    return with_adapter(tiny_base)


def with_adapter(base: Path) -> Policy:
    return with_effect(load_policy(str(base), Parent(name="base"), SETTINGS), 0.05)


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


def test_a_rate_that_nobody_gave_follows_the_width_of_the_base() -> None:
    rates = [rate_of(Learner(), width) for width in (576, 2_048, 4_096)]

    assert rates == pytest.approx([4e-4, 5.97e-5, 2.11e-5], rel=1e-2)
    assert rate_of(Learner(learning_rate=0.03), 4_096) == 0.03
