"""A supervised start: the best answer of each group is made likelier, before the first step.

Where the base seldom gives a good answer, differences between its answers say little. The loss is
the mean negative log-probability of the tokens of each group's best answer, as in supervised
fine-tuning on scored traffic (best-of-N distillation). It has no trust region: a few steps are
enough, and only a run that starts from the base takes them.

A killed run goes on behind its last step that was kept. A checkpoint writes the adapter and its
moments, so short steps are not kept each (`APART_S`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog
import torch
from torch.nn import Parameter

from learner.errors import RunStoppedError
from learner.grpo.checkpoint import Snapshot, keep
from learner.grpo.checks import NON_FINITE, attempt, faults_of
from learner.grpo.optimizer import REFERENCE_SPREAD, SignalAdamW
from learner.policy.logprobs import Policy, packs_of
from learner.progress.watch import stage
from learner.records import Fault, Stage, TrainingGroup, TrainingJob

log = structlog.get_logger()

APART_S = 5.0
"""Seconds between two checkpoints, at least: what a kill may cost, in place of a write of three
times the adapter with each step. An adapter of 350 MB takes a second or two."""


def wanted_steps(job: TrainingJob) -> int:
    """Return the supervised steps that a run takes: none where it continues an adapter."""
    return job.settings.warmup if job.parent.path is None else 0


def best_answers(groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
    """Return each group with its best trainable answer alone; of equal ones the first. Pure.

    Groups of sessions have none: a part of a session is no answer, and `learner.grpo.chance` needs
    that nothing was learned from them before their step.
    """
    chosen: list[TrainingGroup] = []
    for group in groups:
        if group.sessions:
            continue
        places = [place for place, row in enumerate(group.rows) if row.trainable]
        if places:
            best = max(places, key=lambda place: (group.scores[place], -place))
            row, score = group.rows[best], group.scores[best]
            chosen.append(replace(group, rows=(row,), scores=(score,)))
    return chosen


def warming(groups: Sequence[TrainingGroup], job: TrainingJob, *, done: int = 0) -> list[Stage]:
    """Return a stage for each supervised step behind those that are done, for the watch. Pure."""
    chosen, steps = best_answers(groups), wanted_steps(job)
    if not chosen:
        return []
    return [
        replace(stage("warming up", chosen, steps=[number] * len(chosen)), steps=steps)
        for number in range(done + 1, steps + 1)
    ]


def warm_up(
    policy: Policy,
    kept: Snapshot,
    job: TrainingJob,
    optimizer: SignalAdamW,
    parameters: Mapping[str, Parameter],
) -> tuple[Snapshot, Mapping[str, Fault]]:
    """Take the supervised steps that are not done, over all groups each, and keep where the run is.

    kept: the run as it is; the policy and the optimiser are in the same state.
    Returns: the run behind them; and the faults of the groups that failed, with which the weights
        are to be discarded.
    Raises: NonFiniteError, before a step that would break the weights; RunStoppedError.
    """
    chosen = best_answers(kept.checked.groups) if wanted_steps(job) else []
    tokens = sum(row.kept_tokens for group in chosen for row in group.rows)
    last, written = time.monotonic(), len(kept.warmed)
    numbers = range(len(kept.warmed) + 1, wanted_steps(job) + 1) if chosen else range(0)

    def add(group: TrainingGroup) -> float | Fault:
        one = attempt(group.group_id, job, partial(_add, policy, group, job, tokens))
        optimizer.add_group(REFERENCE_SPREAD)
        return one

    for number in numbers:
        try:
            found = job.ranks.each(chosen, add)
        except RunStoppedError:
            # The weights are those behind the last step: of this one there are only gradients.
            if len(kept.warmed) > written:
                keep(kept, job)
            raise
        job.report("")
        if faults := faults_of(chosen, found):
            return kept, faults
        optimizer.add_ranks(job.ranks)
        optimizer.step()
        nats = sum(one for one in found if not isinstance(one, Fault)) / tokens
        log.info("warmup_step_done", step=number, nats_a_token=nats)
        kept = replace(kept, warmed=(*kept.warmed, nats)).after_step(parameters, optimizer.state)
        if number == numbers[-1] or time.monotonic() - last >= APART_S:
            keep(kept, job)
            last, written = time.monotonic(), number
    return kept, {}


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
