"""Log-probabilities under the policy at the start of a run, for the objectives that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from learner.grpo.checks import attempt
from learner.policy.logprobs import Policy, packs_of
from learner.records import Fault, TrainingGroup, TrainingJob


def with_start(
    policy: Policy, groups: Sequence[TrainingGroup], job: TrainingJob
) -> tuple[tuple[TrainingGroup, ...], dict[str, Fault]]:
    """Compute every group once under the policy, before its first step.

    Returns: the groups with `TrainableRow.start`, and the faults of those that failed.
    Raises: RunStoppedError between packs.
    """
    found: list[TrainingGroup] = []
    faults: dict[str, Fault] = {}
    for group in groups:
        one = attempt(group.group_id, job, partial(_start, policy, group, job))
        if isinstance(one, Fault):
            faults[group.group_id] = one
        else:
            found.append(one)
    job.report("")
    return tuple(found), faults


def _start(policy: Policy, group: TrainingGroup, job: TrainingJob) -> TrainingGroup:
    values: list[float] = []
    for pack in packs_of(policy, group, job.settings.pack_tokens):
        job.check_stop()
        with torch.no_grad():
            values += policy.logprobs(pack)[0].tolist()
    rest = iter(values)
    rows = tuple(
        replace(row, start=tuple(islice(rest, len(row.token_ids)))) if row.trainable else row
        for row in group.rows
    )
    return replace(group, rows=rows)
