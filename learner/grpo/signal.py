"""How much a group has to tell: its advantages, less what cancels between answers alike. Pure.

Answers that begin alike share the gradient of their common tokens, where their advantages add up,
to nothing if the answers are identical. What is left of such a gradient is rounding and the pull of
the loss. AdamW would divide it by its own size, and move the weights as far as for sound groups.
So a group's signal is

    s * min(1, sqrt(sum over places of (w * sum of A)^2 / sum over tokens of (w * A)^2))

with s the root mean square of its advantages A over its trainable tokens. A place is a token behind
its whole past, which several answers may have in common, and w = 1 - p of that token: the
gradient of its log-probability by the logits has a norm between w and sqrt(2) w, so a token that
was certain tells nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from learner.records import TrainableRow

LEAST_LEFT = 1e-4
"""Part of a gradient that does not cancel, under which it is taken for nothing: rounding leaves
about 1e-7 (docs/log.md, 2026-11-24), and the pull of the loss does not shrink with it."""


@dataclass(slots=True)
class _Place:
    advantage: float = 0.0
    squares: float = 0.0
    width: float = 0.0
    rows: int = 0


def signal(rows: Sequence[TrainableRow]) -> float:
    """Return the signal of a group, in units of its advantages; 0 where all of it cancels.

    rows: its answers; those that are not trainable have no part.
    """
    rows = [row for row in rows if row.trainable]
    tokens = sum(row.kept_tokens for row in rows)
    if not tokens:
        return 0.0
    square = math.fsum(row.kept_tokens * row.advantage**2 for row in rows) / tokens
    left = uncancelled(rows)
    return math.sqrt(square) * left if left >= LEAST_LEFT else 0.0


def uncancelled(rows: Sequence[TrainableRow]) -> float:
    """Return the part of the gradient that does not cancel between these answers, 0 to 1."""
    left, whole = 0.0, 0.0
    for place in _places(rows):
        width = place.width / place.rows
        # fsum of equal and opposite advantages may leave the last bit; it is no signal.
        summed = 0.0 if place.advantage**2 < 1e-24 * place.squares else place.advantage
        left += (width * summed) ** 2
        whole += width**2 * place.squares
    return min(1.0, math.sqrt(left / whole)) if whole > 0 else 0.0


def _places(rows: Sequence[TrainableRow]) -> list[_Place]:
    """Return the places that have a part in the loss."""
    numbers: dict[tuple[object, int], int] = {}
    places: dict[int, _Place] = {}
    for row in rows:
        at: object = ("temperature", row.temperature)  # the same text is two at two temperatures
        kept = row.kept or (True,) * len(row.token_ids)
        for token, keep, nats in zip(row.token_ids, kept, row.logprobs, strict=True):
            at = numbers.setdefault((at, token), len(numbers))
            if keep:
                place = places.setdefault(at, _Place())
                place.advantage += row.advantage
                place.squares += row.advantage**2
                place.width += -math.expm1(min(0.0, nats))
                place.rows += 1
    return list(places.values())
