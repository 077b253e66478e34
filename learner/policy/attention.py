"""Attention over the segments of a pack, without a mask of all its tokens.

A pack is a trie of segments in pre-order (`learner.policy.packing`). Four forms compute it:

`segments`, on a CPU: each segment's own tokens attend to themselves, causally, and all tokens below
    it attend to it without a mask: one call of torch's flash kernel each. The parts of a token's
    attention are joined by their log-sum-exp, and the backward pass calls the kernel's own backward
    for each part with the joined values: nothing is masked, copied or computed for nothing.
`varlen`, on CUDA: each segment's queries attend to the gathered keys above them and to their own,
    causally, aligned at the end, in one call of `torch.nn.attention.varlen.varlen_attn`.
`paths`, on CUDA where `varlen` refuses, which takes half precision and heads of one width alone:
    one call of `scaled_dot_product_attention` for each segment, with the same keys, and causal as
    `causal_lower_right` says it, which torch's kernel without a mask takes in fp32 too.
`dense`: one [T, T] mask that is added to the scores, for every other device and for models whose
    attention is not torch's (`learner.policy.logprobs`).

Layers with a window that is shorter than the pack get, in the forms `segments` and `paths`, blocks
of queries with the keys in their reach and a mask of that size.
Sources: the trick of gathered keys is TRL's (`trl/experimental/async_grpo/packing.py`, Apache-2.0);
joining by log-sum-exp: FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from learner.explain import one_line
from learner.policy.architecture import Architecture, Form
from learner.policy.packing import Segment, ancestors, fold

NAME = "segments"
"""Name of this attention in transformers."""
BLOCK = 256
"""Queries of a layer with a window that share one mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Keys of each segment's path, for `varlen_attn`; int32 but for the index."""

    index_K: Tensor
    """The paths one after the other: indices into T."""
    queries: Tensor
    """[S + 1] boundaries of the segments in T."""
    keys: Tensor
    """[S + 1] boundaries of the paths in K."""
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries [start, stop) of a layer with a window, and the keys in their reach."""

    start: int
    stop: int
    index_K: Tensor
    mask_QK: Tensor
    """Added to the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the layers need to know of a pack. Made once for all of them."""

    segments: tuple[Segment, ...]
    windows: Mapping[str, int | None]
    """By type of layer; None: the layer sees all, or its window is not shorter than the pack."""
    gathered: Gathered | None = None
    paths: tuple[Tensor, ...] = ()
    """In the form `paths`: of each segment, the indices into T of the tokens above it and its own.
    """
    blocks: Mapping[int, tuple[Block, ...]] = field(default_factory=dict)
    """By window."""

    def window_of(self, layer: Any) -> int | None:  # Any: a module of transformers, not typed
        if len(self.windows) == 1:
            return next(iter(self.windows.values()))
        return self.windows[layer.config.layer_types[layer.layer_idx]]


def plan(
    segments: tuple[Segment, ...],
    windows: Mapping[str, int | None],
    form: Form,
    device: torch.device,
    dtype: torch.dtype,
) -> Plan:
    """Prepare a pack. dtype: of the queries."""
    longest = max(one.position + one.length for one in segments)
    short = {kind: w if w is not None and w < longest else None for kind, w in windows.items()}
    if form == "varlen":
        return Plan(segments=segments, windows=short, gathered=_gather(segments, device))
    used = {window for window in short.values() if window is not None}
    blocks = {window: _blocks(segments, window, device, dtype) for window in used}
    paths: tuple[Tensor, ...] = ()
    if form == "paths":
        paths = tuple(
            torch.tensor(_path(segments, number), device=device) for number in range(len(segments))
        )
    return Plan(segments=segments, windows=short, paths=paths, blocks=blocks)


def segment_attention(
    module: Any,  # Any: as above
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    trie: Plan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it. trie: None for the model's own forward pass.

    query: [1, heads, T, width]; key, value: [1, fewer heads, T, width].
    Returns: [1, T, heads, width]
    """
    if trie is None:
        own: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return own
    # torch's kernel is one operation to the compiler. The other forms, and layers that differ in
    # their window, would be compiled again for each pack and layer.
    traced = trie.gathered is not None and len(trie.windows) == 1
    return (_attend if traced else _untraced)(module, query, key, value, scaling, trie)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, trie: Plan
) -> tuple[Tensor, None]:
    query, key, value = _in_one_type(query, key, value)
    window = trie.window_of(module)
    if trie.gathered is not None:
        return varlen(query, key, value, trie.gathered, scaling, window)[None], None
    if trie.paths:
        key, value = (_for_each_query(one, query.shape[1]) for one in (key, value))
    if window is not None:
        out = _windowed(query, key, value, trie.blocks[window], scaling)
    elif trie.paths:
        out = by_paths(query, key, value, trie.segments, trie.paths, scaling)
    else:
        out = by_segments(query, key, value, trie.segments, scaling)
    return out.transpose(1, 2).contiguous(), None


