"""The records that ingest hands on: `Group` to the judge, `ScoredGroup` to the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Origin = Literal["served", "sampled"]
UNREADABLE = "unreadable"
"""`Answer.untrainable_reason` of one whose row is damaged: its siblings are read without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the answers of a group."""

    index: int
    """Index in the group, 0..G-1. The group's own served answers come first."""
    origin: Origin
    message: bytes
    """The assistant message as JSON."""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    """[S] sampled ids."""
    logprobs: tuple[float, ...] = ()
    """[S] nats, under the group's adapter at `temperature`."""
    temperature: float = 1.0
    untrainable_reason: str | None = None
    """Why the answer is masked: it is judged and shown, but not in the loss. None: it is exact and
    exchangeable with its siblings, so it takes part in the gradient."""
    exchange_id: str | None = None
    """The exchange of the same prompt that it was served in; None: the group's own, or sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """G answers to one prompt, all sampled from one adapter version (grouping -> judge)."""

    group_id: str
    exchange_id: str
    session_key: str
    session_id: str = ""
    """The session that its exchange stands in; groups are counted by it."""
    project: str = "default"
    """Project of its exchange, whose rubric it is judged by."""
    adapter: str
    """vLLM name of the LoRA that sampled every answer; "base" when none did."""
    request: bytes
    """The agent's request body, JSON: messages and tools."""
    prompt_token_ids: tuple[int, ...]
    """[P] token ids of the prompt, shared by all answers."""
    answers: tuple[Answer, ...]
    """[G] the answers."""
    masked_by: str | None = None
    """What forbade tokens while the answers were sampled, or may have (`ingest.grouping.features`).
    None: nothing did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """Rewards of a group's answers, made of the judge's scores and what verifiers found."""

    rewards: tuple[float, ...]
    """[G] unitless, 0..1, comparable within this group only."""
    independent: tuple[float, ...] = ()
    """[G] weighted mean of the verifiers' scores, 0..1; empty: no verifier counts in this group."""
    rule: Mapping[str, Any] = field(default_factory=dict)
    """How they were combined, as JSON: weights, and versions and digests of the verifiers."""
    checks: tuple[Sequence[Mapping[str, Any]], ...] = ()
    """[G] what each verifier found, as JSON: name, version, score, why, error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with the judge's scores (judge -> training)."""

    group: Group
    scores: tuple[float, ...]
    """[G] unitless, 0..1, comparable within this group only."""
    explanations: tuple[str, ...]
    """[G] the judge's explanations."""
    judge_model: str
    rubric_hash: str
    passes: int = 1
    """Passes of the judge that the scores are the mean over; 1 also where that is not known: no
    number of passes has more noise."""
    rewarded: Rewarded | None = None
    """None: no verifier checked the group."""

    @property
    def judged_by(self) -> tuple[str, str, int]:
        """Return (judge model, rubric hash, passes), which the noise of the scores depends on."""
        return self.judge_model, self.rubric_hash, self.passes

    @property
    def rewards(self) -> tuple[float, ...]:
        """Return what is learned from: [G] unitless, 0..1."""
        return self.scores if self.rewarded is None else self.rewarded.rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """How far the passes of a judge differ over one group: its noise and its position bias."""

    by_answer: tuple[float, ...]
    """[G] mean absolute difference between two passes' scores of the answer, 0..1."""
    flipped: float
    """Share of the pairs of distinct answers that two passes put in opposite order, 0..1."""

    @property
    def mean(self) -> float:
        """Mean over the answers, 0..1."""
        return sum(self.by_answer) / len(self.by_answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPass:
    """One pass of the judge over D distinct answers."""

    order: tuple[int, ...]
    """[D] `order[k]` is the index of the answer that was shown at position k."""
    scores: tuple[float, ...]
    """[D] score of each distinct answer, by its index."""
