"""Packing: the index arithmetic by hand, and exactness against one row per answer."""

from __future__ import annotations

import torch

from learner.policy.attention import dense_mask
from learner.policy.packing import Pack, Segment, fold, pack_group, packed_length
from tests.learner.conftest import make_group, make_row


def test_the_answers_lie_behind_one_prompt() -> None:
    rows = [
        make_row([10, 11, 12], 0.5, logprobs=[-1, -2, -3]),
        make_row([20, 21, 22, 23], -0.5, temperature=0.7),
    ]

    (pack,) = pack_group(make_group([1, 2, 3], rows, adapter="a"), max_tokens=100)

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


def test_an_answer_of_one_token_needs_no_input_of_its_own() -> None:
    (pack,) = pack_group(make_group([1, 2], [make_row([10]), make_row([20])]), max_tokens=100)

    assert pack.input_ids == (1, 2)
    assert pack.sources == (1, 1)
    assert pack.targets == (10, 20)


def test_masked_answers_are_not_packed() -> None:
    rows = [make_row([10, 11]), make_row([20, 21], trainable=False), make_row([30, 31])]

    (pack,) = pack_group(make_group([1], rows), max_tokens=100)

    assert pack.targets == (10, 11, 30, 31)


def test_a_token_that_is_not_kept_is_read_and_is_no_target() -> None:
    rows = [
        make_row([10, 11, 12], 0.5, logprobs=[-1, -2, -3], kept=[False, True, False]),
        make_row([20, 21], -0.5, temperature=0.7),
    ]

    (pack,) = pack_group(make_group([1, 2, 3], rows), max_tokens=100)

    assert pack.input_ids == (1, 2, 3, 10, 11, 20)
    assert pack.sources == (3, 2, 5)
    assert pack.targets == (11, 20, 21)
    assert pack.recorded == (-2, -1, -1)
    assert pack.advantages == (0.5, -0.5, -0.5)
    assert pack.temperatures == (1.0, 0.7, 0.7)
    assert pack.answers == (0, 1, 1)
    assert pack.start == (-2, -1, -1)


def test_a_group_that_does_not_fit_is_split_and_each_part_has_the_prompt() -> None:
    rows = [make_row([10, 11, 12]), make_row([20, 21, 22]), make_row([30, 31, 32])]
    assert packed_length(2, [3, 3]) == 6

    packs = pack_group(make_group([1, 2], rows), max_tokens=6)

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
