"""A supervised start: the best answer of each group is made likelier, before the first step.

Where the base seldom gives a good answer, differences between its answers say little. The loss is
the mean negative log-probability of the tokens of each group's best answer, as in supervised
fine-tuning on scored traffic (best-of-N distillation). It has no trust region: a few steps are
enough, and only a run that starts from the base takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog
import torch

from learner.grpo.checks import NON_FINITE, attempt, faults_of
from learner.grpo.optimizer import SignalAdamW
from learner.policy.logprobs import Policy, packs_of
from learner.progress.estimate import stage
from learner.records import Fault, Stage, TrainingGroup, TrainingJob

log = structlog.get_logger()


def wanted_steps(job: TrainingJob) -> int:
    """Return the supervised steps that a run takes: none where it continues an adapter."""
    return job.settings.warmup if job.parent.path is None else 0


def best_answers(groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
    """Return each group with its best trainable answer alone; of equal ones the first. Pure."""
    chosen: list[TrainingGroup] = []
    for group in groups:
        places = [place for place, row in enumerate(group.rows) if row.trainable]
        if places:
            best = max(places, key=lambda place: (group.scores[place], -place))
            chosen.append(replace(group, rows=(group.rows[best],), scores=(group.scores[best],)))
    return chosen


def warming(groups: Sequence[TrainingGroup], job: TrainingJob) -> list[Stage]:
    """Return a stage for each supervised step, for the watch. Pure."""
    chosen, steps = best_answers(groups), wanted_steps(job)
    if not chosen:
        return []
    return [
        replace(stage("warming up", chosen, steps=[number] * len(chosen)), steps=steps)
        for number in range(1, steps + 1)
    ]


def warm_up(
    policy: Policy, groups: Sequence[TrainingGroup], job: TrainingJob, optimizer: SignalAdamW
) -> tuple[list[float], Mapping[str, Fault]]:
    """Take the supervised steps, over all groups each.

    Returns: nats a token of each step, before it; and the faults of the groups that failed, with
        which the weights are to be discarded.
    Raises: NonFiniteError, before a step that would break the weights; RunStoppedError.
    """
    losses: list[float] = []
    chosen = best_answers(groups) if wanted_steps(job) else []
    tokens = sum(row.kept_tokens for group in chosen for row in group.rows)
    if not chosen:
        return losses, {}
    for number in range(1, wanted_steps(job) + 1):

        def add(group: TrainingGroup) -> float | Fault:
            one = attempt(group.group_id, job, partial(_add, policy, group, job, tokens))
            optimizer.add_group(job.settings.reference_spread)
            return one

        found = job.ranks.each(chosen, add)
        job.report("")
        if faults := faults_of(chosen, found):
            return losses, faults
        optimizer.add_ranks(job.ranks)
        optimizer.step()
        losses.append(sum(one for one in found if not isinstance(one, Fault)) / tokens)
        log.info("warmup_step_done", step=number, nats_a_token=losses[-1])
    return losses, {}


def _add(policy: Policy, group: TrainingGroup, job: TrainingJob, tokens: int) -> float | Fault:
    """Add the gradient of a group's answer. Returns: its negative log-probability, in nats."""
    total = 0.0
    for pack in packs_of(policy, group, job.settings.pack_tokens):
        job.check_stop()
        loss = -policy.logprobs(pack)[0].sum()
        job.ranks.backward(loss / tokens)
        if not bool(torch.isfinite(loss)):
            return Fault(NON_FINITE, f"its loss is {loss.item()}")
        total += loss.item()
    return total
