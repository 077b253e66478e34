"""The trainer: a few optimiser steps on a LoRA, from groups to a PEFT folder.

Before the first step, every group is compared with the log-probabilities of the adapter that
sampled it (`learner.grpo.checks`); groups that disagree are left out. A group whose loss or
gradient fails later is left out too: the weights are reset, and the run starts again without it, so
the result equals that of a run that never had the group.

After the checks and each step a checkpoint is kept (`learner.grpo.checkpoint`). A killed run goes
on from it, and ends with the weights that it would have had.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch
from opentelemetry import trace

from learner.adapter_folder import PATTERNS
from learner.errors import NonFiniteError
from learner.grpo import chance
from learner.grpo.advantages import spread
from learner.grpo.answers import QUIET, sample_size
from learner.grpo.base_kl import BaseKl, base_logprobs, measure_base_kl, penalty, require_near
from learner.grpo.checkpoint import Snapshot, keep, resumed, save, set_weights
from learner.grpo.checks import (
    NON_FINITE,
    Checked,
    attempt,
    check_groups,
    faults_of,
    follow_server,
    from_start,
    log_faults,
    moved,
    refuse_most,
    together,
)
from learner.grpo.losses import Objective, PackSums, objective, tokens_of
from learner.grpo.optimizer import BETAS, Moments, SignalAdamW, Update, rate_share
from learner.policy.adapter_io import ADAPTER, load_policy
from learner.policy.logprobs import Policy, joint_groups, packs_of
from learner.policy.memory import Checkpointing, prepare
from learner.policy.packing import Pack, keys_of
from learner.policy.self_test import compile_blocks
from learner.progress.watch import stage
from learner.ranks import Ranks
from learner.records import (
    CheckedAnswers,
    Fault,
    Stage,
    StageName,
    StepMetrics,
    TrainingGroup,
    TrainingJob,
    TrainingOutcome,
)
from sidecar.settings import Learner
from sidecar.visible import counted

# What a step adds up over its packs, and the metrics made of it.

KL_BUDGET = 0.2
"""Nats a token of divergence from the base above which `learner.advanced.kl_coef` works."""
CHECKPOINTING: Checkpointing = "auto"
"""Layers that are computed twice to save memory: as many as the longest input needs."""
UNTOLD = "untold"
"""In place of the reason of an answer that came not trainable, and no reason with it."""


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
    computed_tokens: int = 0
    alignment: float = 0.0
    alignment_variance: float = 0.0
    kl_coef: float = 0.0
    """Weight of the divergence from the base in the step's loss."""
    joint_failed: bool = False
    """A pack that several groups share could not be computed."""

    def add_ranks(self, ranks: Ranks) -> None:
        """Add up the sums of all processes, each of which added its own packs."""
        names = (
            "loss", "ratio", "clipped", "kl", "drift", "entropy", "computed_tokens",
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
    scores = [score for group in groups for score in group.rewards]
    return StepMetrics(
        step=number,
        groups=len(groups),
        answers=answers,
        tokens=sums.tokens,
        computed_tokens=sums.computed_tokens,
        reward_mean=sum(scores) / len(scores),
        reward_spread=sum(spread(group.rewards) for group in groups) / len(groups),
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
        sample_size=sample_size(groups),
        alignment=sums.alignment,
        alignment_variance=sums.alignment_variance,
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
    return dict(sorted(found.items()))


def peak_memory(device: torch.device) -> int:
    """Return the peak so far, in bytes: of what torch holds on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB but on macOS: getrusage(2)


log = structlog.get_logger()
tracer = trace.get_tracer("learner")

WIDTH, WIDTH_RATE, WIDTH_POWER = 576, 4e-4, 1.5
"""`learning_rate = "auto"`: measured at the width of SmolLM2-135M (docs/log.md), and 2e-5 at 4,096,
a width of 7 to 8 billion parameters, where others give 5e-6 to 2e-5 (docs/losses.md)."""


class _GroupsFailed(Exception):
    """Some groups of a step failed; the step's result is discarded."""

    def __init__(self, faults: dict[str, Fault]) -> None:
        super().__init__(f"{counted(len(faults), 'group')} failed")
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
        policy = load_policy(job.base_model_path, job.parent, job.settings, job.ranks)
        _require_same(policy, job)
        lengths, gathered = _sizes(policy, job)
        prepared = prepare(
            policy,
            CHECKPOINTING,
            longest=max(lengths, default=0),
            gathered=gathered,
            share=job.settings.memory_fraction,
            some=job.ranks.size == 1,
        )
        job.check_stop()
        if job.ranks.size == 1:
            policy = replace(policy, joint=prepared.joint)
        # Processes would compile each for itself; blocks that gather their shares, not at all.
        compiled = job.ranks.size == 1 and compile_blocks(policy, lengths)
        outcome, moments = run_steps(policy, job)
        how = {"checkpointing": prepared.checkpointing, "compiled": compiled}
        outcome = replace(outcome, algorithm={**outcome.algorithm, **how})
        if not outcome.metrics:
            return outcome
        job.watch.phase("saving")
        _require_same(policy, job, moments)
        probe = job.ranks.first(lambda: save(policy, job, outcome))
        return replace(outcome, algorithm={**outcome.algorithm, "probe_sha256": probe})


def _require_same(policy: Policy, job: TrainingJob, moments: Moments | None = None) -> None:
    tensors: dict[str, torch.Tensor] = dict(_trainable(policy))
    if moments is not None:
        for prefix, of in (("m.", moments.first), ("v.", moments.second)):
            tensors |= {prefix + name: tensor for name, tensor in of.items()}
    job.ranks.require_same(tensors)


def _sizes(policy: Policy, job: TrainingJob) -> tuple[list[int], int]:
    """Return the tokens of each pack, and the most keys on the paths of a pack's segments."""
    groups = (packs_of(policy, group, job.settings.pack_tokens) for group in job.groups)
    found = [(len(pack.input_ids), keys_of(pack)) for of_group in groups for pack in of_group]
    return [tokens for tokens, _ in found], max((keys for _, keys in found), default=0)


def run_steps(policy: Policy, job: TrainingJob) -> tuple[TrainingOutcome, Moments]:
    """Train the policy in place on the groups that can be trained on.

    Returns: the outcome, and the moments after the last step.
    Raises: what `check_groups` raises, before the first step; NonFiniteError before the step that
        would break the weights; RunStoppedError between packs.
    """
    aim = objective(job.settings)
    parameters = _trainable(policy)
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    follow_server(policy, job)
    # The first process has the checkpoints; what it found is everywhere.
    rate = rate_of(job.settings, int(policy.model.config.get_text_config().hidden_size))
    kept = job.ranks.first(lambda: resumed(job, parameters))
    if kept is None:
        kept = _checked(policy, job, aim)
        keep(kept, job)
    else:  # it died or was stopped: if it does again, the group that it computes is named
        policy = replace(policy, joint=0)
        if kept.weights is not None:
            set_weights(parameters, kept.weights)
    metrics: tuple[StepMetrics, ...] | None = None
    found: float | None = None
    while metrics is None:
        groups = kept.checked.groups
        optimizer = SignalAdamW(parameters, rate, kept.moments)
        try:
            job.watch.plan(stages(job, groups, ["training"]))
            job.watch.begin_steps(kept.metrics)
            steps = _steps(policy, job, kept, aim, optimizer)
            if job.signals is not None and any(one.sessions for one in groups):
                found, by_chance = shuffle_gate(steps, groups, job.signals)
                if by_chance:
                    raise _GroupsFailed(by_chance)
            metrics = steps
        except _GroupsFailed as failed:
            log_faults(failed.faults)
            kept = kept.without(failed.faults)
            refuse_most(kept.faults, len(job.groups))
            set_weights(parameters, start)
            keep(kept, job)
    checked, faults, groups = kept.checked, kept.faults, kept.checked.groups
    if metrics:
        job.watch.phase("measuring")
    away = measure_base_kl(policy, groups, job, turn=0) if metrics else None
    require_near(away, job, steps=len(metrics))
    adapter = policy.model.peft_config[ADAPTER]
    algorithm = {
        "loss": job.settings.loss,
        "advantage": job.settings.advantage,
        "optimizer": "AdamW, rate by the groups' signals",
        "betas": BETAS,
        "rank": adapter.r,
        "alpha": adapter.lora_alpha,
        **{name: dict(of) for name in PATTERNS if (of := getattr(adapter, name, None))},
        "accelerator": accelerator(policy.device),
        "autocast": policy.autocast,
        "kl_to_base": None if away is None else away.nats,
        "kl_to_base_tokens": 0 if away is None else away.tokens,
        "quiet_groups": quiet_groups(job, kept),
        "packs": policy.shape.packs,
    }
    outcome = TrainingOutcome(
        metrics=metrics,
        drift=checked.drift,
        algorithm=algorithm,
        faults=faults,
        answers=checked.answers,
        signal=found,
    )
    return outcome, optimizer.moments


def _checked(policy: Policy, job: TrainingJob, aim: Objective) -> Snapshot:
    before: list[StageName] = ["anchoring"] if aim.uses_start else []
    job.watch.plan(stages(job, job.groups, ["checking", *before, "training"]))
    checked = check_groups(policy, job)
    faults = dict(checked.faults)
    asked = [group for group in checked.groups if aim.uses_start or moved(group, job)]
    if asked:
        anchoring = stages(job, asked, ["anchoring"])
        job.watch.plan([*anchoring, *stages(job, checked.groups, ["training"])])
        checked, failed_at_start = from_start(policy, checked, job, asked)
        faults |= failed_at_start
        refuse_most(faults, len(job.groups))
    return Snapshot(checked=checked, faults=faults)


def stages(
    job: TrainingJob, groups: Sequence[TrainingGroup], names: Sequence[StageName]
) -> list[Stage]:
    dealt = chance.deal(groups, job.settings.groups_per_step)
    in_order = [group for of_step in dealt for group in of_step]
    numbers = [number for number, of_step in enumerate(dealt, 1) for _ in of_step]
    return [
        stage(one, in_order, steps=numbers) if one == "training" else stage(one, groups)
        for one in names
    ]


def shuffle_gate(
    steps: Sequence[StepMetrics], groups: Sequence[TrainingGroup], signals: Sequence[float]
) -> tuple[float | None, dict[str, Fault]]:
    """Return z of a run with sessions, and those of its groups that it must not learn from.

    signals: as `TrainingJob.signals`.
    """
    found = chance.score([(one.alignment, one.alignment_variance) for one in steps])
    why = chance.why_not(found, signals)
    if why is None:
        return found, {}
    fault = Fault(chance.BY_CHANCE, why)
    return found, {one.group_id: fault for one in groups if one.sessions}


def rate_of(settings: Learner, hidden: int) -> float:
    """Return the learning rate that the settings name. hidden: width of the base."""
    return settings.learning_rate or WIDTH_RATE * (WIDTH / hidden) ** WIDTH_POWER


def _steps(
    policy: Policy, job: TrainingJob, kept: Snapshot, aim: Objective, optimizer: SignalAdamW
) -> tuple[StepMetrics, ...]:
    """Raises: _GroupsFailed, NonFiniteError, RunStoppedError."""
    groups, parameters = kept.checked.groups, _trainable(policy)
    for number, dealt in enumerate(chance.deal(groups, job.settings.groups_per_step), 1):
        if number <= len(kept.metrics):
            continue
        with tracer.start_as_current_span("optimiser step") as span:
            started = time.monotonic()
            away = measure_base_kl(policy, dealt, job, turn=number)
            require_near(away, job, steps=number - 1)
            weight = kl_weight(away, job.settings)
            sums = accumulate(policy, dealt, job, aim, optimizer, weight, first=number == 1)
            if sums.joint_failed:
                policy = replace(policy, joint=0)
            optimizer.add_quiet(quiet_groups(job, kept) * len(dealt) / len(groups))
            try:
                update = optimizer.step()
            except NonFiniteError as error:
                raise NonFiniteError(f"step {number}: {error}") from error
            seconds = time.monotonic() - started
            done = step_metrics(number, dealt, sums, update, seconds, peak_memory(policy.device))
            if away is not None:
                done = replace(done, kl_base=away.nats, kl_base_tokens=away.tokens)
            done = replace(done, left_out=left_out(dealt, job, kept.checked, kept.faults, sums))
            span.set_attributes({k: v for k, v in done.flat.items() if v is not None})
        job.watch.step(done)
        kept = kept.after_step(parameters, optimizer.moments, done)
        keep(kept, job)
    return kept.metrics


def accumulate(
    policy: Policy,
    groups: Sequence[TrainingGroup],
    job: TrainingJob,
    aim: Objective,
    optimizer: SignalAdamW,
    kl_coef: float = 0.0,
    *,
    first: bool = False,
) -> StepSums:
    """Give the optimiser the gradient of one step's loss: of groups that share a pack together, of
    the others one by one.

    kl_coef: weight of the divergence from the base, as a mean over the step's tokens.
    first: the run has learned nothing yet that sessions could agree with.
    Raises: _GroupsFailed, after all groups were tried; RunStoppedError.
    """
    # By object: two groups may have one id.
    packs = {id(group): packs_of(policy, group, job.settings.pack_tokens) for group in groups}
    all_packs = [pack for group in groups for pack in packs[id(group)]]
    sums = StepSums(
        tokens=sum(len(pack.targets) for pack in all_packs),
        denominator=aim.denominator(all_packs),
        kl_coef=kl_coef,
    )

    def add(group: TrainingGroup) -> list[float] | Fault:
        of_group = packs[id(group)]
        found = attempt(group.group_id, job, partial(_add_group, policy, of_group, job, aim, sums))
        if isinstance(found, Fault):
            optimizer.forget()  # the step is discarded; the next group is looked at alone
        else:
            optimizer.add_group(rate_share(group, job))
        return found

    before = replace(sums)
    joint = _add_joint(policy, groups, job, aim, optimizer, sums)
    if joint is None:
        sums, joint = replace(before, joint_failed=True), {}
    alone = [group for number, group in enumerate(groups) if number not in joint]
    rest = iter(job.ranks.each(alone, add))
    found = [joint[n] if n in joint else next(rest) for n in range(len(groups))]
    job.report("")
    # With one fault the step is discarded; the others were only looked for.
    if faults := faults_of(groups, found):
        raise _GroupsFailed(faults)
    optimizer.add_ranks(job.ranks)
    sums.add_ranks(job.ranks)
    for group, moved_A in zip(groups, found, strict=True):
        if group.sessions and not first and not isinstance(moved_A, Fault):
            t, v = chance.of_group(group, moved_A)
            sums.alignment += t
            sums.alignment_variance += v
    return sums


def _add_joint(
    policy: Policy,
    groups: Sequence[TrainingGroup],
    job: TrainingJob,
    aim: Objective,
    optimizer: SignalAdamW,
    sums: StepSums,
) -> dict[int, list[float]] | None:
    """Give the optimiser the groups that share packs, as the first ones of a step.

    Returns: number of each -> as `_add_group`. None, without any gradient left, when a pack fails.
    """
    done: dict[int, list[float]] = {}
    for unit in joint_groups(groups, room=policy.joint):
        if len(unit) == 1:
            continue
        members = [groups[number] for number in unit]
        found = together(members, job, lambda one: _add_group(policy, [one], job, aim, sums))
        if found is None:
            optimizer.forget()
            return None
        done |= zip(unit, found, strict=True)
        for group in members:
            optimizer.add_group(rate_share(group, job))
    return done


def _add_group(
    policy: Policy, packs: Sequence[Pack], job: TrainingJob, aim: Objective, sums: StepSums
) -> list[float] | Fault:
    """Give the parameters the gradient of a group.

    Returns: `Tokens.since_start` of each trainable row.
    """
    moved_A: list[float] = []
    for pack in packs:
        job.check_stop()
        # Before the policy's own pass: the adapter is off meanwhile.
        base_N = base_logprobs(policy, pack) if sums.kl_coef else None
        logprobs_N, entropy = policy.logprobs(pack)
        tokens = tokens_of(pack, logprobs_N)
        found = aim.sums(tokens)
        loss = found.loss / sums.denominator
        if base_N is not None:
            loss = loss + sums.kl_coef * penalty(logprobs_N, base_N).sum() / sums.tokens
        job.ranks.backward(loss)
        if not bool(torch.isfinite(found.loss)):
            return Fault(NON_FINITE, f"its loss is {found.loss.item()}")
        sums.add(found, entropy, pack)
        moved_A += tokens.since_start
    if not _finite(_trainable(policy)):
        return Fault(NON_FINITE, "its gradient is not finite")
    return moved_A


def kl_weight(away: BaseKl | None, settings: Learner) -> float:
    """Return the weight of the divergence from the base in a step's loss: 0 within the budget."""
    over = away is not None and away.nats > KL_BUDGET
    return settings.advanced.kl_coef if over else 0.0


def accelerator(device: torch.device) -> str | None:
    """Return the name of a GPU, for the lineage; None for another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def quiet_groups(job: TrainingJob, kept: Snapshot) -> int:
    """Number of groups that the run or its check left out for their spread."""
    return job.quiet + sum(fault.reason in QUIET for fault in kept.faults.values())


def _trainable(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in policy.model.named_parameters() if p.requires_grad}


def _finite(parameters: Mapping[str, torch.nn.Parameter]) -> bool:
    """Return True when all gradients are finite, and their squares: beside one that is larger the
    other groups of the step would vanish."""
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    largest = torch.nn.utils.get_total_norm(gradients, math.inf)  # of numbers, not of squares
    return bool(torch.isfinite(largest.square()))
