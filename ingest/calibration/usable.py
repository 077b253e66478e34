"""Leave out groups that say nothing about a judge: no order is known, or nothing differs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ingest.calibration.records import KnownGroup
from ingest.ruler.ruler import merge_identical

EQUAL_SCORES = "all known scores are equal, so no order is known"
NO_PREFERENCES = "the list of preferences is empty, so no order is known"
IDENTICAL = "all candidates look the same to a judge"
SHOWN = 5
"""Ids of a reason that are named."""


def split_usable(
    groups: Sequence[KnownGroup], *, show_reasoning: bool = False
) -> tuple[list[KnownGroup], dict[str, list[str]]]:
    """Return the groups that can be judged and compared, and why the others cannot.

    show_reasoning: candidates that differ in their reasoning alone do not look the same.
    Returns: (the usable groups, reason -> ids of the groups that it leaves out).
    """
    usable: list[KnownGroup] = []
    left_out: dict[str, list[str]] = {}
    for group in groups:
        why = _why_unusable(group, show_reasoning=show_reasoning)
        if why is None:
            usable.append(group)
        else:
            left_out.setdefault(why, []).append(group.group_id)
    return usable, left_out


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a line for each reason: how many groups, the first of them, and why."""
    for why, ids in left_out.items():
        named = ", ".join(ids[:SHOWN]) + (", ..." if len(ids) > SHOWN else "")
        yield f"{len(ids)} left out ({named}): {why}"


def _why_unusable(group: KnownGroup, *, show_reasoning: bool) -> str | None:
    messages = [one.message for one in group.candidates]
    if len(merge_identical(messages, show_reasoning=show_reasoning)[0]) < 2:
        return IDENTICAL
    if group.pairs:
        return None
    return NO_PREFERENCES if group.scores is None else EQUAL_SCORES
