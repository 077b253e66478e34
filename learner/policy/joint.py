"""Packs of several groups, for passes without a gradient. Pure index arithmetic.

Groups of one agent begin with the same instructions, and those of one session with the same turns.
A pass without a gradient computes what they share once. A step does not: the optimiser needs each
group's gradient by itself, and each would be a backward pass over the whole pack.
"""

from __future__ import annotations

from collections.abc import Sequence

from learner.policy.attention.trie import shared, unique_tokens
from learner.policy.packing import Pack, fed, pack_members
from learner.records import TrainableRow, TrainingGroup

LEAST_SHARED = 0.25
"""Part of a prompt that must be shared with the group before it, to join it."""


def joint_groups(groups: Sequence[TrainingGroup], *, max_tokens: int) -> list[list[int]]:
    """Sort groups into those that are computed together, as indices; each is in one list.

    max_tokens: longest pack; a group that is longer stays alone.
    """
    order = sorted(range(len(groups)), key=lambda number: groups[number].prompt_token_ids)
    found: list[list[int]] = []
    for number in order:
        together = found[-1] if found else []
        if together and _joins(groups, together, number, max_tokens):
            together.append(number)
        else:
            found.append([number])
    return found


def joint_pack(groups: Sequence[TrainingGroup]) -> Pack:
    """Pack the trainable answers of these groups into one, in order."""
    return pack_members(_members(groups))


def parts(groups: Sequence[TrainingGroup]) -> list[int]:
    """Return how many of the pack's targets are each group's."""
    return [sum(row.kept_tokens for row in group.rows if row.trainable) for group in groups]


def _members(groups: Sequence[TrainingGroup]) -> list[tuple[TrainingGroup, TrainableRow]]:
    return [(group, row) for group in groups for row in group.rows if row.trainable]


def _joins(
    groups: Sequence[TrainingGroup], together: Sequence[int], number: int, max_tokens: int
) -> bool:
    prompt = groups[number].prompt_token_ids
    common = shared(prompt, 0, groups[together[-1]].prompt_token_ids)
    if common < LEAST_SHARED * len(prompt):
        return False
    members = _members([groups[one] for one in (*together, number)])
    return unique_tokens([fed(group, row) for group, row in members]) <= max_tokens
