"""Attention over the segments of a pack, without a mask of all its tokens.

A pack is a trie of segments in pre-order (`learner.policy.packing`). Four forms compute it:

`segments`, on a CPU, and `varlen`, on CUDA: each segment's own tokens attend to themselves,
    causally, in one call of a flash kernel, and for each level of the trie all tokens below its
    segments attend to these without a mask, in one call. The parts of a token's attention are
    joined by their log-sum-exp, and the backward pass calls the kernel's own backward for each part
    with the joined values: nothing is masked, copied or computed for nothing.
`paths`, on CUDA where `varlen` refuses, which takes half precision and heads of one width alone:
    one call of `scaled_dot_product_attention` for each segment with the gathered keys above it and
    its own, and causal as `causal_lower_right` says it, which torch's kernel without a mask takes
    in fp32 too.
`dense`: one [T, T] mask that is added to the scores, for every other device and for models whose
    attention is not torch's (`learner.policy.logprobs`).

Layers with a window that is shorter than the pack get, in the form `varlen`, one call with the
gathered keys in each segment's reach, and in the forms `segments` and `paths` blocks of queries
with the keys in their reach and a mask of that size.
Sources: the trick of gathered keys is TRL's (`trl/experimental/async_grpo/packing.py`, Apache-2.0);
joining by log-sum-exp: FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import structlog
import torch
from torch import Tensor, nn
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
    calls: Mapping[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By window, as `_calls` makes them; in the form `segments` for layers without one alone."""
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
    used = set(short.values())
    if form == "varlen":
        calls = {window: _calls(segments, device, window) for window in used}
        return Plan(segments=segments, windows=short, calls=calls)
    calls = {None: _calls(segments, device)} if form == "segments" and None in used else {}
    blocks = {window: _blocks(segments, window, device, dtype) for window in used if window}
    paths: tuple[Tensor, ...] = ()
    if form == "paths":
        paths = tuple(
            torch.tensor(_path(segments, number), device=device) for number in range(len(segments))
        )
    return Plan(segments=segments, windows=short, calls=calls, paths=paths, blocks=blocks)


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
    # The joined calls are one operation to the compiler. The other forms, and layers that differ in
    # their window, would be compiled again for each pack and layer.
    traced = len(trie.windows) == len(trie.calls) == 1
    return (_attend if traced else _untraced)(module, query, key, value, scaling, trie)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, trie: Plan
) -> tuple[Tensor, None]:
    query, key, value = _in_one_type(query, key, value)
    window = trie.window_of(module)
    if window in trie.calls:
        return by_calls(query, key, value, trie.calls[window], scaling)[None], None
    if trie.paths:
        key, value = (_for_each_query(one, query.shape[1]) for one in (key, value))
    if window is not None:
        out = _windowed(query, key, value, trie.blocks[window], scaling)
    else:
        out = by_paths(query, key, value, trie.segments, trie.paths, scaling)
    return out.transpose(1, 2).contiguous(), None


_untraced = torch.compiler.disable(_attend)

