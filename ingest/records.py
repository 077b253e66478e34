"""The records that ingest hands on: `Group` to the judge, `ScoredGroup` to the learner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["served", "sampled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One of the answers of a group."""

    index: int
    """Place in the group, 0..G-1; the served answers come first."""
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
    """None: exchangeable with its siblings and exact, so it takes part in the gradient.
    Otherwise it is judged and shown, and masked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """group -> judge. G answers to one prompt, all sampled from one adapter version."""

    group_id: str
    exchange_id: str
    session_key: str
    adapter: str
    """vLLM name of the LoRA that sampled every answer; "base" when none did."""
    request: bytes
    """The agent's request body, JSON: messages and tools."""
    prompt_token_ids: tuple[int, ...]
    """[P], shared by all answers."""
    answers: tuple[Answer, ...]
    """[G]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """judge -> train. A group and what the judge said of it."""

    group: Group
    scores: tuple[float, ...]
    """[G] unitless, 0..1, comparable within this group only."""
    explanations: tuple[str, ...]
    """[G] the judge's words."""
    judge_model: str
    rubric_hash: str
