"""The trainer: a few AdamW steps on a LoRA, from groups to a PEFT folder.

Before the first step, every group is compared with the log-probabilities of the adapter that
sampled it (`learner.grpo.checks`); groups that disagree are left out. A group whose loss or
gradient fails later is left out too: the weights are reset, and the run starts again without it, so
the result equals that of a run that never had the group.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import structlog
import torch
from opentelemetry import trace

from learner.errors import NonFiniteError
from learner.grpo.adapter_io import load_policy, save_adapter
from learner.grpo.advantages import spread
from learner.grpo.checks import NON_FINITE, attempt, check_groups, log_faults, refuse_most
from learner.grpo.logprobs import Policy
from learner.grpo.losses import LOSSES, ClipRange, TokenLoss
from learner.grpo.packing import Pack, pack_group
from learner.records import Fault, StepMetrics, TrainingGroup, TrainingJob, TrainingOutcome

log = structlog.get_logger()
tracer = trace.get_tracer("learner")

LOSS = "grpo"
BETAS = (0.9, 0.99)
"""AdamW's betas. A run has few steps, so the second moment must adapt faster than with 0.999."""
WEIGHT_DECAY = 0.0


@dataclass(slots=True)
class _StepSums:
    """Sums over the packs of one step."""

    loss: float = 0.0
    ratio: float = 0.0
    clipped: int = 0
    kl: float = 0.0
    entropy: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0

    def add(self, loss: TokenLoss, entropy: float, pack: Pack) -> None:
        self.loss += loss.loss_sum.item()
        self.ratio += loss.ratio_sum
        self.clipped += loss.clipped
        self.kl += loss.kl_sum
        self.entropy += entropy
        self.computed_tokens += len(pack.input_ids)


class _GroupsFailed(Exception):
    """Some groups of a step failed; the step's result is discarded."""

    def __init__(self, faults: dict[str, Fault]) -> None:
        super().__init__(f"{len(faults)} groups failed")
        self.faults = faults


class GrpoTrainer:
    """Implements `Trainer` with torch."""

    def train(self, job: TrainingJob) -> TrainingOutcome:
        """Load the policy, check the groups, run the steps, save the adapter.

        Raises: ParentError, DeviceError, OutOfMemoryError, FaultyGroupsError (DriftError,
            NonFiniteError), IncompleteAdapterError, RunStoppedError; OSError when the disk refuses.
        """
        job.report("")
        if job.settings.threads:
            torch.set_num_threads(job.settings.threads)
        policy = load_policy(job.base_model_path, job.parent, job.settings)
        job.check_stop()
        outcome = run_steps(policy, job)
        if outcome.metrics:
            save_adapter(policy, job.folder)
        return outcome


def deal(groups: Sequence[TrainingGroup], steps: int) -> list[list[TrainingGroup]]:
    """Distribute the groups over the steps in turn; each group is used once, no step is empty."""
    return [list(groups[first::steps]) for first in range(min(steps, len(groups)))]


def run_steps(policy: Policy, job: TrainingJob) -> TrainingOutcome:
    """Train the policy in place on the groups that can be trained on.

    Raises: what `check_groups` raises, before the first step; NonFiniteError before the step that
        would break the weights; RunStoppedError between packs.
    """
    checked = check_groups(policy, job)
    groups, faults = checked.groups, dict(checked.faults)
    parameters = _trainable(policy)
    start = [parameter.detach().clone() for parameter in parameters]
    metrics: list[StepMetrics] | None = None
    while metrics is None:
        try:
            metrics = _steps(policy, job, groups)
        except _GroupsFailed as failed:
            faults |= failed.faults
            log_faults(failed.faults)
            refuse_most(faults, len(job.groups))
            groups = tuple(group for group in groups if group.group_id not in faults)
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
    algorithm = {
        "loss": LOSS,
        "optimizer": "AdamW",
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "autocast": policy.autocast,
    }
    return TrainingOutcome(
        metrics=tuple(metrics),
        drift=checked.drift,
        algorithm=algorithm,
        faults=faults,
        drifted=checked.drifted,
    )


def _steps(policy: Policy, job: TrainingJob, groups: Sequence[TrainingGroup]) -> list[StepMetrics]:
    """Run every step. Raises: _GroupsFailed, NonFiniteError, RunStoppedError."""
    parameters = _trainable(policy)
    optimizer = torch.optim.AdamW(
        parameters, lr=job.settings.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    metrics: list[StepMetrics] = []
    for number, dealt in enumerate(deal(groups, job.settings.steps), 1):
        with tracer.start_as_current_span("optimiser step") as span:
            started = time.monotonic()
            optimizer.zero_grad(set_to_none=True)
            sums = accumulate(policy, dealt, job)
            grad_norm = float(
                torch.nn.utils.clip_grad_norm_(parameters, job.settings.max_grad_norm)
            )
            if not math.isfinite(grad_norm):
                raise NonFiniteError(f"step {number}: gradient norm is {grad_norm}")
            optimizer.step()
            metrics.append(_metrics(number, dealt, sums, grad_norm, time.monotonic() - started))
            span.set_attributes(asdict(metrics[-1]))
        log.info("step_done", **asdict(metrics[-1]))
    return metrics


def accumulate(policy: Policy, groups: Sequence[TrainingGroup], job: TrainingJob) -> _StepSums:
    """Add up the gradient of one step's loss, group by group and pack by pack.

    The loss is the mean over all trainable tokens of the step, however they are packed.
    Raises: _GroupsFailed, after all groups were tried; RunStoppedError.
    """
    packs = [pack_group(group, max_tokens=job.settings.pack_tokens) for group in groups]
    sums = _StepSums(tokens=sum(len(pack.targets) for of_group in packs for pack in of_group))
    parameters = _trainable(policy)
    faults: dict[str, Fault] = {}
    for group, of_group in zip(groups, packs, strict=True):
        fault = attempt(group.group_id, job, partial(_add_group, policy, of_group, job, sums))
        if fault is None and not _finite(parameters):
            fault = Fault(NON_FINITE, "its gradient is not finite")
        if fault is not None:
            faults[group.group_id] = fault
            for parameter in parameters:  # discarded: later groups are only checked for faults
                parameter.grad = None
    job.report("")
    if faults:
        raise _GroupsFailed(faults)
    return sums


def _add_group(
    policy: Policy, packs: Sequence[Pack], job: TrainingJob, sums: _StepSums
) -> Fault | None:
    clip = ClipRange(low=job.settings.clip_low, high=job.settings.clip_high)
    for pack in packs:
        job.check_stop()
        logprobs_N, entropy = policy.logprobs(pack)
        recorded_N = torch.tensor(pack.recorded, device=policy.device)
        advantages_N = torch.tensor(pack.advantages, device=policy.device)
        loss = LOSSES[LOSS](logprobs_N, recorded_N, advantages_N, clip)
        if not bool(torch.isfinite(loss.loss_sum)):
            return Fault(NON_FINITE, f"its loss is {loss.loss_sum.item()}")
        (loss.loss_sum / sums.tokens).backward()
        sums.add(loss, entropy, pack)
    return None


def _trainable(policy: Policy) -> list[torch.nn.Parameter]:
    return [p for p in policy.model.parameters() if p.requires_grad]


def _finite(parameters: Sequence[torch.nn.Parameter]) -> bool:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


def _metrics(
    number: int,
    groups: Sequence[TrainingGroup],
    sums: _StepSums,
    grad_norm: float,
    seconds: float,
) -> StepMetrics:
    tokens = sums.tokens
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