AttentionInterface.register(NAME, segment_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def by_calls(
    query: Tensor, key: Tensor, value: Tensor, calls: tuple[Tensor, Tensor], scaling: float | None
) -> Tensor:
    """[T, heads, width]: the forms `segments` and `varlen`, the latter in half precision."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found: Tensor = _joined(
        *(one[0].transpose(0, 1).contiguous() for one in (query, key, value)), *calls, scale
    )[0]
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


class _Call(NamedTuple):
    """A call of a kernel, for sequences of queries and of the keys that these attend to."""

    rows: slice
    seen: Any
    """Slice of the keys in T; with a window an index, which copies them."""
    sequences: tuple[Tensor, Tensor, int, int]
    """Boundaries of the queries and of the keys, and the most of a sequence."""
    causal: bool
    """A sequence's last query stands at its last key."""
    window: int
    """0: none."""
    scale: float


def _each(table: Tensor, bounds: Tensor, scale: float) -> Iterator[_Call]:
    for number, row in enumerate(table.view(-1, 9).tolist()):
        first, last, start, stop, at, count, *most, window = row
        ends = (bounds[at : at + count], bounds[at + count : at + 2 * count])
        seen = bounds[start:stop].long() if window else slice(start, stop)
        yield _Call(slice(first, last), seen, (*ends, *most), number == 0, window, scale)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, bounds: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """[T, heads, width], and the log-sum-exp of the scores, [heads, T]."""
    kernel, _ = KERNELS[query.device.type]
    first, *others = _each(table, bounds, scale)
    out, sums = kernel(first, query, key[first.seen], value[first.seen])
    for one in others:
        part, of_part = kernel(one, query[one.rows], key[one.seen], value[one.seen])
        # Without a key the sum is infinite, above zero in FlashAttention 2 and below it in 3.
        of_part = of_part.masked_fill(of_part == math.inf, -math.inf)
        joined = torch.logaddexp(sums[:, one.rows], of_part)
        weight_HT = (of_part - joined).exp_()
        out[one.rows].lerp_(part, weight_HT.t()[..., None].to(out.dtype))
        sums[:, one.rows] = joined
    return out, sums


def _backward(
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    table: Tensor,
    bounds: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _, kernel = KERNELS[query.device.type]
    first, *others = _each(table, bounds, scale)
    found = kernel(first, of_out, query, key[first.seen], value[first.seen], out, sums)
    if first.window:
        of_keys = (torch.zeros_like(key).index_add_(0, first.seen, one) for one in found[1:])
        found = (found[0], *of_keys)
    for one in others:
        rows, seen = one.rows, one.seen
        kept = (query[rows], key[seen], value[seen], out[rows], sums[:, rows].contiguous())
        parts = kernel(one, of_out[rows], *kept)
        for total, part, place in zip(found, parts, (rows, seen, seen), strict=True):
            total[place] += part
    return found[0], found[1], found[2]


def _card(one: _Call, *tensors: Tensor) -> Any:
    given = (*tensors, *one.sequences, 0.0, one.causal and not one.window, False)
    return torch.ops.aten._flash_attention_forward(*given, **_keywords(one))[:2]


def _card_backward(one: _Call, *tensors: Tensor) -> Any:
    unread = torch.empty(2, dtype=torch.uint64, device=tensors[0].device)  # there is no dropout
    given = (*tensors, *one.sequences, 0.0, one.causal and not one.window, unread, unread)
    return torch.ops.aten._flash_attention_backward(*given, **_keywords(one))


def _keywords(one: _Call) -> dict[str, float]:
    sides = {"window_size_left": one.window - 1, "window_size_right": 0 if one.causal else -1}
    return {"scale": one.scale, **sides}


def _cpu(one: _Call, query: Tensor, key: Tensor, value: Tensor) -> Any:
    out, sums_TH = torch.zeros_like(query), torch.full(query.shape[:2], -math.inf)
    for rows, seen in _sequences(one):
        part, of_part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_heads_first(query[rows], key[seen], value[seen]), 0.0, one.causal, scale=one.scale
        )
        out[rows], sums_TH[rows] = part[0].transpose(0, 1), of_part[0].t()
    return out, sums_TH.t().contiguous()


def _cpu_backward(one: _Call, *tensors: Tensor) -> Any:
    of_out, query, key, value, out, sums = tensors
    found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for rows, seen in _sequences(one):
        given = _heads_first(of_out[rows], query[rows], key[seen], value[seen], out[rows])
        # In the order in memory that the kernel expects.
        of_rows = sums[:, rows].t().contiguous().t()[None]
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, of_rows, 0.0, one.causal, scale=one.scale
        )
        for total, part, place in zip(found, parts, (rows, seen, seen), strict=True):
            total[place] = part[0].transpose(0, 1)
    return found


def _sequences(one: _Call) -> Iterator[tuple[slice, slice]]:
    for rows, seen in zip(*(pairwise(ends.tolist()) for ends in one.sequences[:2]), strict=True):
        if rows[0] < rows[1] and seen[0] < seen[1]:
            yield slice(*rows), slice(*seen)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [one.transpose(0, 1)[None] for one in tensors]


