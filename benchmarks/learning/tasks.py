"""The tasks: prompts for training and for the exam, and a reward that code computes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from demo.questions import load_questions
from demo.stand_in_rule import score_answer

Message = Mapping[str, Any]
"""The assistant message of a reply; Any: JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A chat request, and what an answer to it is worth."""

    id: str
    chat: Mapping[str, Any]
    """`messages`, and `tools` where there are any; Any: JSON."""
    reward: Callable[[Message], float]
    """0..1."""
    passes: Callable[[Message], bool]
    """True when the answer is right as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts to learn from, and others for the exam."""

    name: str
    train: tuple[Prompt, ...]
    exam: tuple[Prompt, ...]
    max_tokens: int
    passes_means: str
    """What `passes` counts, in words."""


def support() -> Task:
    """The demo's customers, scored by the rule of the demo's stand-in judge."""
    questions = load_questions()

    def prompt(name: str, question: str) -> Prompt:
        def reward(message: Message) -> float:
            return score_answer(str(message.get("content") or ""), question)[0]

        return Prompt(
            id=name,
            chat={
                "messages": [
                    {"role": "system", "content": questions.system},
                    {"role": "user", "content": question},
                ]
            },
            reward=reward,
            passes=lambda message: reward(message) >= 0.8,
        )

    return Task(
        name="support",
        train=tuple(prompt(one.id, one.turns[0]) for one in questions.traffic),
        exam=tuple(prompt(one.id, one.turns[0]) for one in questions.held_out),
        max_tokens=64,
        passes_means="reward of at least 0.8",
    )
