"""Packs of every kind equal one row for each answer: loss to 1e-6, LoRA gradients to 1e-5."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learner.policy.architecture import Form
from learner.policy.logprobs import Policy
from learner.policy.packing import pack_group
from learner.records import TrainableRow, TrainingGroup
from sidecar.settings import Learner
from tests.learner.conftest import make_group, make_row
from tests.learner.policy.test_architecture import PACKED, gradients, load, saved

FAMILIES = ("llama", "mistral", "gemma3", "qwen2, mixed windows")
VOCABULARY = 48


def drawn_rows(answers: int, chance: random.Random) -> list[TrainableRow]:
    """Answers of 1 to 12 tokens at three temperatures, a third of them with tokens left out of the
    loss, and half of them a continuation of an earlier one, as turns of one history are."""
    rows: list[TrainableRow] = []
    for _ in range(answers):
        ids = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 12))]
        if rows and chance.random() < 0.5:
            earlier = chance.choice(rows).token_ids
            ids = [*earlier[: chance.randint(1, len(earlier))], *ids][:20]
        kept = [chance.random() < 0.6 for _ in ids] if chance.random() < 0.3 else []
        if kept and not any(kept):
            kept[0] = True
        rows.append(
            make_row(
                ids,
                chance.uniform(-0.5, 0.5),
                temperature=chance.choice((0.5, 1.0, 1.3)),
                kept=kept,
            )
        )
    return rows


def loss_and_gradients(
    policy: Policy, group: TrainingGroup, *, max_tokens: int, alone: bool, least: int
) -> tuple[Tensor, dict[str, Tensor], int]:
    """The mean of advantage times log-probability; its gradients; tokens computed."""
    packs = pack_group(group, max_tokens=max_tokens, alone=alone, least=least)
    loss = torch.zeros(())
    for pack in packs:
        loss = loss - (torch.tensor(pack.advantages) * policy.logprobs(pack)[0]).sum()
    loss = loss / sum(len(pack.targets) for pack in packs)
    loss.backward()
    return loss.detach(), gradients(policy), sum(len(pack.input_ids) for pack in packs)


@pytest.mark.parametrize(
    ("form", "answers"),
    [*((form, number) for form in ("segments", "dense") for number in (5, 16)), ("paths", 5)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_equals_one_row_for_each_answer(
    form: Form, family: str, answers: int, tmp_path: Path, learner_settings: Learner
) -> None:
    name, changes = PACKED[family]
    policy = replace(load(saved(tmp_path, name, changes), learner_settings), form=form)
    chance = random.Random(answers)
    rows = drawn_rows(answers, chance)
    members = make_group([chance.randrange(VOCABULARY) for _ in range(9)], rows)

    expected, expected_gradients, tokens = loss_and_gradients(
        replace(policy, form="dense"), members, max_tokens=1_000, alone=True, least=1
    )

    computed = []
    for max_tokens, least in ((1_000, 1), (1_000, 4), (40, 1)):
        found, found_gradients, unique = loss_and_gradients(
            policy, members, max_tokens=max_tokens, alone=False, least=least
        )
        computed.append(unique)
        assert float((found - expected).abs()) <= 1e-6
        assert found_gradients.keys() == expected_gradients.keys()
        largest = max(float(one.abs().max()) for one in expected_gradients.values())
        assert largest > 1e-3, "a test without a gradient shows nothing"
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found_gradients[name], gradient, atol=1e-5, rtol=0, msg=name)
    assert computed[0] <= computed[1] < tokens
