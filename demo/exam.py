"""The exam: held-out questions that never passed the proxy, answered by adapters side by side.

Judge scores mean something only inside one group, so all adapters that are to be compared answer
one question together, blind and shuffled, through the product's own RULER.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from demo.agent import MAX_TOKENS
from demo.questions import Conversation, Questions
from ingest.ruler.judge import Judge
from ingest.ruler.ruler import score_answers
from ingest.vllm.sampler import Sampler, SampleRequest

BOOTSTRAP_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamAnswer:
    """One adapter's answer to one held-out question."""

    question_id: str
    message: bytes
    """The assistant message as JSON."""
    text: str
    tokens: int
    complete: bool
    """It ended by itself (no length limit) and with the end mark of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


async def sit_exam(
    sampler: Sampler, questions: Questions, *, upstream_model: str, answers: int, at_once: int = 32
) -> list[ExamAnswer]:
    """Let one adapter answer every held-out question `answers` times at temperature 1."""
    gate = asyncio.Semaphore(at_once)

    async def one(question: Conversation) -> ExamAnswer:
        async with gate:
            sampled = await sampler.sample(
                SampleRequest(
                    upstream_model=upstream_model,
                    chat={"messages": messages_of(questions, question)},
                    temperature=1.0,
                    max_tokens=MAX_TOKENS,
                )
            )
        text = json.loads(sampled.message).get("content") or ""
        return ExamAnswer(
            question_id=question.id,
            message=sampled.message,
            text=text,
            tokens=len(sampled.token_ids),
            complete=sampled.finish_reason == "stop" and text.rstrip().endswith((".", "!", "?")),
        )

    return list(
        await asyncio.gather(*(one(item) for item in questions.held_out for _ in range(answers)))
    )


def messages_of(questions: Questions, conversation: Conversation) -> list[dict[str, str]]:
    """The messages of a held-out question: the system prompt and its one turn."""
    return [
        {"role": "system", "content": questions.system},
        {"role": "user", "content": conversation.turns[0]},
    ]


async def grade(
    judge: Judge,
    questions: Questions,
    sheets: Mapping[str, Sequence[ExamAnswer]],
    *,
    rubric: str,
    seed: int,
) -> dict[str, dict[str, float]]:
    """Judge every question's answers of all sheets in one group.

    sheets: adapter -> its answers. Returns: adapter -> question id -> mean score, 0..1.
    """
    graded: dict[str, dict[str, float]] = {name: {} for name in sheets}

    async def one(question: Conversation) -> None:
        members = [
            (name, answer)
            for name, sheet in sheets.items()
            for answer in sheet
            if answer.question_id == question.id
        ]
        judgement = await score_answers(
            judge,
            context=messages_of(questions, question),
            tools=[],
            answers=[json.loads(answer.message) for _, answer in members],
            rubric=rubric,
            passes=1,
            seed=seed + int(question.id[1:]),
        )
        for name in sheets:
            own = [
                score
                for (member, _), score in zip(members, judgement.scores, strict=True)
                if member == name
            ]
            graded[name][question.id] = sum(own) / len(own)

    await asyncio.gather(*(one(question) for question in questions.held_out))
    return graded


def bootstrap(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean over questions with a 95% percentile interval; questions are the unit resampled."""
    rng = random.Random(seed)
    count = len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(BOOTSTRAP_DRAWS))
    return Interval(
        mean=sum(values) / count,
        low=means[int(0.025 * BOOTSTRAP_DRAWS)],
        high=means[int(0.975 * BOOTSTRAP_DRAWS) - 1],
    )
