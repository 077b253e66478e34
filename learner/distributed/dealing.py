"""Which process computes which group: equal cost for each. Pure.

The cost of a pack of T tokens is T + c * T^2: the matrix products grow with T, the scores of
attention with its square. A group is dealt whole, because the optimiser's second moment is made of
the gradient of each group.
"""

from __future__ import annotations

from collections.abc import Sequence

from learner.policy.packing import packed_length
from learner.records import TrainingGroup


def attention_share(*, layers: int, queries: int, weights: int) -> float:
    """Return c: operations of attention for a pair of tokens, over those of the weights for one.

    A token takes 2 operations for each weight, and 4 * `queries` for each token that it is compared
    with, in each layer: once for the score, once for the sum.
    """
    return 2 * layers * queries / weights if weights else 0.0


def group_cost(group: TrainingGroup, *, pack_tokens: int, c: float) -> float:
    """Return the cost of a group, in tokens, as if its answers filled its packs evenly."""
    lengths = [len(row.token_ids) for row in group.rows if row.trainable]
    prompt = len(group.prompt_token_ids)
    room = max(1, pack_tokens - prompt)
    packs = max(1, -(-(packed_length(prompt, lengths) - prompt) // room))
    tokens = packed_length(prompt, lengths) + (packs - 1) * prompt
    return tokens + c * tokens * tokens / packs


def deal_by_cost(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Deal places 0.. to ranks: the most expensive first, each to the rank with the least so far.

    It is at most 4/3 - 1/(3 * ranks) of the best (Graham, SIAM J. Appl. Math. 17, 1969).
    Returns: for each rank its places, in order.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for place in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        rank = min(range(ranks), key=lambda one: (loads[one], one))
        dealt[rank].append(place)
        loads[rank] += costs[place]
    return [sorted(places) for places in dealt]
