"""What a step adds up over its packs, and the metrics made of it."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from learner.grpo.advantages import spread
from learner.grpo.checks import Checked
from learner.grpo.objective import PackSums
from learner.grpo.optimizer import Update
from learner.policy.packing import Pack
from learner.ranks import Ranks
from learner.records import CheckedAnswers, Fault, StepMetrics, TrainingGroup, TrainingJob

UNTOLD = "untold"
"""In place of the reason of an answer that came not trainable, and no reason with it."""

STALE = "stale"
"""Reason of the answers that `learner.stale_limit` left without a gradient in a step."""


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
    drift: float = 0.0
    entropy: float = 0.0
    stale: int = 0
    """Answers that `learner.stale_limit` left without a gradient."""
    computed_tokens: int = 0
    kl_coef: float = 0.0
    """Weight of the divergence from the base in the step's loss."""

    def add_ranks(self, ranks: Ranks) -> None:
        """Add up the sums of all processes, each of which added its own packs."""
        names = (
            "loss", "ratio", "clipped", "kl", "drift", "entropy", "stale", "computed_tokens",
        )  # fmt: skip
        values = torch.tensor([float(getattr(self, name)) for name in names], dtype=torch.float64)
        ranks.add([values])
        for name, value in zip(names, values.tolist(), strict=True):
            setattr(self, name, type(getattr(self, name))(value))

    def add(self, found: PackSums, entropy: float, pack: Pack) -> None:
        """Add a pack. entropy: nats, summed over its trainable tokens."""
        self.loss += found.loss.item()
        self.ratio += found.ratio
        self.clipped += found.clipped
        self.kl += found.kl
        self.drift += found.drift
        self.stale += found.stale
        self.entropy += entropy
        self.computed_tokens += len(pack.input_ids)


def step_metrics(
    number: int,
    groups: Sequence[TrainingGroup],
    sums: StepSums,
    update: Update,
    seconds: float,
    peak_memory_bytes: int = 0,
) -> StepMetrics:
    """Return the metrics of a step, from 1, that took this long. Pure."""
    rows = [row for group in groups for row in group.rows]
    answers = sum(row.trainable for row in rows)
    scores = [score for group in groups for score in group.scores]
    return StepMetrics(
        step=number,
        groups=len(groups),
        answers=answers,
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
        masked_answers=len(rows) - answers,
        masked_tokens=sum(
            len(row.token_ids) - row.kept_tokens
            for group in groups
            for row in group.rows
            if row.trainable and group.masked_by is not None
        ),
        answer_tokens=sum(len(row.token_ids) for row in rows if row.trainable) / answers,
        drift=sums.drift / sums.tokens,
        kl_coef=sums.kl_coef,
        peak_memory_bytes=peak_memory_bytes,
    )


def left_out(
    groups: Sequence[TrainingGroup],
    job: TrainingJob,
    checked: Checked,
    faults: Mapping[str, Fault],
    sums: StepSums,
) -> dict[str, int]:
    """Count what has no part in a step, by reason, as `StepMetrics.left_out` has it. Pure.

    groups: of the step. faults: group id -> why the trainer left it out so far.
    """
    found: Counter[str] = Counter()
    for group in groups:
        decided = checked.answers.get(group.group_id, CheckedAnswers()).left_out
        before = job.masked.get(group.group_id, {})
        for place, row in enumerate(group.rows):
            if not row.trainable:
                found[f"answers.{decided.get(place) or before.get(place) or UNTOLD}"] += 1
    found.update(f"groups.{fault.reason}" for fault in faults.values())
    if sums.stale:
        found[f"answers.{STALE}"] += sums.stale
    return dict(sorted(found.items()))


def peak_memory(device: torch.device) -> int:
    """Return the peak so far, in bytes: of what torch holds on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB but on macOS: getrusage(2)
