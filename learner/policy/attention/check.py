"""Choose how attention over packs is computed on a device: the fastest form that is right there.

A form is right when its values and gradients on a drawn trie are those of torch's
`scaled_dot_product_attention` with a dense mask. Kernels differ by device and version in how they
align queries with more keys; a wrong alignment differs by far more than rounding.
"""

from __future__ import annotations

from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from learner.explain import one_line
from learner.policy.architecture import Architecture, Form
from learner.policy.attention.segments import NAME, dense_mask, plan, segment_attention
from learner.policy.attention.trie import Segment, fold

log = structlog.get_logger()

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
"""Largest difference that rounding explains, of values and gradients of draws with variance 1.
Measured on an H100 in bf16: 0.047 (`varlen`) and 0.031 (`paths`)."""
HEADS, KEY_HEADS = 4, 2
LENGTHS = (19, 7, 1, 5, 33)
"""Tokens of a prompt, of two turns, and of two answers behind them."""
WINDOW = 6
FORMS: dict[str, tuple[Form, ...]] = {"cpu": ("segments",), "cuda": ("varlen", "paths")}
"""By type of device, the fastest first. Others take the dense form, for which nothing has to be
checked."""


def use_form(
    base: Any, shape: Architecture, device: torch.device, dtype: torch.dtype
) -> Form:  # Any: a transformers causal LM, not typed
    """Choose the form for a loaded model, and set its attention. dtype: of its products."""
    if not shape.packs:
        return "dense"  # it gets no pack
    config = base.config.get_text_config()
    own = str(getattr(config, "_attn_implementation", ""))
    if own == "sdpa":
        width = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        form, why = choose_form(device, dtype, int(width))
    else:
        form, why = "dense", f"the model's attention is its own ({own})"
    if form != "dense":
        base.set_attn_implementation(NAME)
    log.info("attention_chosen", form=form, why=why)
    return form


def choose_form(device: torch.device, dtype: torch.dtype, width: int) -> tuple[Form, str]:
    """Return the form, and why it is not a faster one; empty where it is the fastest.

    dtype: of queries and keys. width: of a head.
    """
    forms = FORMS.get(device.type, ())
    if not forms:
        return "dense", f"there is no other form for {device.type}"
    refused: list[str] = []
    for form in forms:
        if not (why := _fault(form, device, dtype, width)):
            return form, "; ".join(refused)
        refused.append(why)
    return "dense", "; ".join(refused)


def _fault(form: Form, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Return what is wrong with a form on this device; empty when it is right."""
    limit = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    for window in (None, WINDOW):
        try:
            found = difference(form, device, dtype, width, window)
        except (RuntimeError, TypeError, ImportError, AttributeError, ValueError) as error:
            return f"{form} cannot be computed here: {one_line(error)}"
        if not found <= limit:
            return f"{form} differs by {found:.2g} from torch's own attention"
    return ""


def difference(
    form: Form,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    window: int | None,
    times: int = 1,
) -> float:
    """Return the largest |difference| of values and gradients to the dense form's.

    times: how much longer than `LENGTHS` the segments are.
    """
    segments = drawn_segments(times)
    draw = torch.Generator().manual_seed(3)

    def tensor(heads: int) -> Tensor:
        made = torch.randn(1, heads, segments[0].last, width, generator=draw)
        return made.to(device, dtype).requires_grad_()

    query, key, value = tensor(HEADS), tensor(KEY_HEADS), tensor(KEY_HEADS)
    weights = tensor(HEADS).detach().transpose(1, 2)
    how = plan(segments, {"": window}, form, device, dtype)
    found, _ = segment_attention(None, query, key, value, None, trie=how)
    expected = dense(query.float(), key.float(), value.float(), segments, window)
    pairs = [(found.float(), expected)]
    ours = torch.autograd.grad(found, (query, key, value), weights)
    theirs = torch.autograd.grad(expected, (query, key, value), weights.float())
    pairs += [(one.float(), other.float()) for one, other in zip(ours, theirs, strict=True)]
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def dense(
    query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], window: int | None
) -> Tensor:
    """[1, T, heads, width]: by torch's own attention, with a mask of all tokens."""
    seen_TT = dense_mask(segments, query.device)
    if window is not None:
        positions_T = torch.tensor(
            [one.position + place for one in segments for place in range(one.length)],
            device=query.device,
        )
        seen_TT &= positions_T[:, None] - positions_T[None, :] < window
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen_TT, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def drawn_segments(times: int = 1) -> tuple[Segment, ...]:
    """Return a trie with two levels of branches, `times` as long as `LENGTHS`."""
    prompt, first, second, short, long = (
        tuple(range(100 * times * number, times * (100 * number + length)))
        for number, length in enumerate(LENGTHS)
    )
    rows = (prompt + first + short, prompt + first + long, prompt + second, prompt + long)
    return fold(rows).segments
