"""What a step adds up over its packs, and the metrics made of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.grpo.advantages import spread
from learner.grpo.objective import PackSums
from learner.grpo.optimizer import Update
from learner.policy.packing import Pack
from learner.records import StepMetrics, TrainingGroup


@dataclass(slots=True)
class StepSums:
    """Sums over the packs of one step."""

    tokens: int
    """Trainable tokens of the step."""
    denominator: float
    """What the loss's sums are divided by."""
    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    entropy: float = 0.0
    computed_tokens: int = 0

    def add(self, found: PackSums, entropy: float, pack: Pack) -> None:
        """Add a pack. entropy: nats, summed over its trainable tokens."""
        self.loss += found.loss.item()
        self.ratio += found.ratio
        self.clipped += found.clipped
        self.kl += found.kl
        self.entropy += entropy
        self.computed_tokens += len(pack.input_ids)


def step_metrics(
    number: int,
    groups: Sequence[TrainingGroup],
    sums: StepSums,
    update: Update,
    seconds: float,
) -> StepMetrics:
    """Return the metrics of a step, from 1, that took this long."""
    scores = [score for group in groups for score in group.scores]
    return StepMetrics(
        step=number,
        groups=len(groups),
        answers=sum(row.trainable for group in groups for row in group.rows),
        tokens=sums.tokens,
        computed_tokens=sums.computed_tokens,
        reward_mean=sum(scores) / len(scores),
        reward_spread=sum(spread(group.scores) for group in groups) / len(groups),
        loss=sums.loss / sums.denominator,
        ratio_mean=sums.ratio / sums.tokens,
        clip_share=sums.clipped / sums.tokens,
        approx_kl=sums.kl / sums.tokens,
        entropy=sums.entropy / sums.tokens,
        grad_norm=update.grad_norm,
        update_norm=update.update_norm,
        learning_rate=update.rate,
        seconds=seconds,
        tokens_per_s=sums.computed_tokens / seconds,
    )
