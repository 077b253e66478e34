"""What judging one group costs, as durable counters: two histograms with fixed bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from sqlalchemy.orm import Session

from sidecar.store.database import count

NANO = 10**9
"""Nano-dollars of a dollar: money is counted in whole numbers, which lose nothing."""
TOKENS, NANO_USD = "judge_group_tokens", "judge_group_nanousd"
"""Stages of counter rows: (stage, `le_<bound>`) -> groups of the bucket, (stage, SUM) -> total."""
BOUNDS: Mapping[str, tuple[int, ...]] = {
    TOKENS: (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000),
    NANO_USD: (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000),
}
"""Upper bounds of the buckets; the last bucket has none."""
SUM, LAST = "sum", "le_inf"


def count_group(session: Session, *, tokens: int, nano_usd: int | None) -> None:
    """Count what the judgement of one group cost, in the caller's transaction.

    nano_usd: None when the price of a call is not known: then it is in the other histogram alone.
    """
    for stage, amount in ((TOKENS, tokens), (NANO_USD, nano_usd)):
        if amount is not None:
            count(session, stage, bucket_of(stage, amount))
            count(session, stage, SUM, amount)


def bucket_of(stage: str, amount: int) -> str:
    """Return the reason of the row that counts this amount."""
    bounds = BOUNDS[stage]
    place = bisect_left(bounds, amount)
    return f"le_{bounds[place]}" if place < len(bounds) else LAST
