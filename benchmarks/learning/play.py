"""One night: an exam, answers to many prompts, and what several runs learn from them.

No proxy, store or canary is in it: the sampler, the selection, the trainer and vLLM are the
product's own. The answers of a night are sampled once; the runs of a night differ in how many of
its groups they use and in the scores, start from the base, and take the same exam.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal

from benchmarks.learning.engine import sample, serve, unload, vllm
from benchmarks.learning.kept import Kept
from benchmarks.learning.tasks import Message, Prompt, Task
from demo.stack import MODEL, MODEL_FOLDER
from ingest.judge_noise import MeasuredNoise
from ingest.records import Answer, Group, ScoredGroup
from ingest.vllm.sampler import SampledAnswer
from learner.adapter_folder import folder_digest
from learner.records import Parent, TrainingJob
from learner.runs.selection import Noise, select_groups
from sidecar.settings import Learner

Kind = Literal["few", "real", "noisy", "squeezed", "null"]
"""few: the first groups alone, scored as `real`. real: the task's reward. noisy: with Gaussian
noise. squeezed: in a tenth of the scale. null: random rewards. The noise of the last three is
measured as the product measures a judge's."""
NOISE: Final = 0.2
"""Standard deviation of a noisy judge's score, on a scale of 1."""
SQUEEZED: Final = (0.45, 0.1)
"""Scores of a judge that says little: the least, and how far they reach."""
PASSES: Final = 2
"""As `judge.passes`: a random reward is the mean over two."""
JUDGE: Final = ("benchmark", "none", PASSES)
BASE: Final = Parent(name="base")
OLDEST: Final = 3
"""Versions behind the champion of the oldest groups that `play_ages` learns from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of one night."""

    groups: int
    """Of a night."""
    few: int
    """Of those, the ones that the run `few` uses."""
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the runs of a night have in common."""

    before: Exam
    answers: list[list[SampledAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one run did."""

    task: str
    kind: str
    """A `Kind`, or `fresh-N` or `old-N` of `play_ages`."""
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
    """Selection and training."""


def play(
    task: Task, kinds: Sequence[Kind], seed: int, plan: Plan, kept: Kept, runs: Kept
) -> list[Played]:
    """Play one night, or what is not kept of it.

    kept: the answers; its folder gets the adapters and vLLM's log. runs: what each run did.

    Raises: RuntimeError when vLLM does not come up, SamplingError, LearnerError.
    """
    found = {kind: one for kind in kinds if (one := runs.get(kind, Played)) is not None}
    if len(found) < len(kinds):
        prompts = drawn(task.train, plan.groups, seed)
        with vllm(kept.folder) as url:
            night = kept.get("sampled", Sampled) or kept.put(
                "sampled",
                Sampled(_exam(url, task, "base", plan), _sampled(url, task, prompts, "base", plan)),
            )
            for kind in kinds:
                if kind not in found:
                    scored = _scored(prompts, night.answers, kind, str(seed), "base")
                    noise = measured_noise(prompts, night.answers, kind, seed)
                    used = scored[: plan.few] if kind == "few" else scored
                    found[kind] = runs.put(
                        kind,
                        _run(url, task, kind, seed, plan, used, noise, night.before, kept.folder),
                    )
    return [found[kind] for kind in kinds]


def play_ages(task: Task, seed: int, plan: Plan, kept: Kept) -> list[Played]:
    """Play what groups are worth whose adapter is one to `OLDEST` versions behind the champion.

    Each version learns from an equal part of the night's prompts, by its parent's own answers
    (`fresh-N`). From the same parent another one learns from the answers that the base gave to the
    same prompts (`old-N`), which are N versions old. kept, errors: as of `play`.
    """
    prompts = drawn(task.train, plan.groups, seed)
    part, parent, played = plan.groups // (OLDEST + 1), BASE, list[Played]()
    with vllm(kept.folder) as url:
        before = kept.get("before", Exam) or kept.put("before", _exam(url, task, "base", plan))
        for age in range(OLDEST + 1):
            asked = prompts[age * part : (age + 1) * part]
            for kind, adapter in (("old", "base"), ("fresh", parent.name)):
                if kind == "old" and not age:
                    continue
                name = f"{kind}-{age}"
                one = kept.get(name, Played)
                if one is None:
                    answers = _sampled(url, task, asked, adapter, plan)
                    scored = _scored(asked, answers, "real", f"{seed}/{age}", adapter)
                    made = _run(
                        url, task, name, seed, plan, scored, None, before, kept.folder, parent
                    )
                    one = kept.put(name, made)
                played.append(one)
            if not played[-1].steps:
                break
            before, folder = played[-1].after, kept.folder / name
            digest, version = folder_digest(folder), age + 1
            parent = Parent(name=f"{MODEL}--{name}", version=version, digest=digest, path=folder)
            serve(url, parent.name, folder)
    return played


def _sampled(
    url: str, task: Task, prompts: Sequence[Prompt], adapter: str, plan: Plan
) -> list[list[SampledAnswer]]:
    return sample(url, prompts, adapter=adapter, answers=plan.size, max_tokens=task.max_tokens)


