"""Packing: the index arithmetic by hand, and exactness against one row per answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from learner.policy.adapter_io import load_policy
from learner.policy.attention import dense_mask
from learner.policy.logprobs import Policy
from learner.policy.packing import Pack, Segment, fold, pack_group, packed_length
from learner.records import Parent, TrainingGroup
from sidecar.settings import Learner

if TYPE_CHECKING:
    from tests.learner.conftest import MakeGroup, MakeRow


def test_the_answers_lie_behind_one_prompt(group: MakeGroup, row: MakeRow) -> None:
    rows = [
        row([10, 11, 12], 0.5, logprobs=[-1, -2, -3]),
        row([20, 21, 22, 23], -0.5, temperature=0.7),
    ]

    (pack,) = pack_group(group([1, 2, 3], rows, adapter="a"), max_tokens=100)

    assert pack == Pack(
        group_id="g",
        adapter="a",
        input_ids=(1, 2, 3, 10, 11, 20, 21, 22),
        positions=(0, 1, 2, 3, 4, 3, 4, 5),
        segments=(
            Segment(start=0, stop=3, last=8, parent=-1, position=0),
            Segment(start=3, stop=5, last=5, parent=0, position=3),
            Segment(start=5, stop=8, last=8, parent=0, position=3),
        ),
        sources=(2, 3, 4, 2, 5, 6, 7),
        targets=(10, 11, 12, 20, 21, 22, 23),
        recorded=(-1, -2, -3, -1, -1, -1, -1),
        advantages=(0.5, 0.5, 0.5, -0.5, -0.5, -0.5, -0.5),
        temperatures=(1.0, 1.0, 1.0, 0.7, 0.7, 0.7, 0.7),
        answers=(0, 0, 0, 1, 1, 1, 1),
        start=(-1, -2, -3, -1, -1, -1, -1),
    )


def test_an_answer_of_one_token_needs_no_input_of_its_own(group: MakeGroup, row: MakeRow) -> None:
    (pack,) = pack_group(group([1, 2], [row([10]), row([20])]), max_tokens=100)

    assert pack.input_ids == (1, 2)
    assert pack.sources == (1, 1)
    assert pack.targets == (10, 20)


def test_masked_answers_are_not_packed(group: MakeGroup, row: MakeRow) -> None:
    rows = [row([10, 11]), row([20, 21], trainable=False), row([30, 31])]

    (pack,) = pack_group(group([1], rows), max_tokens=100)

    assert pack.targets == (10, 11, 30, 31)


def test_a_token_that_is_not_kept_is_read_and_is_no_target(group: MakeGroup, row: MakeRow) -> None:
    rows = [
        row([10, 11, 12], 0.5, logprobs=[-1, -2, -3], kept=[False, True, False]),
        row([20, 21], -0.5, temperature=0.7),
    ]

    (pack,) = pack_group(group([1, 2, 3], rows), max_tokens=100)

    assert pack.input_ids == (1, 2, 3, 10, 11, 20)
    assert pack.sources == (3, 2, 5)
    assert pack.targets == (11, 20, 21)
    assert pack.recorded == (-2, -1, -1)
    assert pack.advantages == (0.5, -0.5, -0.5)
    assert pack.temperatures == (1.0, 0.7, 0.7)
    assert pack.answers == (0, 1, 1)
    assert pack.start == (-2, -1, -1)


def test_a_group_that_does_not_fit_is_split_and_each_part_has_the_prompt(
    group: MakeGroup, row: MakeRow
) -> None:
    rows = [row([10, 11, 12]), row([20, 21, 22]), row([30, 31, 32])]
    assert packed_length(2, [3, 3]) == 6

    packs = pack_group(group([1, 2], rows), max_tokens=6)

    assert [pack.targets for pack in packs] == [(10, 11, 12, 20, 21, 22), (30, 31, 32)]
    assert [pack.input_ids[:2] for pack in packs] == [(1, 2), (1, 2)]
    assert max(len(pack.input_ids) for pack in packs) == 6


def test_a_token_sees_the_prompt_and_its_own_past() -> None:
    segments = fold([(1, 2, 3, 4), (1, 2, 5)]).segments

    mask = dense_mask(segments, torch.device("cpu"))

    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


@pytest.fixture
def policy(tiny_base: Path, learner_settings: Learner) -> Iterator[Policy]:
    """The tiny model with a LoRA that changes its answers: B is zero in a fresh one."""
    loaded = load_policy(str(tiny_base), Parent(name="base"), learner_settings)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    yield loaded
    loaded.model.zero_grad()


@pytest.fixture
def mixed_group(group: MakeGroup, row: MakeRow) -> TrainingGroup:
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 48, (length,), generator=generator).tolist()

    lengths, temperatures = (5, 1, 9, 4), (1.0, 0.5, 1.3, 1.0)
    rows = [
        row(ids(length), advantage, temperature=temperature)
        for length, temperature, advantage in zip(
            lengths, temperatures, (0.5, -0.2, 0.1, -0.4), strict=True
        )
    ]
    return group(ids(7), rows)


def test_the_kept_tokens_have_the_values_of_the_whole_answer(
    policy: Policy, mixed_group: TrainingGroup
) -> None:
    kept = (False, True, True, False, True)
    rows = (replace(mixed_group.rows[0], kept=kept), *mixed_group.rows[1:])
    (whole,) = pack_group(mixed_group, max_tokens=100)
    (part,) = pack_group(replace(mixed_group, rows=rows), max_tokens=100)

    with torch.no_grad():
        whole_N, part_N = policy.logprobs(whole)[0], policy.logprobs(part)[0]

    torch.testing.assert_close(part_N, whole_N[[1, 2, 4, *range(5, 19)]], atol=1e-6, rtol=0)
