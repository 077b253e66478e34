"""One run: an exam, rounds of sampling, reward and training, and the same exam again.

No proxy, store or canary is in it: the sampler, the selection, the trainer and vLLM are the
product's own. Each round starts from the adapter of the round before.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.learning.engine import sample, serve, vllm
from benchmarks.learning.tasks import Message, Prompt, Task
from demo.stack import MODEL, MODEL_FOLDER
from ingest.judge_noise import MeasuredNoise
from ingest.records import Answer, Group, ScoredGroup
from ingest.vllm.sampler import SampledAnswer
from learner.records import Parent, StepMetrics, TrainingJob
from learner.runs.selection import Noise, select_groups
from sidecar.settings import Learner

Kind = Literal["real", "null", "null, gate off"]
"""real: the task's reward. null: random rewards, whose noise is measured as the product measures a
judge's. null, gate off: random rewards whose noise nobody measured."""
PASSES: Final = 2
"""As `judge.passes`: a random reward is the mean over two."""
JUDGE: Final = ("random", "none", PASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of one run."""

    rounds: int
    groups: int
    """Prompts in a round."""
    size: int
    """Answers in a group."""
    exam_answers: int
    """Answers to each prompt of the exam."""
    learner: Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """What the answers to each prompt of the exam were worth."""

    rewards: tuple[float, ...]
    """[prompts] mean reward."""
    passed: float
    """Share of the answers that are right as a whole."""
    tokens: float
    """Mean length of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one run did."""

    task: str
    kind: Kind
    seed: int
    before: Exam
    after: Exam
    groups: int
    """Trained on."""
    dropped: int
    """Groups that the selection or the trainer left out."""
    steps: int
    update_norm: float
    """Sum over the steps of the L2 norms of the weights' changes."""
    seconds: float


def play(task: Task, kind: Kind, seed: int, plan: Plan, folder: Path) -> Played:
    """Run once. folder: empty; gets the adapters and the engine's log.

    Raises: RuntimeError when vLLM does not come up, SamplingError, LearnerError.
    """
    from learner.grpo.trainer import GrpoTrainer

    began = time.monotonic()
    parent = Parent(name="base")
    metrics: list[StepMetrics] = []
    trained = dropped = 0
    with vllm(folder) as url:
        before = _exam(url, task, parent.name, plan)
        for number in range(1, plan.rounds + 1):
            drawn = random.Random(f"{seed}/{number}")
            prompts = drawn.sample(task.train, min(plan.groups, len(task.train)))
            answers = sample(
                url,
                prompts,
                adapter=parent.name,
                answers=plan.size,
                max_tokens=task.max_tokens,
            )
            scored = [
                _scored(prompt, found, parent.name, kind, f"{seed}/{number}/{at}")
                for at, (prompt, found) in enumerate(zip(prompts, answers, strict=True))
            ]
            chosen = select_groups(
                scored,
                pack_tokens=plan.learner.pack_tokens,
                noise=_noise(seed, number, plan) if kind == "null" else None,
                advantage=plan.learner.advantage,
            )
            dropped += len(chosen.dropped)
            if not chosen.groups:
                continue
            made = folder / f"round-{number}"
            made.mkdir()
            outcome = GrpoTrainer().train(
                TrainingJob(
                    base_model_path=str(MODEL_FOLDER),
                    parent=parent,
                    groups=chosen.groups,
                    settings=plan.learner,
                    folder=made,
                    check_stop=lambda: None,
                    quiet=chosen.quiet,
                )
            )
            dropped += len(outcome.faults)
            trained += len(chosen.groups) - len(outcome.faults)
            if not outcome.metrics:
                continue
            metrics += outcome.metrics
            name = f"{MODEL}--v{number}"
            serve(url, name, made, instead_of=parent.name)
            parent = Parent(name=name, version=number, path=made)
        after = _exam(url, task, parent.name, plan) if metrics else before
    return Played(
        task=task.name,
        kind=kind,
        seed=seed,
        before=before,
        after=after,
        groups=trained,
        dropped=dropped,
        steps=len(metrics),
        update_norm=sum(step.update_norm for step in metrics),
        seconds=time.monotonic() - began,
    )


def _exam(url: str, task: Task, adapter: str, plan: Plan) -> Exam:
    answers = sample(
        url,
        task.exam,
        adapter=adapter,
        answers=plan.exam_answers,
        max_tokens=task.max_tokens,
    )
    told = [[_message(one) for one in found] for found in answers]
    passed = [
        prompt.passes(message)
        for prompt, found in zip(task.exam, told, strict=True)
        for message in found
    ]
    lengths = [len(one.token_ids) for found in answers for one in found]
    return Exam(
        rewards=tuple(
            sum(map(prompt.reward, found)) / len(found)
            for prompt, found in zip(task.exam, told, strict=True)
        ),
        passed=sum(passed) / len(passed),
        tokens=sum(lengths) / len(lengths),
    )


def _scored(
    prompt: Prompt, answers: Sequence[SampledAnswer], adapter: str, kind: Kind, key: str
) -> ScoredGroup:
    if kind == "real":
        scores = tuple(prompt.reward(_message(one)) for one in answers)
    else:
        scores = random_scores(len(answers), key)
    group = Group(
        group_id=key,
        exchange_id=key,
        session_key=key,
        adapter=adapter,
        request=json.dumps(prompt.chat).encode(),
        prompt_token_ids=answers[0].prompt_token_ids,
        answers=tuple(
            Answer(
                index=index,
                origin="sampled",
                message=one.message,
                finish_reason=one.finish_reason,
                token_ids=one.token_ids,
                logprobs=one.logprobs,
            )
            for index, one in enumerate(answers)
        ),
    )
    model, rubric, passes = JUDGE
    return ScoredGroup(
        group=group,
        scores=scores,
        explanations=("",) * len(scores),
        judge_model=model,
        rubric_hash=rubric,
        passes=passes,
    )


def random_scores(number: int, key: str) -> tuple[float, ...]:
    """Return scores that say nothing: each the mean of `PASSES` uniform numbers."""
    rng = random.Random(f"null/{key}")
    return tuple(sum(rng.random() for _ in range(PASSES)) / PASSES for _ in range(number))


def _noise(seed: int, number: int, plan: Plan) -> Noise:
    """Measure the random judge: sd(difference of two scorings) / sqrt(2)."""
    squares = [
        (one - other) ** 2
        for at in range(plan.groups)
        for one, other in zip(
            random_scores(plan.size, f"{seed}/{number}/{at}"),
            random_scores(plan.size, f"{seed}/{number}/{at}/again"),
            strict=True,
        )
    ]
    sd = math.sqrt(sum(squares) / len(squares) / 2)
    model, rubric, passes = JUDGE
    measured = MeasuredNoise(
        judge_model=model,
        rubric_hash=rubric,
        passes=passes,
        groups=plan.groups,
        sd=sd,
        pass_sd=sd * math.sqrt(passes),
    )
    return {JUDGE: measured}


def _message(answer: SampledAnswer) -> Message:
    message: dict[str, Any] = json.loads(answer.message)  # Any: JSON
    return message
