"""How much of an answer's end is said again and again. Pure."""

from __future__ import annotations

TAIL = 2_000
"""Characters at the end that are looked at: a model that falls into a loop does not leave it."""
SHORTEST = 400
"""Shorter answers have no loop that could be told from a list, in characters."""
SHINGLE = 16
"""Characters of one run; no words are needed, so it holds for languages without spaces."""
LOOPS = 0.6
"""Share of repeated runs from which on an answer counts as a loop. Tables, lists, code, SQL and
poems with a refrain have at most 0.52, loops at least 0.67: the texts of
tests/ingest/reward_watch/test_repetition.py."""


def repeated_share(text: str) -> float:
    """Return the share of the runs of 16 characters in the last 2,000 that occurred before, 0..1.

    0 for a text under 400 characters.
    """
    tail = text[-TAIL:]
    if len(tail) < SHORTEST:
        return 0.0
    runs = len(tail) - SHINGLE + 1
    return 1.0 - len({tail[at : at + SHINGLE] for at in range(runs)}) / runs