_untraced = torch.compiler.disable(_attend)

AttentionInterface.register(NAME, segment_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def by_segments(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float | None
) -> Tensor:
    """[1, heads, T, width]: the form `segments`, on a CPU."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found: Tensor = _BySegments.apply(query, key, value, tuple(segments), scale)  # type: ignore[no-untyped-call]
    return found


def by_paths(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    paths: Sequence[Tensor],
    scaling: float | None,
) -> Tensor:
    """[1, heads, T, width of a value]: the form `paths`. There are as many heads of keys and values
    as of queries; the kernel without a mask takes no fewer."""
    parts = []
    for one, path_K in zip(segments, paths, strict=True):
        # A segment that nothing is above is its own path, which needs no copy.
        own = slice(one.start, one.stop)
        alone = len(path_K) == one.length
        keys, values = (
            each[:, :, own] if alone else each.index_select(2, path_K) for each in (key, value)
        )
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, own],
                keys,
                values,
                attn_mask=causal_lower_right(one.length, len(path_K)),
                scale=scaling,
            )
        )
    return torch.cat(parts, dim=2)


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gathered: Gathered,
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """[T, heads, width]: the form `varlen`, on CUDA, in half precision."""
    from torch.nn.attention.varlen import varlen_attn

    query_THD, key_THD, value_THD = (one[0].transpose(0, 1) for one in (query, key, value))
    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1] and takes_grouped_heads():
        grouped["enable_gqa"] = True
    elif query.shape[1] != key.shape[1]:  # the kernel takes as many heads of keys as of queries
        times = query.shape[1] // key.shape[1]
        key_THD, value_THD = (one.repeat_interleave(times, 1) for one in (key_THD, value_THD))
    found = varlen_attn(
        query_THD.contiguous(),
        key_THD[gathered.index_K],
        value_THD[gathered.index_K],
        gathered.queries,
        gathered.keys,
        gathered.longest_queries,
        gathered.longest_keys,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return found[0] if isinstance(found, tuple) else found


def takes_grouped_heads() -> bool:
    """Return True when torch's kernel of the form `varlen` takes fewer heads of keys than of
    queries: not yet in torch 2.11, where the keys are repeated."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # an older torch, which has no such form
        return True
    return "enable_gqa" in signature(varlen_attn).parameters


def dense_mask(segments: Sequence[Segment], device: torch.device) -> Tensor:
    """[T, T] bool, row = query, column = key, True = may attend."""
    length = max(one.last for one in segments)
    seen_TT = torch.zeros(length, length, dtype=torch.bool, device=device)
    for one in segments:
        own = slice(one.start, one.stop)
        seen_TT[own, own] = torch.ones(
            one.length, one.length, dtype=torch.bool, device=device
        ).tril()
        seen_TT[one.stop : one.last, own] = True
    return seen_TT


def added_mask(mask_QK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [Q, K] of this type: 0 where a token may attend, minus infinity where it may not."""
    return torch.zeros_like(mask_QK, dtype=dtype).masked_fill(~mask_QK, -torch.inf)


def _for_each_query(heads_of_keys: Tensor, heads: int) -> Tensor:
    times = heads // heads_of_keys.shape[1]
    return heads_of_keys if times == 1 else heads_of_keys.repeat_interleave(times, 1)


def _in_one_type(*tensors: Tensor) -> list[Tensor]:
    """Cast as `scaled_dot_product_attention` does: rotary embeddings make fp32 of bf16."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        return [one.to(torch.get_autocast_dtype(kind)) for one in tensors]
    return [one.to(tensors[-1].dtype) for one in tensors]


class _BySegments(torch.autograd.Function):
    """Joins a token's attention to its own segment and to those above it."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: tuple[Segment, ...],
        scale: float,
    ) -> Tensor:
        length, heads = query.shape[2], query.shape[1]
        out = torch.zeros(query.shape, dtype=torch.float32)
        # In the order in memory that the kernel's backward expects.
        sums = torch.full((1, length, heads), -torch.inf).transpose(1, 2)
        for rows, keys, causal in _calls(segments):
            part, part_sums = _flash(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, causal, scale=scale
            )
            before = sums[:, :, rows]
            joined = torch.logaddexp(before, part_sums)
            kept, added = (before - joined).exp_(), (part_sums - joined).exp_()
            out[:, :, rows] *= kept[..., None]
            out[:, :, rows].addcmul_(part.float(), added[..., None])
            sums[:, :, rows] = joined
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        of_out = gradients[0].contiguous()
        found = [torch.zeros(one.shape, dtype=torch.float32) for one in (query, key, value)]
        for rows, keys, causal in _calls(ctx.segments):
            parts = _flash_backward(
                of_out[:, :, rows],
                query[:, :, rows],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, rows],
                sums[:, :, rows],
                0.0,
                causal,
                scale=ctx.scale,
            )
            for total, part, place in zip(found, parts, (rows, keys, keys), strict=True):
                total[:, :, place] += part
        return (*(one.to(query.dtype) for one in found), None, None)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _calls(segments: Sequence[Segment]) -> list[tuple[slice, slice, bool]]:
    """Return (queries, keys, whether causal) of each call of the kernel."""
    found = []
    for one in segments:
        own = slice(one.start, one.stop)
        found.append((own, own, True))
        if one.last > one.stop:
            found.append((slice(one.stop, one.last), own, False))
    return found


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scaling: float | None
) -> Tensor:
    parts = [
        functional.scaled_dot_product_attention(
            query[:, :, one.start : one.stop],
            key.index_select(2, one.index_K),
            value.index_select(2, one.index_K),
            attn_mask=one.mask_QK,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for one in blocks
    ]
    return torch.cat(parts, dim=2)


def _path(segments: Sequence[Segment], number: int) -> list[int]:
    """Return the indices into T of a segment's path: the tokens above it, and its own."""
    one = segments[number]
    return [
        place
        for part in (*ancestors(segments, number), one)
        for place in range(part.start, part.stop)
    ]


def _blocks(
    segments: Sequence[Segment], window: int, device: torch.device, dtype: torch.dtype
) -> tuple[Block, ...]:
    masks: dict[tuple[int, int], Tensor] = {}
    found: list[Block] = []
    for number, one in enumerate(segments):
        path = _path(segments, number)
        for start in range(one.start, one.stop, BLOCK):
            stop = min(start + BLOCK, one.stop)
            first = one.position + start - one.start
            reach = path[max(0, first - window + 1) : first + stop - start]
            size = (stop - start, len(reach))
            if size not in masks:
                # The last query stands at the last key.
                behind_QK = (
                    torch.arange(size[0], device=device)[:, None]
                    + (size[1] - size[0])
                    - torch.arange(size[1], device=device)[None, :]
                )
                masks[size] = added_mask((behind_QK >= 0) & (behind_QK < window), dtype)
            index_K = torch.tensor(reach, device=device)
            found.append(Block(start=start, stop=stop, index_K=index_K, mask_QK=masks[size]))
    return tuple(found)


def _gather(segments: Sequence[Segment], device: torch.device) -> Gathered:
    paths = [_path(segments, number) for number in range(len(segments))]
    keys = [0]
    for path in paths:
        keys.append(keys[-1] + len(path))
    return Gathered(
        index_K=torch.tensor([place for path in paths for place in path], device=device),
        queries=torch.tensor(
            [0, *(one.stop for one in segments)], dtype=torch.int32, device=device
        ),
        keys=torch.tensor(keys, dtype=torch.int32, device=device),
        longest_queries=max(one.length for one in segments),
        longest_keys=max(map(len, paths)),
    )


# Choose how attention over packs is computed on a device: the fastest form that is right there.

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
