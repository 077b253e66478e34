"""Choose the groups of the next run when some are suspected of failed runs. Pure.

Groups that never failed go first. Half of the suspects are tried again beside them, so that the
failing one is found in few runs and the others are trained on. The run after a failure leaves
suspects out if it can, so that something is learned between two attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUSPECTS_KEPT = 4
"""Most suspects that may wait, as a multiple of `most`; older ones are given up."""

TRIED_AGAIN = ("out_of_memory",)
"""Faults of a group that may be transient: it is given back, and its attempts are counted."""


def choose(
    fresh: Sequence[str],
    failures: Mapping[str, int],
    *,
    least: int,
    most: int,
    after_failure: bool,
) -> tuple[list[str], list[str]]:
    """Choose the groups of a run.

    fresh: group ids, the newest first. failures: group id -> failed runs it is suspected of.
    least: least number of waiting groups for a run. most: most groups of a run.
    Returns: groups to take, those without failures first; and suspects to give up.
    """
    clean = [group_id for group_id in fresh if not failures.get(group_id)]
    suspects = [group_id for group_id in fresh if failures.get(group_id)]
    kept, given_up = suspects[: SUSPECTS_KEPT * most], suspects[SUSPECTS_KEPT * most :]
    if len(fresh) < least:
        return [], given_up
    if not kept or (after_failure and 2 * len(clean) >= least):
        return clean[:most], given_up
    fewest = min(failures[group_id] for group_id in kept)
    pool = [group_id for group_id in kept if failures[group_id] == fewest]
    tried = pool[: min((len(pool) + 1) // 2, most)]
    return clean[: most - len(tried)] + tried, given_up
