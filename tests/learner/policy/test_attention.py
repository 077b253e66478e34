"""Each form of attention over segments has the values and gradients of torch's with a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

from learner.policy import attention
from learner.policy import attention as attention_check
from learner.policy.architecture import Form
from learner.policy.attention import (
    by_segments,
    choose_form,
    dense,
    difference,
    drawn_segments,
    plan,
    segment_attention,
    takes_grouped_heads,
    varlen,
)
from learner.policy.packing import fold

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=7
    ),
    window=st.sampled_from([None, 1, 3, 8]),
    form=st.sampled_from(["segments", "paths"]),
    block=st.sampled_from([1, 2, 256]),
)
def test_segments_and_paths_of_drawn_tries_equal_a_dense_mask(
    rows: list[tuple[int, ...]], window: int | None, form: Form, block: int
) -> None:
    segments = fold(rows).segments
    length = max(one.last for one in segments)
    draw = torch.Generator().manual_seed(len(rows))
    query, key, value = (
        torch.randn(1, heads, length, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)
    )
    weights = torch.randn(1, length, 4, 8, generator=draw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", block)
        how = plan(segments, {"": window}, form, CPU, torch.float32)
        found, _ = segment_attention(None, query, key, value, None, trie=how)

    expected = dense(query, key, value, segments, window)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    ours = torch.autograd.grad(found, (query, key, value), weights)
    theirs = torch.autograd.grad(expected, (query, key, value), weights)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=5e-6, rtol=1e-5)


def test_a_scale_is_the_models_own() -> None:
    segments = drawn_segments()
    query, key, value = (torch.randn(1, 2, segments[0].last, 8) for _ in range(3))

    found = by_segments(query, key, value, segments, 0.5)

    # a width of 8 divides by its root unless a scale is given
    expected = dense(query * 0.5 * 8**0.5, key, value, segments, None).transpose(1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_paths_take_values_of_another_width_and_a_scale() -> None:
    """As the heads of DeepSeek V3; torch's flash kernel on a CPU takes one width alone."""
    segments, length = drawn_segments(), drawn_segments()[0].last
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


def test_paths_give_torch_no_mask_and_as_many_heads_of_keys_as_of_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that its kernel without a mask may take the call: it takes no fewer heads."""
    asked: list[tuple[Any, int, int]] = []

    def sdpa(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Any, **others: Any) -> Tensor:
        asked.append((type(attn_mask), key.shape[1], value.shape[1]))
        return query

    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
    segments = drawn_segments()
    query, key, value = (torch.randn(1, heads, segments[0].last, 8) for heads in (4, 2, 2))
    how = plan(segments, {"": None}, "paths", CPU, torch.float32)

    segment_attention(None, query, key, value, None, trie=how)

    assert asked == [(CausalBias, 4, 4)] * len(segments) != []


def test_a_card_takes_paths_where_its_fastest_form_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here `varlen_attn` refuses a CPU, as it refuses fp32 on a card."""
    monkeypatch.setattr(attention_check, "FORMS", {"cpu": attention_check.FORMS["cuda"]})

    form, why = choose_form(CPU, torch.float32, 16)

    assert form == "paths"
    assert why.startswith("varlen cannot be computed here: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_takes_segments(dtype: torch.dtype) -> None:
    assert choose_form(CPU, dtype, 64) == ("segments", "")


def reference_varlen(*, bottom_right: bool) -> Any:
    """What `varlen_attn` does on CUDA, row by row; its alignment is what has to be checked."""

    def varlen_attn(
        query_THD: Tensor,
        key_KHD: Tensor,
        value_KHD: Tensor,
        queries: Tensor,
        keys: Tensor,
        longest_queries: int,
        longest_keys: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool = False,
    ) -> Tensor:
        assert (queries.dtype, keys.dtype) == (torch.int32, torch.int32), (
            "the kernel takes no other"
        )
        parts = []
        for number in range(len(queries) - 1):
            q = query_THD[queries[number] : queries[number + 1]].transpose(0, 1)
            k = key_KHD[keys[number] : keys[number + 1]].transpose(0, 1)
            v = value_KHD[keys[number] : keys[number + 1]].transpose(0, 1)
            assert q.shape[1] <= longest_queries
            assert k.shape[1] <= longest_keys
            shift = k.shape[1] - q.shape[1] if bottom_right else 0
            behind = torch.arange(q.shape[1])[:, None] + shift - torch.arange(k.shape[1])[None, :]
            left, right = window_size
            seen = behind >= -right
            if left >= 0:
                seen &= behind <= left
            out = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    return varlen_attn


@pytest.mark.parametrize("window", [None, attention_check.WINDOW])
def test_gathered_keys_equal_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", reference_varlen(bottom_right=True)
    )

    assert difference("varlen", CPU, torch.float32, 16, window) < 1e-5


@pytest.mark.parametrize(
    ("kernel", "why"),
    [
        (reference_varlen(bottom_right=True), ""),
        (reference_varlen(bottom_right=False), "varlen differs by"),
        (lambda query: query, "varlen cannot be computed here"),
    ],
)
def test_a_kernel_that_aligns_otherwise_or_fails_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, why: str
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    forms: dict[str, tuple[Form, ...]] = {"cpu": ("varlen",)}
    monkeypatch.setattr(attention_check, "FORMS", forms)

    form, said = choose_form(CPU, torch.float32, 16)

    assert form == ("dense" if why else "varlen")
    assert said.startswith(why)
    assert bool(said) is bool(why)


def test_a_kernel_that_does_not_group_heads_gets_each_key_as_often_as_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.11."""
    grouping = reference_varlen(bottom_right=True)

    def varlen_attn(
        query_THD: Tensor,
        key_KHD: Tensor,
        value_KHD: Tensor,
        *lengths: Any,
        scale: float | None,
        window_size: tuple[int, int],
    ) -> Any:
        assert query_THD.shape[1] == key_KHD.shape[1]
        return grouping(
            query_THD, key_KHD, value_KHD, *lengths, scale=scale, window_size=window_size
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)

    assert difference("varlen", CPU, torch.float32, 16, None) < 1e-5


@pytest.mark.parametrize("window", [None, attention_check.WINDOW])
@pytest.mark.parametrize("grouped", [True, False])
def test_torchs_own_kernel_takes_the_call_and_gives_gradients_of_its_shapes(
    monkeypatch: pytest.MonkeyPatch, window: int | None, grouped: bool
) -> None:
    """On the meta device: what torch checks of a call, without a card to compute it."""
    monkeypatch.setattr(attention, "takes_grouped_heads", lambda: grouped and takes_grouped_heads())
    segments, meta = drawn_segments(), torch.device("meta")
    query, key, value = (
        torch.empty(
            1, heads, segments[0].last, 64, dtype=torch.bfloat16, device=meta, requires_grad=True
        )
        for heads in (4, 2, 2)
    )
    gathered = plan(segments, {"": window}, "varlen", meta, torch.bfloat16).gathered
    assert gathered is not None

    found = varlen(query, key, value, gathered, None, window)
    gradients = torch.autograd.grad(found, (query, key, value), torch.empty_like(found))

    assert (found.shape, found.dtype) == ((segments[0].last, 4, 64), torch.bfloat16)
    assert [one.shape for one in gradients] == [one.shape for one in (query, key, value)]


def test_other_devices_take_the_dense_form() -> None:
    assert choose_form(torch.device("meta"), torch.float32, 16)[0] == "dense"
