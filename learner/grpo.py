"""The trainer: a few AdamW steps on a LoRA, from groups to a PEFT folder.

Before the first step changes anything, its forward pass is compared with what vLLM recorded under
the same adapter: when both disagree the ids, the temperature, the base or the adapter are not what
they are said to be, and nothing is learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import structlog
import torch
from opentelemetry import trace
from torch import Tensor

from learner.adapter_io import load_policy, save_adapter
from learner.advantages import spread
from learner.errors import DriftError, NonFiniteError
from learner.logprobs import Policy
from learner.losses import LOSSES, ClipRange, TokenLoss
from learner.packing import Pack, pack_group
from learner.records import Drift, StepMetrics, TrainingGroup, TrainingJob, TrainingOutcome

log = structlog.get_logger()
tracer = trace.get_tracer("learner")

LOSS = "grpo"
BETAS = (0.9, 0.99)
"""A run has few steps, so the second moment must follow faster than with 0.999."""
WEIGHT_DECAY = 0.0


@dataclass(slots=True)
class _StepSums:
    """What the packs of one step add up to."""

    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    entropy: float = 0.0
    computed_tokens: int = 0
    differences: list[Tensor] = field(default_factory=list)
    """Recorded minus recomputed, of the packs that were sampled under the parent."""

    def add(self, loss: TokenLoss, entropy: float, pack: Pack) -> None:
        self.loss += loss.loss_sum.item()
        self.ratio += loss.ratio_sum
        self.clipped += loss.clipped
        self.kl += loss.kl_sum
        self.entropy += entropy
        self.computed_tokens += len(pack.input_ids)


class GrpoTrainer:
    """`Trainer` on torch."""

    def train(self, job: TrainingJob) -> TrainingOutcome:
        """Load, step, save.

        Raises: ParentError, DriftError, NonFiniteError, IncompleteAdapterError, RunStoppedError.
        """
        if job.settings.threads:
            torch.set_num_threads(job.settings.threads)
        policy = load_policy(job.base_model_path, job.parent, job.settings)
        job.check_stop()
        outcome = run_steps(policy, job)
        save_adapter(policy, job.folder)
        return outcome


def deal(groups: Sequence[TrainingGroup], steps: int, parent: str) -> list[list[TrainingGroup]]:
    """Deal the groups over the steps like cards, each used once; no step is empty.

    Those sampled under the parent go first, so that the first step has some for the drift check.
    """
    ordered = sorted(groups, key=lambda group: group.adapter != parent)
    return [ordered[first::steps] for first in range(min(steps, len(ordered)))]


def run_steps(policy: Policy, job: TrainingJob) -> TrainingOutcome:
    """Train the policy in place.

    Raises: DriftError before the first step, NonFiniteError before the step that would break the
        weights, RunStoppedError between packs.
    """
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=job.settings.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    metrics: list[StepMetrics] = []
    drift: Drift | None = None
    for number, groups in enumerate(deal(job.groups, job.settings.steps, job.parent.name), 1):
        with tracer.start_as_current_span("optimiser step") as span:
            started = time.monotonic()
            packs = [
                pack
                for group in groups
                for pack in pack_group(group, max_tokens=job.settings.pack_tokens)
            ]
            sums = accumulate(policy, packs, job)
            if number == 1:
                drift = measure_drift(sums.differences)
                check_drift(drift, job.settings.max_drift)
            grad_norm = float(
                torch.nn.utils.clip_grad_norm_(parameters, job.settings.max_grad_norm)
            )
            if not math.isfinite(grad_norm):
                raise NonFiniteError(f"step {number}: gradient norm is {grad_norm}")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            metrics.append(
                _metrics(number, groups, packs, sums, grad_norm, time.monotonic() - started)
            )
            span.set_attributes(asdict(metrics[-1]))
        log.info("step_done", **asdict(metrics[-1]))
    algorithm = {
        "loss": LOSS,
        "optimizer": "AdamW",
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "autocast": policy.autocast,
    }
    return TrainingOutcome(metrics=tuple(metrics), drift=drift, algorithm=algorithm)


def accumulate(policy: Policy, packs: Sequence[Pack], job: TrainingJob) -> _StepSums:
    """Add up the gradient of one step's loss, pack by pack.

    The loss is the mean over all trainable tokens of the step, however they are packed.
    Raises: NonFiniteError, RunStoppedError.
    """
    tokens = sum(len(pack.targets) for pack in packs)
    clip = ClipRange(low=job.settings.clip_low, high=job.settings.clip_high)
    sums = _StepSums()
    for pack in packs:
        job.check_stop()
        logprobs_N, entropy = policy.logprobs(pack)
        recorded_N = torch.tensor(pack.recorded, device=policy.device)
        advantages_N = torch.tensor(pack.advantages, device=policy.device)
        loss = LOSSES[LOSS](logprobs_N, recorded_N, advantages_N, clip)
        if not bool(torch.isfinite(loss.loss_sum)):
            raise NonFiniteError(f"loss of group {pack.group_id} is {loss.loss_sum.item()}")
        (loss.loss_sum / tokens).backward()  # type: ignore[no-untyped-call]  # torch's own gap
        sums.add(loss, entropy, pack)
        if pack.adapter == job.parent.name:
            sums.differences.append((recorded_N - logprobs_N).detach())
    return sums


def measure_drift(differences: Sequence[Tensor]) -> Drift | None:
    """Sum up recorded minus recomputed log-probabilities; None when there are none."""
    if not differences:
        return None
    difference_N = torch.cat(list(differences))
    return Drift(
        mean=float(difference_N.mean()),
        mean_abs=float(difference_N.abs().mean()),
        max_abs=float(difference_N.abs().max()),
        ratio_mean=float((-difference_N).exp().mean()),
        tokens=len(difference_N),
    )


def check_drift(drift: Drift | None, limit: float) -> None:
    """Refuse to train on log-probabilities that the parent does not give.

    Raises: DriftError when the mean difference, or the importance ratio's distance from 1, is over
        the limit.
    """
    if drift is None:
        log.warning("drift_unchecked", reason="no group was sampled under the parent")
        return
    log.info("drift_checked", **asdict(drift))
    if not drift.mean_abs <= limit:
        raise DriftError(
            f"recorded and recomputed log-probabilities differ by {drift.mean_abs:.4f} nats a "
            f"token, over learner.max_drift = {limit}; check that serving.base_model_path is what "
            "vLLM serves and serving.logprobs_mode is vLLM's"
        )
    if not abs(drift.ratio_mean - 1) <= limit:
        raise DriftError(
            f"the importance ratio before the first step is {drift.ratio_mean:.4f} and not 1, "
            f"farther than learner.max_drift = {limit}"
        )


def _metrics(
    number: int,
    groups: Sequence[TrainingGroup],
    packs: Sequence[Pack],
    sums: _StepSums,
    grad_norm: float,
    seconds: float,
) -> StepMetrics:
    tokens = sum(len(pack.targets) for pack in packs)
    scores = [score for group in groups for score in group.scores]
    return StepMetrics(
        step=number,
        groups=len(groups),
        answers=sum(row.trainable for group in groups for row in group.rows),
        tokens=tokens,
        computed_tokens=sums.computed_tokens,
        reward_mean=sum(scores) / len(scores),
        reward_spread=sum(spread(group.scores) for group in groups) / len(groups),
        loss=sums.loss / tokens,
        ratio_mean=sums.ratio / tokens,
        clip_share=sums.clipped / tokens,
        approx_kl=sums.kl / tokens,
        entropy=sums.entropy / tokens,
        grad_norm=grad_norm,
        seconds=seconds,
        tokens_per_s=sums.computed_tokens / seconds,
    )
