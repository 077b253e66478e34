"""Choose the packs of a group by what they cost to compute: rows, one pack, or a trie. Pure.

The unit is one token through the linear layers, forwards and backwards. A pack costs

    tokens + pair * (pairs of tokens that attend) + segment * (segments) + pack

With attention by segments the pairs are those that count; behind a dense mask they are T * T, so
there rows win where the answers outweigh the prompt. `pair` follows from the model's widths.

Measured on one core of a shared CPU, fp32, 4 layers of width 384 (docs/log.md, 2026-11-24): over
packs of 280 to 4,248 tokens a unit took 0.37 to 0.48 ms with these constants, so attention is as
fast as the linear layers by operations; 8 rows of 63 tokens took 200 tokens more than one pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from learner.policy.architecture import Form
from learner.policy.attention.trie import Segment, fold, pairs
from learner.policy.packing import Pack, fed, in_bins, pack_rows
from learner.policy.sizes import Sizes
from learner.records import TrainableRow, TrainingGroup

PER_PACK = 27.0
PER_SEGMENT = 1.0
"""In tokens. A segment takes two calls of a kernel a layer."""
ATTENTION_FLOPS, LINEAR_FLOPS = 14, 4
"""Operations, forwards and backwards: of a pair for each number of a query (4 and 2.5 times that),
and of a token for each weight, which is frozen (2 and 2)."""
SHARED = 16
"""Tokens that answers must have in common for a trie with fewer segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What parts of a pack cost, in tokens."""

    pair: float = 1e-3
    segment: float = PER_SEGMENT
    pack: float = PER_PACK


def prices(model: Sizes) -> Prices:
    """Return the prices of a model."""
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
    best: tuple[float, list[list[TrainableRow]], int] | None = None
    prompt = len(group.prompt_token_ids)
    for least in sorted({1, SHARED, prompt}):  # prompt: nothing but the prompt is shared
        for bins in _ways(group, max_tokens, least):
            tries = [fold([fed(group, row) for row in rows], least=least) for rows in bins]
            total = sum(cost(trie.segments, of, form) for trie in tries)
            if best is None or total < best[0]:
                best = total, bins, least
    if best is None:
        return []
    _, bins, least = best
    return [pack_rows(group, rows, least=least) for rows in bins]


def _ways(group: TrainingGroup, max_tokens: int, least: int) -> Iterator[list[list[TrainableRow]]]:
    """Yield the fewest packs that fit, and each of these in halves, quarters, ... down to rows."""
    fewest = list(in_bins(group, max_tokens, least))
    parts, longest = 1, max((len(rows) for rows in fewest), default=0)
    while longest:
        yield [part for rows in fewest for part in _split(rows, parts)]
        if parts >= longest:
            return
        parts = min(2 * parts, longest)


def _split(rows: Sequence[TrainableRow], parts: int) -> list[list[TrainableRow]]:
    size = -(-len(rows) // parts)
    return [list(rows[at : at + size]) for at in range(0, len(rows), size)]
