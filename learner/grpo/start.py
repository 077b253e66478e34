"""Log-probabilities under the policy at the start of a run, for the objectives that read them.

With `learner.geometric_limit` they decide about each answer, as the check before them does: neither
they nor the recorded ones change while the run lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import structlog
import torch

from learner.grpo.answers import Judged, leave_out_far
from learner.grpo.checks import Checked, attempt, log_faults, log_left_out
from learner.policy.logprobs import Policy, joint_groups, joint_pack, packs_of, parts
from learner.records import Fault, Silent, TrainableRow, TrainingGroup, TrainingJob

log = structlog.get_logger()


def from_start(
    policy: Policy, checked: Checked, job: TrainingJob
) -> tuple[Checked, dict[str, Fault]]:
    """Compute the checked groups at the start of the run, and leave out the answers too far off.

    Returns: the groups that are left, with `TrainableRow.start`, and the faults of the others.
    Raises: RunStoppedError between packs.
    """
    groups, faults = with_start(policy, checked.groups, job)
    answers = dict(checked.answers)
    near: list[TrainingGroup] = []
    for group in groups:
        name = group.group_id
        known, least = answers[name], job.least_spread.get(name, 0.0)
        found = leave_out_far(group, known, job.settings, least_spread=least)
        if isinstance(found, Judged):
            log_left_out(found)
            near.append(found.group)
            answers[name] = found.answers
        else:
            faults[name] = found
    log_faults(faults)
    left = {name: one for name, one in answers.items() if name not in faults}
    return replace(checked, groups=tuple(near), answers=left), faults


def with_start(
    policy: Policy, groups: Sequence[TrainingGroup], job: TrainingJob
) -> tuple[tuple[TrainingGroup, ...], dict[str, Fault]]:
    """Compute every group once under the policy, before its first step.

    Groups that begin alike are computed together. Where that fails, or a value is not finite, each
    of them is computed alone, so that a fault is that of one group.
    Returns: the groups with `TrainableRow.start`, and the faults of those that failed.
    Raises: RunStoppedError between packs.
    """
    joint = joint_groups(groups, max_tokens=job.settings.pack_tokens if policy.shape.packs else 0)
    firsts = [replace(groups[unit[0]]) for unit in joint]  # copies: one group may come twice
    units = {id(first): unit for first, unit in zip(firsts, joint, strict=True)}

    def compute(first: TrainingGroup) -> dict[int, TrainingGroup | Fault]:
        return _unit(policy, groups, units[id(first)], job)

    known = job.ranks.each(firsts, compute)
    job.report("")
    found = {number: one for of_unit in known for number, one in of_unit.items()}
    in_order = [found[number] for number in range(len(groups))]
    faults = {
        group.group_id: one
        for group, one in zip(groups, in_order, strict=True)
        if isinstance(one, Fault)
    }
    return tuple(one for one in in_order if not isinstance(one, Fault)), faults


def _unit(
    policy: Policy, groups: Sequence[TrainingGroup], unit: Sequence[int], job: TrainingJob
) -> dict[int, TrainingGroup | Fault]:
    """Compute groups that begin alike, or one group: together if possible, else each alone."""
    found: dict[int, TrainingGroup | Fault] = {}
    if len(unit) > 1:
        found |= _together(policy, groups, unit, job)
    for number in unit:
        if number not in found:
            group = groups[number]
            found[number] = attempt(group.group_id, job, partial(_start, policy, group, job))
    return found


def _together(
    policy: Policy, groups: Sequence[TrainingGroup], together: Sequence[int], job: TrainingJob
) -> dict[int, TrainingGroup]:
    """Compute groups in one pack. Returns: none of them where it fails (logged)."""
    members = [groups[number] for number in together]

    def compute() -> list[float]:
        with torch.no_grad():
            found: list[float] = policy.logprobs(joint_pack(members))[0].tolist()
        return found

    # Nobody is named while they are computed: none of them is to blame if the process dies.
    values = attempt("", replace(job, watch=Silent()), compute)
    if isinstance(values, Fault) or not all(map(math.isfinite, values)):
        why = values.text if isinstance(values, Fault) else "a value is not finite"
        log.info("joint_pack_failed", groups=len(members), why=why)
        return {}
    rest = iter(values)
    done: dict[int, TrainingGroup] = {}
    for number, group, part in zip(together, members, parts(members), strict=True):
        done[number] = _with_values(group, islice(rest, part))
        job.watch.done(group.group_id)
    return done


def _start(policy: Policy, group: TrainingGroup, job: TrainingJob) -> TrainingGroup:
    values: list[float] = []
    for pack in packs_of(policy, group, job.settings.pack_tokens):
        job.check_stop()
        with torch.no_grad():
            values += policy.logprobs(pack)[0].tolist()
    return _with_values(group, iter(values))


def _with_values(group: TrainingGroup, values: Iterator[float]) -> TrainingGroup:
    rows = tuple(
        replace(row, start=_spread(row, islice(values, row.kept_tokens))) if row.trainable else row
        for row in group.rows
    )
    return replace(group, rows=rows)


def _spread(row: TrainableRow, values: Iterator[float]) -> tuple[float, ...]:
    """Return [S] values: those of the kept tokens in their places, the recorded ones elsewhere."""
    kept = row.kept or (True,) * len(row.token_ids)
    return tuple(
        next(values) if keep else value for keep, value in zip(kept, row.logprobs, strict=True)
    )
