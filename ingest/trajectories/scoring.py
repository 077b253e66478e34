"""Score whole trajectories against each other: what they have in common is sent once.

Trajectories that look the same to the judge are shown once and share their score.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingest.judge_prompt.shown import looks, shown_trajectory
from ingest.privacy.judge_view import View, default_view
from ingest.ruler.judge import Judge
from ingest.ruler.prompt import TRAJECTORIES, RulerPrompt, write_prompt
from ingest.ruler.ruler import Judgement, OnCall, score_candidates

Shown = dict[str, Any]
"""A message as the judge sees it."""
Hide = Callable[[View], View]
"""Hides secrets and personal data, such as a `JudgeView`. Raises: NotRedactedError."""


class IdenticalError(ValueError):
    """All trajectories look the same to the judge: it has nothing to compare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Trajectories, taken apart."""

    common: tuple[Shown, ...]
    """The messages with which all of them begin."""
    own: tuple[tuple[Shown, ...], ...]
    """[G] the further messages of each."""


async def score_trajectories(
    judge: Judge,
    trajectories: Sequence[Sequence[Mapping[str, Any]]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    rubric: str,
    passes: int,
    seed: int,
    on_call: OnCall | None = None,
    subject: str = "",
    view: Hide | None = None,
    show_reasoning: bool = False,
) -> Judgement:
    """Score trajectories of one task against each other.

    trajectories: [G] their messages, from the first one on.
    The others are as for `ingest.ruler.ruler.score_answers`.
    Raises: IdenticalError, before the judge is asked; the errors of `score_answers`.
    """
    split = await asyncio.to_thread(split_common, trajectories, show_reasoning=show_reasoning)
    seen, shown_tools = await asyncio.to_thread(_hidden, split, tools, view or default_view())
    distinct, place_of = await asyncio.to_thread(_merged, seen.own)
    if len(distinct) < 2:
        raise IdenticalError(f"all {len(trajectories)} trajectories are identical")

    def write(*, rng: random.Random, reverse: bool, context_tokens: int | None) -> RulerPrompt:
        return write_prompt(
            TRAJECTORIES,
            context=seen.common,
            tools=shown_tools,
            candidates=distinct,
            rubric=rubric,
            rng=rng,
            reverse=reverse,
            context_tokens=context_tokens,
        )

    return await score_candidates(
        judge, write, place_of, passes=passes, seed=seed, on_call=on_call, subject=subject
    )


def split_common(
    trajectories: Sequence[Sequence[Mapping[str, Any]]], *, show_reasoning: bool = False
) -> Split:
    """Take the messages apart that all trajectories begin with. Pure.

    Messages are equal when they look the same to the judge: ids of tool calls and the way in which
    the JSON of arguments is written do not count.
    """
    shown = [shown_trajectory(one, show_reasoning=show_reasoning) for one in trajectories]
    shared = 0
    for column in zip(*shown, strict=False):
        first = looks(column[0])
        if any(looks(other) != first for other in column[1:]):
            break
        shared += 1
    return Split(
        common=tuple(shown[0][:shared]) if shown else (),
        own=tuple(tuple(one[shared:]) for one in shown),
    )


def _hidden(
    split: Split, tools: Sequence[Mapping[str, Any]], view: Hide
) -> tuple[Split, Sequence[Mapping[str, Any]]]:
    """Hide what the judge must not see: one value has one placeholder in the whole group."""
    flat = [message for one in split.own for message in one]
    seen = view(View(context=split.common, tools=tools, answers=flat))
    left = iter(seen.answers)
    own = tuple(tuple(dict(next(left)) for _ in one) for one in split.own)
    return Split(common=tuple(dict(one) for one in seen.context), own=own), seen.tools


def _merged(own: Sequence[Sequence[Shown]]) -> tuple[list[Sequence[Shown]], list[int]]:
    """Returns: (the distinct ones, [G] index of each in them)."""
    first: dict[tuple[str, ...], int] = {}
    distinct: list[Sequence[Shown]] = []
    place_of: list[int] = []
    for one in own:
        key = tuple(map(looks, one))
        if key not in first:
            first[key] = len(distinct)
            distinct.append(one)
        place_of.append(first[key])
    return distinct, place_of