def _scored(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[SampledAnswer]],
    kind: Kind,
    key: str,
    adapter: str,
) -> list[ScoredGroup]:
    pairs = enumerate(zip(prompts, answers, strict=True))
    return [scored_group(one, said, kind, f"{key}/{at}", adapter) for at, (one, said) in pairs]


def _run(
    url: str,
    task: Task,
    kind: str,
    seed: int,
    plan: Plan,
    scored: Sequence[ScoredGroup],
    noise: Noise | None,
    before: Exam,
    night: Path,
    parent: Parent = BASE,
) -> Played:
    from learner.grpo.trainer import GrpoTrainer

    began, folder = time.monotonic(), night / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    chosen = select_groups(
        scored,
        pack_tokens=plan.learner.pack_tokens,
        noise=noise,
        advantage=plan.learner.advantage,
    )
    after, dropped, trained, norms, seconds = before, len(chosen.dropped), 0, list[float](), 0.0
    if chosen.groups:
        outcome = GrpoTrainer().train(
            TrainingJob(
                base_model_path=str(MODEL_FOLDER),
                parent=parent,
                groups=chosen.groups,
                settings=plan.learner,
                folder=folder,
                check_stop=lambda: None,
                quiet=chosen.quiet,
                least_spread=chosen.least_spread,
                references=chosen.references,
            )
        )
        seconds = time.monotonic() - began
        dropped += len(outcome.faults)
        trained = len(chosen.groups) - len(outcome.faults)
        norms = [step.update_norm for step in outcome.metrics]
        if norms:
            name = f"{MODEL}--{kind}"
            serve(url, name, folder)
            after = _exam(url, task, name, plan)
            unload(url, name)
    return Played(
        task=task.name,
        kind=kind,
        seed=seed,
        before=before,
        after=after,
        groups=trained,
        dropped=dropped,
        steps=len(norms),
        update_norm=sum(norms),
        seconds=seconds,
    )


def drawn(prompts: Sequence[Prompt], number: int, seed: int) -> list[Prompt]:
    """Return so many prompts: all of them in a drawn order before one comes again."""
    rng, found = random.Random(seed), list[Prompt]()
    while len(found) < number:
        found += rng.sample(prompts, min(len(prompts), number - len(found)))
    return found


def _exam(url: str, task: Task, adapter: str, plan: Plan) -> Exam:
    answers = sample(
        url, task.exam, adapter=adapter, answers=plan.exam_answers, max_tokens=task.max_tokens
    )
    messages = [[_message(one) for one in found] for found in answers]
    pairs = list(zip(task.exam, messages, strict=True))
    return Exam(
        rewards=tuple(fmean(map(prompt.reward, found)) for prompt, found in pairs),
        passed=fmean(prompt.passes(one) for prompt, found in pairs for one in found),
        tokens=fmean(len(one.token_ids) for found in answers for one in found),
    )


def scored_group(
    prompt: Prompt, answers: Sequence[SampledAnswer], kind: Kind, key: str, adapter: str = "base"
) -> ScoredGroup:
    """Return the answers to a prompt as a group that a judge of this kind has scored."""
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
    scores = scores_of(prompt, answers, kind, key)
    return ScoredGroup(
        group=group,
        scores=scores,
        explanations=("",) * len(scores),
        judge_model=model,
        rubric_hash=rubric,
        passes=passes,
    )


def scores_of(
    prompt: Prompt, answers: Sequence[SampledAnswer], kind: Kind, key: str
) -> tuple[float, ...]:
    """Return a score for each answer; those that are drawn follow from the key."""
    rng = random.Random(f"{kind}/{key}")
    if kind == "null":
        return tuple(fmean(rng.random() for _ in range(PASSES)) for _ in answers)
    rewards = [prompt.reward(_message(one)) for one in answers]
    if kind == "noisy":
        return tuple(min(1.0, max(0.0, one + rng.gauss(0.0, NOISE))) for one in rewards)
    if kind == "squeezed":
        least, reach = SQUEEZED
        return tuple(least + reach * one for one in rewards)
    return tuple(rewards)


def measured_noise(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[SampledAnswer]], kind: Kind, seed: int
) -> Noise | None:
    """Measure a judge as the product does: sd(difference of two scorings) / sqrt(2). That of `real`
    and `few` is taken for one whose noise is not known."""
    if kind in ("few", "real"):
        return None
    squares = [
        (one - other) ** 2
        for at, (prompt, found) in enumerate(zip(prompts, answers, strict=True))
        for one, other in zip(
            scores_of(prompt, found, kind, f"{seed}/{at}"),
            scores_of(prompt, found, kind, f"{seed}/{at}/again"),
            strict=True,
        )
    ]
    sd = (fmean(squares) / 2) ** 0.5
    model, rubric, passes = JUDGE
    measured = MeasuredNoise(
        judge_model=model,
        rubric_hash=rubric,
        passes=passes,
        groups=len(prompts),
        sd=sd,
        pass_sd=sd * passes**0.5,
    )
    return {JUDGE: measured}


def _message(answer: SampledAnswer) -> Message:
    message: dict[str, Any] = json.loads(answer.message)  # Any: JSON
    return message
