"""The passes of a scoring as JSON values, for the store. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingest.records import ShownPass

Passes = tuple[ShownPass, ...]


def encode_passes(passes: Sequence[ShownPass]) -> list[Any]:
    """Return JSON values: for each pass, [index of the answer, score] in the order shown."""
    return [[[answer, one.scores[answer]] for answer in one.order] for one in passes]


def decode_passes(stored: Any) -> Passes:  # Any: decoded JSON
    """Undo `encode_passes`. Raises: ValueError, TypeError for a damaged value."""
    passes = []
    for shown in stored:
        scores = {int(answer): float(score) for answer, score in shown}
        if sorted(scores) != list(range(len(shown))) or not all(
            0 <= s <= 1 for s in scores.values()
        ):
            raise ValueError("the scores of a pass are damaged")
        passes.append(
            ShownPass(
                order=tuple(int(answer) for answer, _ in shown),
                scores=tuple(scores[answer] for answer in range(len(shown))),
            )
        )
    return tuple(passes)
