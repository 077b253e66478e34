"""Which of the waiting groups the next run takes, when some are suspected of failed runs. Pure.

Groups that never failed go first. Suspects are tried again beside them, half of them at a time, so
that the one that fails is found in few runs and the others are trained on. The run after a failure
leaves suspects out if it can: something is learned between two attempts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SUSPECTS_KEPT = 4
"""Times `most`: so many suspects wait at most; older ones are given up."""


def choose(
    fresh: Sequence[str],
    failures: Mapping[str, int],
    *,
    least: int,
    most: int,
    after_failure: bool,
) -> tuple[list[str], list[str]]:
    """Choose what a run takes.

    fresh: group ids, the newest first. failures: group id -> failed runs it is suspected of.
    least: groups that must wait before a run is worth it. most: groups that a run takes.
    Returns: groups to take, clean ones first; and suspects to give up.
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
