"""What packs cost in bytes and time, and which packs are cheapest for a group. Pure.

`pack_bytes` is the memory, `cheapest` chooses the packs of a group by the time, `known_base` reads
the numbers of a base before it is loaded. Computes nothing with torch.

Measured on SmolLM2-135M, packs of 1,024 tokens on a CPU (docs/log.md, 2026-11-23): autograd keeps
1,318 kB a token without and 118 kB with checkpointing, where this says 1,420 and 69.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from learner.base_weights import BaseSize, base_folder, base_size
from learner.policy.architecture import Form, architecture
from learner.policy.packing import Pack, Segment, fold, in_bins, packs_of_sizes, pairs
from learner.records import TrainingGroup

FP32_BYTES, MIXED_BYTES, BF16_BYTES = 4.0, 2.7, 2.0
"""Bytes of a kept number in fp32; of one with bf16 products beside an fp32 residual stream
(measured: 0.67 of fp32); of a bf16 weight."""
KEPT_BF16_BYTES = 2.125
"""Bytes of a kept number where the weights are bf16. It is over 2 because the norms of queries and
keys work in fp32: measured 2.12 with Qwen3-8B's proportions and 1.90 with Llama's, as the slope of
autograd's saved tensors over the length of a pack; 2.48 and 2.23 with peft's copies in fp32."""
KEPT_SCORES = 3
"""Numbers that a head of attention by a model's own code keeps for each pair of tokens, at most:
Gemma2's keeps 2 in fp32 and 8 bytes in bf16, gpt-oss's 1 (measured, docs/log.md, 2026-11-27)."""
KEPT_BY_ALLOCATOR = 1.8
"""Growth of the process over what autograd keeps, with the default thresholds of glibc's malloc."""
ON_CUDA = 1.15
"""The same for torch's caching allocator: an allowance for fragments, not measured."""
MOMENTS = 7
"""Numbers beside each trainable weight: gradient, two moments, the start of the run, and three
copies while a step is taken."""
SHARE = 0.8
"""Share of the free memory that a pack may take: other processes grow too."""
CHUNK_BYTES, CHUNK_BYTES_ON_CUDA = 128 * 2**20, 512 * 2**20
"""Largest fp32 logits that exist at once; a pass has two such tensors, the plain form four of the
whole size. Each chunk reads the head, 1.2 GB at 8B: in chunks of 128 MB its products took 26 ms of
a pass on an H100, where 21 were needed (docs/log.md, 2026-11-29)."""
MOST_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the estimate needs to know of a model."""

    layers: int
    hidden: int
    queries: int
    """Width of all query heads together."""
    keys: int
    """Width of all key heads together."""
    inner: int
    """Width of the MLP that every token goes through; of the shared experts, where there are
    experts."""
    chosen: int = 0
    """Experts that a token goes through besides; 0: the model has no experts."""
    expert: int = 0
    """Width of one of them."""
    masks: int = 0
    """Dense attention masks of a pack."""
    scores: int = 0
    """Numbers that a layer keeps for each pair of tokens, where the model's own code computes its
    attention; a kernel keeps none."""
    repeats: int = 1
    """Queries of a group: how often the form `paths` copies each key."""

    @property
    def kept_in_layer(self) -> int:
        """Numbers that a layer keeps for its backward pass, for each token, beside its experts."""
        return 6 * self.hidden + 3 * self.queries + 4 * self.keys + 4 * self.inner

    @property
    def kept_by_experts(self) -> int:
        """Numbers that a layer's experts, which no adapter is on, keep for each token: for each one
        chosen what comes out of it before its weight, and its gate, up and activation (measured:
        docs/log.md, 2026-11-27)."""
        return self.chosen * (self.hidden + 3 * self.expert)

    @property
    def linear_weights(self) -> int:
        """Weights of a layer that a token is multiplied by."""
        inner = self.inner + self.chosen * self.expert
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * inner)


def sizes(
    config: Any,  # Any: a config of transformers, not typed
    *,
    masks: int = 0,
    eager: bool = False,
    cuda: bool = True,
) -> Sizes:
    """Read the sizes from a text model's config. Raises: AttributeError when one is missing.

    eager: the model's own code computes its attention. cuda: no, torch keeps a number for each
        pair of tokens where values have another width than keys (multi-head latent attention): no
        kernel of the CPU takes these.
    """
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    of_keys = int(getattr(config, "num_key_value_heads", None) or heads)
    latent = int(getattr(config, "qk_nope_head_dim", None) or 0)
    if latent:  # each head has keys of its own, of a part with positions and one without
        width, of_keys = latent + int(config.qk_rope_head_dim), heads
    chosen = int(getattr(config, "num_experts_per_tok", None) or 0)
    expert = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
    inner = _shared(config, expert) if chosen else int(config.intermediate_size)
    return Sizes(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        queries=heads * width,
        keys=of_keys * width,
        inner=inner,
        chosen=chosen,
        expert=expert if chosen else 0,
        masks=masks,
        scores=KEPT_SCORES * heads if eager else heads if latent and not cuda else 0,
        repeats=heads // of_keys,
    )


def _shared(config: Any, expert: int) -> int:
    width = getattr(config, "shared_expert_intermediate_size", None)
    return int(width or expert * int(getattr(config, "n_shared_experts", None) or 0))


def pack_bytes(
    model: Sizes, tokens: int, *, number_bytes: float, checkpointing: bool, gathered: int = 0
) -> int:
    """Return the bytes that one pack needs beside weights and logits, forwards and backwards.

    number_bytes: of a kept number.
    gathered: keys that attention copies, over the pack's segments; a layer keeps them.
    """
    layers = 1 if checkpointing else model.layers
    inputs = model.layers * model.hidden if checkpointing else 0
    kept = inputs + layers * model.kept_in_layer
    copies = 2 * model.keys * model.repeats * gathered * layers
    pairs = (model.masks + model.scores * layers) * tokens * tokens
    # Experts compute in the type of their weights, also in fp32 beside bf16 products.
    weight_bytes = BF16_BYTES if number_bytes <= KEPT_BF16_BYTES else FP32_BYTES
    experts = layers * tokens * model.kept_by_experts * max(number_bytes, weight_bytes)
    return int((tokens * kept + copies + pairs) * number_bytes + experts)


def with_allocator(pack: int, *, cuda: bool, checkpointing: bool) -> int:
    """Return what a process grows by for a pack of so many bytes, and its logits.

    On a CPU the C library returns freed blocks at once while layers are recomputed
    (`learner.policy.memory.recompute_layers`).
    """
    pack += 2 * (CHUNK_BYTES_ON_CUDA if cuda else CHUNK_BYTES)
    return int(pack * (ON_CUDA if cuda else 1.0 if checkpointing else KEPT_BY_ALLOCATOR))


def longest_pack(
    model: Sizes,
    room: int,
    *,
    number_bytes: float,
    cuda: bool,
    checkpointing: bool,
    answers: int = 1,
) -> int:
    """Return the tokens of the longest pack that needs at most so many bytes; 0: none does.

    answers: of a group. Each has the prompt's keys on its path, so with a prompt that is nearly all
        of the pack the form `paths`, which a card takes in fp32, copies as many keys for each of
        them as the pack has tokens, and once more.
    """

    def needed(tokens: int) -> int:
        pack = pack_bytes(
            model,
            tokens,
            number_bytes=number_bytes,
            checkpointing=checkpointing,
            gathered=(answers + 1) * tokens if cuda and number_bytes == FP32_BYTES else 0,
        )
        return with_allocator(pack, cuda=cuda, checkpointing=checkpointing)

    low, high = 0, 1
    while needed(high) <= room and high < MOST_TOKENS:
        low, high = high, 2 * high
    while high - low > 1:  # `low` fits, `high` does not
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= room else (low, middle)
    return low


# Choose the packs of a group by what they cost to compute: rows, one pack, or a trie. Pure.

PER_PACK = 27.0
PER_SEGMENT = 1.0
"""In tokens. A segment takes two calls of a kernel a layer."""
ATTENTION_FLOPS, LINEAR_FLOPS = 14, 4
"""Operations, forwards and backwards: of a pair for each number of a query (4 and 2.5 times that),
and of a token for each weight, which is frozen (2 and 2)."""
Row = tuple[int, ...]
"""Token ids."""
SHARED = 16
"""Tokens that answers must have in common for a trie with fewer segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What parts of a pack cost, in tokens."""

    pair: float = 1e-3
    segment: float = PER_SEGMENT
    pack: float = PER_PACK


def prices(model: Sizes) -> Prices:
    return Prices(pair=ATTENTION_FLOPS * model.queries / (LINEAR_FLOPS * model.linear_weights))


def cost(segments: Sequence[Segment], of: Prices, form: Form) -> float:
    """Return what a pack of these segments costs, in tokens."""
    tokens = max(one.last for one in segments)
    attended = tokens * tokens if form == "dense" and len(segments) > 1 else pairs(segments)
    return tokens + of.pair * attended + of.segment * len(segments) + of.pack


def cheapest(group: TrainingGroup, *, max_tokens: int, of: Prices, form: Form) -> list[Pack]:
    """Pack the trainable answers of a group, in order, in the way that costs least.

    max_tokens: longest pack; an answer that does not fit alone gets a pack of its own.
    """
    answers = tuple(row.token_ids for row in group.rows if row.trainable)
    sizes, least = _chosen(group.prompt_token_ids, answers, max_tokens, of, form)
    return packs_of_sizes(group, sizes, least)


@lru_cache(maxsize=1_024)  # a run packs each group several times: to check it, and for its step
def _chosen(
    prompt: Row, answers: tuple[Row, ...], max_tokens: int, of: Prices, form: Form
) -> tuple[list[int], int]:
    """Return how many answers each pack has, and the fewest tokens of a shared segment."""
    fed = [(*prompt, *one[:-1]) for one in answers]
    best: tuple[float, list[int], int] = (math.inf, [], 1)
    for least in sorted({1, SHARED, len(prompt)}):  # prompt: nothing but the prompt is shared
        for bins in _ways(fed, max_tokens, least):
            tries = [fold(rows, least=least) for rows in bins]
            total = sum(cost(trie.segments, of, form) for trie in tries)
            if total < best[0]:
                best = total, [len(rows) for rows in bins], least
    return best[1:]


def _ways(rows: Sequence[Row], max_tokens: int, least: int) -> Iterator[list[list[Row]]]:
    """Yield the fewest packs that fit, and each of these in halves, quarters, ... down to rows."""
    fewest = list(in_bins(rows, max_tokens, least))
    parts, longest = 1, max(map(len, fewest), default=0)
    while longest:
        yield [part for of_pack in fewest for part in _split(of_pack, parts)]
        if parts >= longest:
            return
        parts = min(2 * parts, longest)


def _split(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    size = -(-len(rows) // parts)
    return [list(rows[at : at + size]) for at in range(0, len(rows), size)]


# What the files of a base say of it before it is loaded.


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBase:
    """A base whose weights and config can be read."""

    weights: BaseSize
    config: Any  # of transformers, not typed
    """The config of the base's text model."""
    sizes: Sizes


def known_base(base_model_path: str) -> KnownBase | None:
    """Read the weights' shapes and the config; None where the files do not say them. What is wrong
    with them `learner.policy.adapter_io.load_policy` says. Masks and scores of all pairs of tokens
    are counted for models whose own code computes their attention; those of latent attention on a
    CPU are not (`sizes`).
    """
    folder = base_folder(base_model_path)
    weights = base_size(folder) if folder is not None else None
    if weights is None:
        return None
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        shape = architecture(config)
        # Of a class that says nothing: None has no such attribute.
        model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        eager = shape.eager or not getattr(model, "_supports_sdpa", True)
        masks = len(shape.windows) if eager and shape.packs else 0
        of = sizes(config, masks=masks, eager=eager)
        return KnownBase(weights=weights, config=config, sizes=of)
    except Exception:  # noqa: BLE001  a damaged config.json raises errors of many classes
        return None
