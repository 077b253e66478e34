"""How much of a run is done, and how long the rest will take. Pure.

A run goes through stages. Each computes every one of its groups once. The time left is the work
left times the measured time of a unit of work, which is one token through the model forwards. The
present stage's own time is used as soon as one of its groups is done; before that, the time of the
stage before it. Nothing is said while no group of the run is done: loading takes as long as the
disk needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.records import Part, Phase, Stage, StageName, StepMetrics, TrainingGroup

COST: dict[StageName, float] = {
    "checking": 1.0,
    "anchoring": 1.0,
    "warming up": 3.0,
    "training": 3.0,
}
"""Work of a token. A backward pass takes twice the operations of a forward pass (Kaplan et al.,
arXiv:2001.08361, section 2.1). It only matters until the stage's own speed is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is."""

    phase: Phase
    answers_done: int = 0
    """Answers of the present phase that are done; with `answers` 0, nothing is counted yet."""
    answers: int = 0
    step: int = 0
    """The optimiser step that is computed, from 1; 0 outside of the steps."""
    steps: int = 0
    tokens_done: int = 0
    """Tokens of all passes of the run that are done."""
    tokens_left: int = 0
    left_s: float | None = None
    """Estimated seconds until the last step is done; None while nothing is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What a stage has taken so far."""

    work: float
    """Tokens times `COST`."""
    seconds: float

    @property
    def unit_s(self) -> float | None:
        """Seconds for a unit of work; None while none is done."""
        return self.seconds / self.work if self.work > 0 else None


def stage(name: StageName, groups: Sequence[TrainingGroup], *, steps: Sequence[int] = ()) -> Stage:
    """Return a stage over these groups, in the order in which they are computed.

    steps: [groups] the optimiser step of each group; empty: the stage takes none.
    """
    of_step = list(steps) or [0] * len(groups)
    return Stage(
        name=name,
        parts=tuple(_part(group, step) for group, step in zip(groups, of_step, strict=True)),
        steps=max(of_step, default=0),
    )


def _part(group: TrainingGroup, step: int) -> Part:
    rows = [row for row in group.rows if row.trainable]
    return Part(
        group_id=group.group_id,
        answers=len(rows),
        tokens=len(group.prompt_token_ids) + sum(len(row.token_ids) for row in rows),
        step=step,
    )


def time_left(stages: Sequence[Stage], done: int, measured: Timed, before: Timed) -> float | None:
    """Estimate the seconds that the stages still take.

    stages: the present one first; `done` of its parts are computed, which took `measured`.
    before: the time of the stage before it. Returns: None when neither is measured.
    """
    unit_s = measured.unit_s if measured.unit_s is not None else before.unit_s
    if unit_s is None:
        return None
    left = sum(
        COST[one.name] * sum(part.tokens for part in (one.parts[done:] if not place else one.parts))
        for place, one in enumerate(stages)
    )
    return left * unit_s


def progress(
    stages: Sequence[Stage], done: int, *, tokens_before: int, measured: Timed, before: Timed
) -> Progress:
    """Describe a run whose present stage, the first of `stages`, has `done` parts computed.

    tokens_before: of the stages that are over.
    """
    present = stages[0]
    computed, rest = present.parts[:done], present.parts[done:]
    return Progress(
        phase=present.name,
        answers_done=sum(part.answers for part in computed),
        answers=present.answers,
        step=rest[0].step if rest else present.steps,
        steps=present.steps,
        tokens_done=tokens_before + sum(part.tokens for part in computed),
        tokens_left=sum(part.tokens for part in rest) + sum(one.tokens for one in stages[1:]),
        left_s=time_left(stages, done, measured, before),
    )


def words(one: Progress) -> str:
    """Say in one line where a run is. The time is that of the run, the answers are the phase's."""
    if not one.answers:
        return SAID.get(one.phase, one.phase)
    at = f"step {one.step} of {one.steps}, " if one.steps else ""
    known = one.left_s is not None and one.tokens_left > 0
    left = f", {duration(one.left_s or 0.0)} left" if known else ""
    return f"{one.phase}: {at}{one.answers_done:,} of {one.answers:,} answers{left}"


SAID: dict[Phase, str] = {
    "measuring": "measuring how far the policy is from the base",
    "saving": "saving the adapter",
}
"""Phase in which nothing is counted -> its words, where its name does not say enough."""


def step_words(one: StepMetrics, *, steps: int = 0) -> str:
    """Say in one line what an optimiser step did. steps: of the run; 0: not known."""
    of = f" of {steps}" if steps else ""
    seconds = f"{one.seconds:,.0f}" if one.seconds >= 10 else f"{one.seconds:.2g}"
    return (
        f"step {one.step}{of}: reward {one.reward_mean:.2f}, spread {one.reward_spread:.2f}, "
        f"loss {one.loss:.2g}, KL {one.approx_kl:.1g}, {seconds} s"
    )


def duration(seconds: float) -> str:
    """Return an estimated duration in words: two digits of it are noise already."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
