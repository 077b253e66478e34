"""The head in pieces: the values and gradients of the plain form, and never all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from learner.policy import logprobs as heads
from learner.policy.costs import CHUNK_BYTES
from learner.policy.logprobs import Head, chunks, target_logprobs

N, H, V = 37, 16, 101


def plain(head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Any, Any]:
    logits = hidden.float() @ head.weight_VH.t()
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies


def drawn(*, softcap: float | None, scale: float, bias: bool) -> tuple[Any, ...]:
    torch.manual_seed(3)
    head = Head(
        weight_VH=torch.randn(V, H), bias_V=torch.randn(V) if bias else None,
        scale=scale, softcap=softcap,
    )  # fmt: skip
    hidden = torch.randn(N, H, requires_grad=True)
    return head, hidden, torch.randint(V, (N,)), 0.5 + torch.rand(N)


@pytest.mark.parametrize("rows_at_once", [1, 5, 37, 1_000])
@pytest.mark.parametrize(
    ("softcap", "scale", "bias"), [(None, 1.0, False), (None, 0.125, True), (3.0, 0.5, True)]
)
def test_values_entropies_and_gradients_are_those_of_the_plain_form(
    monkeypatch: pytest.MonkeyPatch,
    rows_at_once: int,
    softcap: float | None,
    scale: float,
    bias: bool,
) -> None:
    monkeypatch.setattr(heads, "CHUNK_BYTES", 4 * V * rows_at_once)
    head, hidden, targets, temperatures = drawn(softcap=softcap, scale=scale, bias=bias)
    weights = torch.linspace(-1, 2, N)

    logprobs, entropies = target_logprobs(head, hidden, targets, temperatures)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), hidden)

    expected, expected_entropies = plain(head, hidden, targets, temperatures)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
    assert not entropies.requires_grad


@pytest.mark.parametrize("of_hidden", [torch.bfloat16, torch.float32])
def test_a_head_of_bf16_weights_is_computed_in_fp32(of_hidden: torch.dtype) -> None:
    """Against float64. Logits of bf16 that are cast to fp32 are wrong by a hundred times more."""
    drawn_head, hidden, targets, temperatures = drawn(softcap=None, scale=1.0, bias=True)
    weight, bias = drawn_head.weight_VH.bfloat16(), drawn_head.bias_V.bfloat16()
    head = Head(weight_VH=weight, bias_V=bias)
    hidden = hidden.detach().to(of_hidden).requires_grad_()
    weights = torch.linspace(-1, 2, N)

    logprobs, entropies = target_logprobs(head, hidden, targets, temperatures)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), hidden)

    exact = hidden.detach().double().requires_grad_()
    logits = exact @ weight.double().t() + bias.double()
    told = torch.log_softmax(logits / temperatures.double()[:, None], dim=-1)
    expected = told.gather(-1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad((expected * weights.double()).sum(), exact)
    assert (logprobs.dtype, entropies.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)
    expected_entropies = -(told.exp() * told).sum(-1)
    torch.testing.assert_close(entropies.double(), expected_entropies, atol=1e-4, rtol=0)
    # a gradient has the type of the hidden states: it is rounded to it once
    rounded = 2**-8 if of_hidden == torch.bfloat16 else 0.0
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-4, rtol=rounded)


def _mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """As on CUDA: a product of bf16 numbers, summed up in fp32."""
    assert left.dtype == right.dtype == torch.bfloat16
    return (left.float() @ right.float()).to(out_dtype)


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (None, 0.125), (3.0, 0.5)])
def test_on_cuda_products_of_bf16_are_summed_up_in_fp32(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, scale: float
) -> None:
    """The branch of CUDA with stand-ins on a CPU: the gradient of the logits is rounded to bf16."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch, "mm", _mm)
    drawn_head, hidden, targets, temperatures = drawn(softcap=softcap, scale=scale, bias=True)
    weight = drawn_head.weight_VH.bfloat16()
    head = Head(weight_VH=weight, bias_V=drawn_head.bias_V, scale=scale, softcap=softcap)
    hidden = hidden.detach().bfloat16().float().requires_grad_()
    weights = torch.linspace(-1, 2, N)

    logprobs, _ = target_logprobs(head, hidden, targets, temperatures)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), hidden)

    same = Head(weight.float(), head.bias_V, scale, softcap)
    expected, _ = plain(same, hidden, targets, temperatures)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), hidden)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-6)
    away = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert 0 < float(away) < 2**-8


def test_targets_are_covered_once_in_pieces_of_bounded_size() -> None:
    parts = chunks(4_000, 152_000)

    assert [at for part in parts for at in range(4_000)[part]] == list(range(4_000))
    assert max(len(range(4_000)[part]) for part in parts) * 152_000 * 4 <= CHUNK_BYTES
    assert chunks(3, 10**9) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert chunks(0, 10) == []
