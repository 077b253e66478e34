"""Each form of attention over segments has the values and gradients of torch's with a mask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from structlog.testing import capture_logs
from torch import Tensor, nn

from learner.policy import attention, attention as attention_check
from learner.policy.architecture import Form
from learner.policy.attention import (
    by_calls,
    choose_form,
    dense,
    drawn_segments,
    plan,
    segment_attention,
)
from learner.policy.packing import fold

CPU = torch.device("cpu")


@settings(max_examples=80)
@given(
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=7
    ),
    window=st.sampled_from([None, 1, 3, 8]),
    form=st.sampled_from(["segments", "paths", "varlen"]),
    block=st.sampled_from([1, 2, 256]),
)
def test_each_form_of_drawn_tries_equals_a_dense_mask(
    rows: list[tuple[int, ...]], window: int | None, form: Form, block: int
) -> None:
    segments = fold(rows).segments
    length = max(one.last for one in segments)
    draw = torch.Generator().manual_seed(len(rows))
    on_card = form == "varlen"
    dtype = torch.float64 if on_card else torch.float32
    query, key, value = (
        torch.randn(1, heads, length, 8, generator=draw, dtype=dtype).requires_grad_()
        for heads in (4, 2, 2)
    )
    weights = torch.randn(1, length, 4, 8, generator=draw, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch, card() if on_card else nullcontext():
        patch.setattr(attention, "BLOCK", block)
        how = plan(segments, {"": window}, form, CPU, dtype)
        found, _ = segment_attention(None, query, key, value, None, trie=how)
        ours = torch.autograd.grad(found, (query, key, value), weights)

    expected = dense(query, key, value, segments, window)
    theirs = torch.autograd.grad(expected, (query, key, value), weights)
    near = 1e-12 if on_card else 5e-6
    for one, other in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(one, other, atol=near, rtol=1e-12 if on_card else 1e-5)


def test_a_scale_is_the_models_own() -> None:
    segments = drawn_segments()
    query, key, value = (torch.randn(1, 2, segments[-1].stop, 8) for _ in range(3))

    calls = plan(segments, {"": None}, "segments", CPU, torch.float32).calls[None]
    found = by_calls(query, key, value, calls, 0.5)

    # a width of 8 divides by its root unless a scale is given
    expected = dense(query * 0.5 * 8**0.5, key, value, segments, None)
    torch.testing.assert_close(found[None], expected, atol=1e-5, rtol=1e-5)


def test_paths_take_values_of_another_width_and_a_scale() -> None:
    """As the heads of DeepSeek V3; torch's flash kernel on a CPU takes one width alone."""
    segments, length = drawn_segments(), drawn_segments()[-1].stop
    draw = torch.Generator().manual_seed(4)
    query, key, value = (
        torch.randn(1, heads, length, width, generator=draw).requires_grad_()
        for heads, width in ((4, 12), (2, 12), (2, 8))
    )
    how = plan(segments, {"": None}, "paths", CPU, torch.float32)

    found, _ = segment_attention(None, query, key, value, None, trie=how, scaling=0.5)

    expected = dense(query * 0.5 * 12**0.5, key, value, segments, None)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(found.shape, generator=draw)
    ours = torch.autograd.grad(found, (query, key, value), weights)
    theirs = torch.autograd.grad(expected, (query, key, value), weights)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_card_takes_paths_where_its_fastest_form_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel of cards refuses a CPU, as it refuses fp32 on a card."""
    monkeypatch.setitem(attention_check.FORMS, "cpu", attention_check.FORMS["cuda"])
    monkeypatch.setitem(attention_check.KERNELS, "cpu", attention_check.KERNELS["cuda"])

    form, why = choose_form(CPU, torch.float32, 16)

    assert form == "paths"
    assert why.startswith("varlen cannot be computed here: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_takes_segments(dtype: torch.dtype) -> None:
    assert choose_form(CPU, dtype, 64) == ("segments", "")


@contextmanager
def card(*, bottom_right: bool = True, empty: float = math.inf) -> Iterator[None]:
    """Compute what a card would, by torch's own two operations, which get plain steps on a CPU.

    bottom_right: how queries and keys of different numbers are aligned; empty: the log-sum-exp of
    no key, which differs by version. What no sequence covers is NaN, as it is not written.
    """

    def scores(query: Tensor, key: Tensor, scale: float, causal: bool, sides: Any) -> Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        found_HQK = torch.einsum("qhd,khd->hqk", query, key) * scale
        shift = key.shape[0] - query.shape[0] if bottom_right else 0
        behind = torch.arange(query.shape[0])[:, None] + shift - torch.arange(key.shape[0])
        left, right = sides
        seen = (behind >= -right) | (right < 0) if not causal else behind >= 0
        seen &= (behind <= left) | (left < 0)
        return found_HQK.masked_fill(~seen, -math.inf)

    def sequences(*given: Any) -> Iterator[tuple[slice, slice]]:
        tensors, (queries, keys, most_queries, most_keys) = given[:2], given[2:]
        for ends, total, most in zip(
            (queries, keys), map(len, tensors), (most_queries, most_keys), strict=True
        ):
            assert (ends.dtype, int(ends[0]), int(ends[-1])) == (torch.int32, 0, total)
            assert max(b - a for a, b in pairwise(ends.tolist())) == most
        both = (pairwise(ends.tolist()) for ends in (queries, keys))
        return ((slice(*rows), slice(*seen)) for rows, seen in zip(*both, strict=True))

    def forward(
        query: Tensor, key: Tensor, value: Tensor, *given: Any, scale: float, **sides: int
    ) -> tuple[Tensor, ...]:
        *ends, dropout, causal, debug = given
        assert (dropout, debug) == (0.0, False)
        out, sums_HQ = torch.full_like(query, math.nan), query.new_full(query.shape[1::-1], empty)
        for rows, seen in sequences(query, key, *ends):
            weights = scores(query[rows], key[seen], scale, causal, sides.values())
            if rows.stop > rows.start and seen.stop > seen.start:
                sums_HQ[:, rows] = weights.logsumexp(-1)
            values = value[seen].repeat_interleave(query.shape[1] // key.shape[1], 1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights.softmax(-1).nan_to_num(), values)
        unread = torch.empty(0)
        return out, sums_HQ, unread, unread, unread

    def backward(*given: Any, scale: float, **sides: int) -> tuple[Tensor, ...]:
        of_out, query, key, value, out, sums_HQ, *ends, _, causal, _, _ = given
        assert sums_HQ.is_contiguous()
        times = query.shape[1] // key.shape[1]
        found = [torch.full_like(one, math.nan) for one in (query, key, value)]
        for rows, seen in sequences(query, key, *ends):
            keys, values = (one[seen].repeat_interleave(times, 1) for one in (key, value))
            weights = scores(query[rows], key[seen], scale, causal, sides.values())
            weights = (weights - sums_HQ[:, rows, None]).exp()
            of_weights = torch.einsum("qhd,khd->hqk", of_out[rows], values)
            of_weights -= (of_out[rows] * out[rows]).sum(-1).t()[..., None]
            of_scores = weights * of_weights * scale
            found[0][rows] = torch.einsum("hqk,khd->qhd", of_scores, keys)
            for total, by, what in ((1, of_scores, query), (2, weights, of_out)):
                of_each = torch.einsum("hqk,qhd->khd", by, what[rows])
                found[total][seen] = of_each.unflatten(1, (-1, times)).sum(2)
        return tuple(found)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", forward)
    library.impl("_flash_attention_backward", backward)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.KERNELS, "cpu", attention.KERNELS["cuda"])
        yield
    library._destroy()


def rows_of_sessions() -> list[tuple[int, ...]]:
    """Two prompts of which several answers, turns and answers to these continue, at odd lengths."""
    found: list[tuple[int, ...]] = [(9,) * 3]
    for prompt in ((1, *range(6)), (2, *range(10))):
        first, second = (*prompt, 20, 21, 22), (*prompt, 30, 31, 32, 33, 34)
        third = (*second, 40)
        found += [(*first, 50), (*first, *range(60, 69)), (*second, *range(70, 75)), (*prompt, 99)]
        found += [(*third, 80), (*third, *range(81, 94)), (*third, *range(94, 97))]
    return found


@pytest.mark.parametrize(
    ("kernels", "dtype", "limit"),
    [
        (lambda: card(empty=math.inf), torch.float64, 1e-12),
        (lambda: card(empty=-math.inf), torch.float64, 1e-12),
        (nullcontext, torch.float32, 1e-6),
    ],
    ids=["FlashAttention 2", "FlashAttention 3", "CPU"],
)
def test_trees_of_turns_are_joined_as_a_mask_in_fp64_does(
    kernels: Callable[[], AbstractContextManager[None]], dtype: torch.dtype, limit: float
) -> None:
    segments = fold(rows_of_sessions()).segments
    below = [one for one in segments if one.last > one.stop]
    assert len(below) == 8, "in three levels, of which two have several"
    draw = torch.Generator().manual_seed(5)
    query, key, value, weights = (
        torch.randn(
            1, heads, segments[-1].stop, 8, generator=draw, dtype=torch.float64, requires_grad=True
        )
        for heads in (4, 2, 2, 4)
    )
    calls = plan(segments, {"": None}, "varlen", CPU, torch.float64).calls[None]
    assert calls[0].numel() == 4 * 9, "a causal call and one for each level"

    with kernels():
        found = by_calls(query.to(dtype), key.to(dtype), value.to(dtype), calls, None)[None]
        loss = (found * weights.transpose(1, 2)).sum()
        ours = torch.autograd.grad(loss, (query, key, value))

    expected = dense(query, key, value, segments, None)
    same = (expected * weights.transpose(1, 2)).sum()
    theirs = torch.autograd.grad(same, (query, key, value))
    for one, other in zip((loss, found, *ours), (same, expected, *theirs), strict=True):
        assert (one - other).norm() <= limit * other.norm()


def test_a_window_copies_the_keys_in_reach_alone() -> None:
    """Of a prompt of 7, and of two answers of 4 and 9 behind it with 2 keys before them."""
    segments = fold([(*range(7), *range(10, 14)), (*range(7), *range(20, 29))]).segments

    table, bounds = plan(segments, {"": 3}, "varlen", CPU, torch.float32).calls[3]

    first, last, start, stop, *_, window = table.tolist()
    assert (first, last, window) == (0, 20, 3)
    assert bounds[start:stop].tolist() == [*range(7), 5, 6, *range(7, 11), 5, 6, *range(11, 20)]


@pytest.mark.parametrize(
    ("bottom_right", "why"), [(True, ""), (False, "varlen differs by"), (None, "varlen cannot be")]
)
def test_a_kernel_that_aligns_otherwise_or_fails_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, bottom_right: bool | None, why: str
) -> None:
    monkeypatch.setitem(attention_check.FORMS, "cpu", ("varlen",))
    monkeypatch.setitem(attention.KERNELS, "cpu", attention.KERNELS["cuda"])

    if bottom_right is None:
        form, said = choose_form(CPU, torch.float32, 16)
    else:
        with card(bottom_right=bottom_right):
            form, said = choose_form(CPU, torch.float32, 16)

    assert form == ("dense" if why else "varlen")
    assert said.startswith(why)
    assert bool(said) is bool(why)


@pytest.mark.parametrize("window", [None, attention_check.WINDOW])
def test_torchs_own_kernels_take_the_calls_and_give_gradients_of_their_shapes(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """On the meta device: what torch checks of a call, without a card to compute it."""
    segments, meta = drawn_segments(), torch.device("meta")
    monkeypatch.setitem(attention.KERNELS, "meta", attention.KERNELS["cuda"])
    length = segments[-1].stop
    query, key, value = (
        torch.empty(length, heads, 64, dtype=torch.bfloat16, device=meta) for heads in (4, 2, 2)
    )
    calls = plan(segments, {"": window}, "varlen", meta, torch.bfloat16).calls[window]

    found, sums = attention._forward(query, key, value, *calls, 0.1)
    gradients = attention._backward(found, query, key, value, found, sums, *calls, 0.1)

    assert (found.shape, found.dtype, sums.shape) == (query.shape, torch.bfloat16, (4, length))
    assert [one.shape for one in gradients] == [one.shape for one in (query, key, value)]


def _fails(name: str) -> None:
    raise ImportError(f"{name} is not installed")


@pytest.mark.parametrize(
    ("activate", "right", "events"),
    [
        (lambda name: None, True, [("flash_attention_chosen", "FA3")]),
        (_fails, True, [("flash_attention_not_taken", name) for name in ("FA3", "FA4")]),
        (None, True, [("flash_attention_not_taken", name) for name in ("FA3", "FA4")]),
        (
            lambda name: _fails(name) if name == "FA3" else None,
            False,
            [("flash_attention_not_taken", name) for name in ("FA3", "FA4")],
        ),
    ],
)
def test_a_faster_kernel_is_taken_where_it_is_installed_and_right(
    monkeypatch: pytest.MonkeyPatch,
    activate: Callable[[str], None] | None,
    right: bool,
    events: list[tuple[str, str]],
) -> None:
    restored: list[bool] = []
    monkeypatch.delattr(nn.attention, "activate_flash_attention_impl", raising=False)
    if activate is not None:
        monkeypatch.setattr(nn.attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(
        nn.attention, "restore_flash_attention_impl", lambda: restored.append(True), raising=False
    )

    with card(bottom_right=right), capture_logs() as logs:
        attention._take_faster_kernels(CPU, torch.float32, 16)

    assert [(one["event"], one["name"]) for one in logs] == events
    assert len(restored) == (0 if right else 1)


def test_other_devices_take_the_dense_form() -> None:
    assert choose_form(torch.device("meta"), torch.float32, 16)[0] == "dense"
