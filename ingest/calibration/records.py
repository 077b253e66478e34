"""Groups whose true order is known, and what a judge made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One answer, with what is known of it."""

    kind: str
    """What the answer does well or badly (`hallucinated`); empty when the file does not say."""
    message: Mapping[str, Any]
    """The assistant message. Any: JSON."""
    score: float | None
    """Known score on any scale, more is better; None when only preferences are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGroup:
    """Answers to one prompt whose order, or part of it, is known."""

    group_id: str
    task: str
    context: tuple[Mapping[str, Any], ...]
    """The messages that all answers follow."""
    tools: tuple[Mapping[str, Any], ...]
    candidates: tuple[Candidate, ...]
    """[G] G >= 2."""
    preferences: tuple[tuple[int, int], ...]
    """(index of the better, index of the worse) where the file knows no scores."""

    @property
    def scores(self) -> tuple[float, ...] | None:
        """[G] known scores; None when only preferences are known."""
        known = tuple(one.score for one in self.candidates if one.score is not None)
        return known if len(known) == len(self.candidates) else None

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(index of the better, index of the worse) of all pairs whose order is known."""
        scores = self.scores
        if scores is None:
            return self.preferences
        return tuple(
            (i, j) for i, j in permutations(range(len(scores)), 2) if scores[i] > scores[j]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The scores of one order in which a group was shown."""

    scores: tuple[float, ...]
    """[G] 0..1, in the order of the group's candidates."""
    positions: tuple[int, ...]
    """[G] where each candidate was shown, from 0; identical candidates are shown once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One group judged once, as the product judges it: by some passes, each in another order."""

    group: KnownGroup
    repeat: int
    """Which of the repeated runs, from 0."""
    passes: tuple[Pass, ...]
    """In pairs: each second one shows the reverse order of the one before. Empty: it failed."""
    failure: str | None = None
    """Reason in the terms of `answer_group.reason`; None when there are scores."""
    detail: str = ""
    """The error of a failed run."""
    calls: int = 0
    """Answered calls, unusable ones too."""
    unusable: int = 0
    """Answered calls whose scores could not be used."""
    replayed: int = 0
    """Answered calls whose reply was paid for before and kept."""
    tokens: int = 0
    """Tokens of prompts and replies, as far as the provider reports them."""
    cost_usd: float | None = 0.0
    """None when a call has no known price."""
    seconds: float = 0.0
    """Sum of the times of its calls."""

    @property
    def scores(self) -> tuple[float, ...]:
        """[G] means over the passes: what the product would take.

        Rounded, so that equal means of other orders of summation are equal.
        """
        columns = zip(*(one.scores for one in self.passes), strict=True)
        return tuple(round(sum(column) / len(self.passes), 9) for column in columns)
