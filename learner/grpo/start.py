"""Log-probabilities under the policy at the start of a run, for the objectives that read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from learner.grpo.checks import attempt
from learner.policy.logprobs import Policy, packs_of
from learner.records import Fault, TrainableRow, TrainingGroup, TrainingJob


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
        replace(row, start=_spread(row, islice(rest, row.kept_tokens))) if row.trainable else row
        for row in group.rows
    )
    return replace(group, rows=rows)


def _spread(row: TrainableRow, values: Iterator[float]) -> tuple[float, ...]:
    """Return [S] values: those of the kept tokens in their places, the recorded ones elsewhere."""
    kept = row.kept or (True,) * len(row.token_ids)
    return tuple(
        next(values) if keep else value for keep, value in zip(kept, row.logprobs, strict=True)
    )
