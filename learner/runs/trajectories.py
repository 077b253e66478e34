"""Turn whole trajectories, ranked against each other, into rows to train on. Pure.

A trajectory is one session's attempt at a task. Its reward is that of the whole, so each token that
the policy sampled in it has its advantage: reward minus the mean of the trajectories. The rows are
those of `ingest.sessions.rows`: a turn whose prompt begins with all that came before extends its
parent's row, so that the conversation is computed once, and each sampled token is trained on once.
All other tokens (prompts, tool results, answers that are context) are read and are no targets.

Rows of a group need one prompt, and trajectories of one task begin alike: what all rows share at
their beginning is the prompt, and the rest stands in the rows. An answer's log-probabilities hold
for the adapter and the temperature that it was sampled with, so a row whose answers differ in them
is given once for each, with those answers as targets.

Sessions whose first prompts differ are attempts at different tasks: their rewards do not compare,
and they make no group, however much of a system prompt they share.

No run is fed with it: the judge's ranking of sessions (`ingest.trajectories`) is shown and not
stored (docs/decisions/0030-ranked-sessions.md). Groups of one prompt (`learner.runs.selection`)
have one answer in each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ingest.sessions.rows import RowAnswer, TokenRow
from learner.grpo.advantages import assign
from learner.records import TrainableRow, TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledWith:
    """What an exchange was sampled with."""

    adapter: str
    temperature: float
    """Above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a task."""

    rows: tuple[TokenRow, ...]
    reward: float
    """Reward of the whole trajectory, unitless, 0..1."""


def trajectory_groups(
    trajectories: Sequence[Trajectory],
    sampled_with: Mapping[str, SampledWith],
    *,
    group_id: str,
    advantage: str,
) -> list[TrainingGroup]:
    """Return a group for each adapter that sampled some of the answers.

    trajectories: G >= 2 attempts at one task. sampled_with: exchange id -> how its answers were
        sampled; an exchange without is context.
    advantage: a key of `learner.grpo.advantages.ADVANTAGES`.
    Returns: groups with ids `<group_id>/<adapter>`; none where nothing was sampled, first prompts
        differ, or no token is common to the beginning of all rows.
    Raises: GroupTooSmallError for fewer than two trajectories.
    """
    rewards = [one.reward for one in trajectories]
    advantages = assign(rewards, (True,) * len(rewards), advantage)
    prompt = _shared(trajectories, sampled_with) if _of_one_task(trajectories) else ()
    found: dict[str, list[tuple[TrainableRow, float]]] = {}
    for trajectory, its_advantage in zip(trajectories, advantages, strict=True):
        for row in trajectory.rows if prompt else ():
            for how, answers in _targets(row, sampled_with).items():
                made = _trainable(row, answers, how, its_advantage, len(prompt))
                found.setdefault(how.adapter, []).append((made, trajectory.reward))
    return [
        TrainingGroup(
            group_id=f"{group_id}/{adapter}",
            adapter=adapter,
            prompt_token_ids=prompt,
            rows=tuple(row for row, _ in rows),
            scores=tuple(reward for _, reward in rows),
        )
        for adapter, rows in found.items()
    ]


def _of_one_task(trajectories: Sequence[Trajectory]) -> bool:
    """Return True if all trajectories begin with the same prompt, up to their first answer."""
    firsts = [min(one.rows, key=lambda row: row.number) for one in trajectories if one.rows]
    return len({tuple(row.token_ids[: row.answers[0].start]) for row in firsts}) <= 1


def _targets(
    row: TokenRow, sampled_with: Mapping[str, SampledWith]
) -> dict[SampledWith, list[RowAnswer]]:
    """Group the answers of a row that can be trained on by what they were sampled with."""
    found: dict[SampledWith, list[RowAnswer]] = {}
    for answer in row.answers:
        how = sampled_with.get(answer.exchange_id)
        if answer.logprobs and how is not None:
            found.setdefault(how, []).append(answer)
    return found


def _shared(
    trajectories: Sequence[Trajectory], sampled_with: Mapping[str, SampledWith]
) -> tuple[int, ...]:
    """Return the tokens with which all rows begin, before the first one to train on."""
    begins = [
        tuple(
            row.token_ids[: min(answer.start for answers in found.values() for answer in answers)]
        )
        for trajectory in trajectories
        for row in trajectory.rows
        if (found := _targets(row, sampled_with))
    ]
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*begins, strict=False))
    return tuple(tokens[0] for tokens in alike)


def _trainable(
    row: TokenRow, answers: Sequence[RowAnswer], how: SampledWith, advantage: float, prompt: int
) -> TrainableRow:
    stop = max(answer.stop for answer in answers)
    logprobs, kept = [0.0] * stop, [False] * stop
    for answer in answers:
        logprobs[answer.start : answer.stop] = answer.logprobs
        kept[answer.start : answer.stop] = [True] * len(answer.logprobs)
    return TrainableRow(
        token_ids=tuple(row.token_ids[prompt:stop]),
        logprobs=tuple(logprobs[prompt:]),
        kept=tuple(kept[prompt:]),
        advantage=advantage,
        temperature=how.temperature,
        trainable=True,
    )