KERNELS: dict[str, Any] = {"cpu": (_cpu, _cpu_backward), "cuda": (_card, _card_backward)}
"""Forwards and backwards, by type of device."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])


def _gradients(ctx: Any, of_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _joined_backward(of_out.contiguous(), *ctx.saved_tensors, ctx.scale)
    return (*found, None, None, None)


# One operation to the compiler, for packs of all shapes.
_joined = torch.library.custom_op("learner::joined", _forward, mutates_args=())
_joined.register_autograd(_gradients, setup_context=_keep)
_joined_backward = torch.library.custom_op("learner::joined_backward", _backward, mutates_args=())
_joined_backward.register_fake(lambda _, *given: tuple(map(torch.empty_like, given[:3])))


@_joined.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty(query.shape[1::-1], device=query.device)


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


def _calls(
    segments: Sequence[Segment], device: torch.device, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Plan the calls of `_each`: the causal one, and without a window one a level of the trie.

    Returns: a table on the CPU with nine numbers a call: where its queries start and stop in T, and
        its keys, with a window in the boundaries; where its boundaries begin, how many there are,
        the most queries and keys of a sequence, and its window or 0. And the boundaries, in int32:
        of each call those of its queries, then of its keys; with a window also these keys in T.
    """
    ends = [(0, 0), *((one.stop, one.stop) for one in segments)]
    levels = {-1: ends}
    table: list[int] = []
    bounds: list[int] = []
    if window is not None:
        for number, one in enumerate(segments):
            bounds += _path(segments, number)[1 - one.length - window :]
            ends[number + 1] = (one.stop, len(bounds))
    for number, one in enumerate(segments):
        if window is None and one.last > one.stop:
            ends = levels.setdefault(len(ancestors(segments, number)), [(one.stop, one.start)])
            # Before it stand queries without keys, then keys without queries.
            ends += [(one.stop, ends[-1][1]), (one.stop, one.start), (one.last, one.stop)]
    for ends in levels.values():
        both = list(zip(*dict.fromkeys(ends), strict=True))
        table += [at for of in both for at in (of[0], of[-1])] + [len(bounds), len(both[0])]
        table += [max(end - start for start, end in pairwise(of)) for of in both] + [window or 0]
        bounds += [at - of[0] for of in both for at in of]
    return torch.tensor(table), torch.tensor(bounds, dtype=torch.int32, device=device)


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
    if device.type == "cuda" and dtype != torch.float32:
        _take_faster_kernels(device, dtype, width)
    refused: list[str] = []
    for form in forms:
        if not (why := _fault(form, device, dtype, width)):
            return form, "; ".join(refused)
        refused.append(why)
    return "dense", "; ".join(refused)


def _take_faster_kernels(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Have torch use FlashAttention 3 or 4 where it is installed and right here, else its own 2."""
    for name in ("FA3", "FA4"):  # 3 is made for Hopper, 4 for Blackwell
        try:
            nn.attention.activate_flash_attention_impl(name)
        except Exception as error:  # noqa: BLE001  no switch, no package, or not for this card
            why = f"{type(error).__name__}: {one_line(error)}"
        else:
            if not (why := _fault("varlen", device, dtype, width)):
                log.info("flash_attention_chosen", name=name)
                return
            nn.attention.restore_flash_attention_impl()
        log.info("flash_attention_not_taken", name=name, why=why)


def _fault(form: Form, device: torch.device, dtype: torch.dtype, width: int) -> str:
    limit = TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE
    for window in (None, WINDOW):
        try:
            found = difference(form, device, dtype, width, window)
        except Exception as error:  # noqa: BLE001  compiled kernels raise errors of any class
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
        made = torch.randn(1, heads, segments[-1].stop, width, generator=draw)
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
    """Return a trie of two prompts, with three levels, `times` as long as `LENGTHS`."""
    prompt, first, second, short, long = (
        tuple(range(100 * times * number, times * (100 * number + length)))
        for number, length in enumerate(LENGTHS)
    )
    rows = [prompt + first + short, prompt + first + long, prompt + second, prompt + long, short]
    rows += [long + first + short, long + first + second, long + short]
    return fold(rows).segments
