"""Check every group before the first step, and leave out those that cannot be trained on.

Each group goes once through the model with the adapter that sampled it: the parent, the base, or
another registered version, whose folder is loaded for this. So answers of an ancestor are checked
as exactly as the parent's own. A group whose sampler is not available is not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TypeVar

import structlog
import torch

from learner.errors import (
    DriftError,
    FaultyGroupsError,
    LearnerError,
    NonFiniteError,
    OutOfMemoryError,
    ParentError,
)
from learner.explain import one_line
from learner.grpo.advantages import MIN_TRAINABLE, assign
from learner.grpo.drift import excess, measure
from learner.policy.adapter_io import is_out_of_memory, sampled_by
from learner.policy.logprobs import Policy, packs_of
from learner.records import Drift, Fault, Parent, TrainingGroup, TrainingJob
from sidecar.records import BASE
from sidecar.settings import Learner

log = structlog.get_logger()

OUT_OF_MEMORY = "out_of_memory"
DRIFT = "drift"
UNCHECKED = "drift_unchecked"
NON_FINITE = "non_finite_gradient"
OUT_OF_VOCABULARY = "token_out_of_vocabulary"
FAILED = "computation_failed"
REASONS = (OUT_OF_MEMORY, DRIFT, UNCHECKED, NON_FINITE, OUT_OF_VOCABULARY, FAILED)
"""Reasons for which the trainer leaves a group out."""
_COMPUTATION = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AssertionError)
"""Errors of torch and a model's code for input that they cannot compute."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of checking every group."""

    groups: tuple[TrainingGroup, ...]
    """Groups to train on, in the job's order; their drifting answers are not trainable."""
    faults: Mapping[str, Fault]
    drifted: Mapping[str, tuple[int, ...]]
    """Group id -> indices of its drifting answers, for the groups to train on."""
    drift: Drift | None
    """Drift over all groups to train on; None when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sound:
    """A group that can be trained on."""

    group: TrainingGroup
    drifted: tuple[int, ...]
    differences: list[float]
    """Recorded minus recomputed log-probabilities of the trainable answers, in nats."""


def check_groups(policy: Policy, job: TrainingJob) -> Checked:
    """Compare every group with the log-probabilities of the adapter that sampled it.

    Raises: DriftError, FaultyGroupsError or OutOfMemoryError when more than half of the groups
        fail, none fits into memory, or all together drift; RunStoppedError between packs.
    """
    found: dict[str, _Sound | Fault] = {}
    for name in dict.fromkeys(group.adapter for group in job.groups):
        members = [group for group in job.groups if group.adapter == name]
        found |= _check_members(policy, job, name, members)
    job.report("")
    faults = {group_id: one for group_id, one in found.items() if isinstance(one, Fault)}
    log_faults(faults)
    refuse_most(faults, len(job.groups))
    sound = [one for group in job.groups if isinstance(one := found[group.group_id], _Sound)]
    return Checked(
        groups=tuple(one.group for one in sound),
        faults=faults,
        drifted={one.group.group_id: one.drifted for one in sound if one.drifted},
        drift=_check_together([one.differences for one in sound], job.settings.max_drift),
    )


def attempt(group_id: str, job: TrainingJob, compute: Callable[[], T]) -> T | Fault:
    """Run a computation on one group; an error that the group causes becomes its fault.

    Raises: RunStoppedError; FaultyGroupsError when the GPU cannot be used after this group.
    """
    job.check_stop()
    job.report(group_id)
    try:
        found = compute()
        job.watch.done(group_id)
        return found
    except (*_COMPUTATION, MemoryError) as error:
        if isinstance(error, LearnerError):
            raise
        job.watch.done(group_id)
        full = is_out_of_memory(error)
        fault = Fault(
            OUT_OF_MEMORY if full else FAILED, f"{type(error).__name__}: {one_line(error)}"
        )
        if isinstance(error, torch.AcceleratorError) and not full:
            # After such an error every later call on the GPU fails too.
            raise FaultyGroupsError(
                f"the GPU failed while it computed group {group_id}: {fault.text}; the group is "
                "left out of the next run",
                {group_id: fault},
            ) from error
    # Outside of the handler, because the error's frames keep the tensors alive.
    torch.cuda.empty_cache()
    return fault


def log_faults(faults: Mapping[str, Fault]) -> None:
    """Log why each group is left out."""
    for group_id, fault in faults.items():
        log.warning("group_left_out", group_id=group_id, reason=fault.reason, text=fault.text)


def refuse_most(faults: Mapping[str, Fault], groups: int) -> None:
    """Refuse the run when more than half of its groups fail: the cause may lie outside them.

    faults: faults among all `groups`. Only computed groups count. Those whose sampler is gone, or
        that do not fit into memory, say nothing about the other groups, which are trained on.
    Raises: DriftError, NonFiniteError, FaultyGroupsError, by the usual reason; OutOfMemoryError
        when no group fits.
    """
    counted = {g: f for g, f in faults.items() if f.reason not in (UNCHECKED, OUT_OF_MEMORY)}
    total = groups - (len(faults) - len(counted))
    too_large = {g: f for g, f in faults.items() if f.reason == OUT_OF_MEMORY}
    if too_large and not total:
        raise OutOfMemoryError(
            f"{len(too_large)} of {len(too_large)} groups do not fit into memory: "
            f"{next(iter(too_large.values())).text}; lower learner.pack_tokens, or free memory on "
            "learner.device",
            too_large,
        )
    if 2 * len(counted) <= total:
        return
    reason, _ = Counter(fault.reason for fault in counted.values()).most_common(1)[0]
    text = next(fault.text for fault in counted.values() if fault.reason == reason)
    message = f"{len(counted)} of {total} groups fail, most with {reason}: {text}; "
    if reason == DRIFT:
        raise DriftError(f"{message}{_DRIFT_ADVICE}", counted)
    if reason == NON_FINITE:
        raise NonFiniteError(f"{message}lower learner.learning_rate", counted)
    raise FaultyGroupsError(
        f"{message}check that serving.base_model_path is what vLLM serves", counted
    )


_DRIFT_ADVICE = (
    "check that serving.base_model_path is what vLLM serves, serving.logprobs_mode is vLLM's, and "
    "vLLM's generation_config changes no temperature, top_p or top_k"
)


def _check_members(
    policy: Policy, job: TrainingJob, name: str, members: Sequence[TrainingGroup]
) -> dict[str, _Sound | Fault]:
    """Check the groups that one adapter sampled, loading it if needed."""
    try:
        with _under(policy, job, name):
            return {group.group_id: _check(policy, group, job) for group in members}
    except ParentError as error:
        return {group.group_id: Fault(UNCHECKED, one_line(error)) for group in members}


def _under(policy: Policy, job: TrainingJob, name: str) -> AbstractContextManager[None]:
    if name == job.parent.name:
        return nullcontext()
    sampler = Parent(name=BASE) if name == BASE else job.samplers.get(name)
    if sampler is None:
        raise ParentError(f"adapter {name} is not registered")
    return sampled_by(policy, sampler)


def _check(policy: Policy, group: TrainingGroup, job: TrainingJob) -> _Sound | Fault:
    found = attempt(group.group_id, job, lambda: _differences(policy, group, job))
    return found if isinstance(found, Fault) else _judge(group, found, job.settings)


def _differences(policy: Policy, group: TrainingGroup, job: TrainingJob) -> list[float] | Fault:
    """Recorded minus recomputed log-probabilities of the trainable answers, in order."""
    vocabulary = policy.vocabulary
    answers = (row.token_ids for row in group.rows if row.trainable)
    for ids in (group.prompt_token_ids, *answers):
        foreign = next((token for token in ids if not 0 <= token < vocabulary), None)
        if foreign is not None:
            text = f"token id {foreign} is outside the base's vocabulary of {vocabulary}"
            return Fault(OUT_OF_VOCABULARY, text)
    differences: list[float] = []
    for pack in packs_of(policy, group, job.settings.pack_tokens):
        job.check_stop()
        with torch.no_grad():
            logprobs_N, _ = policy.logprobs(pack)
        recorded_N = torch.tensor(pack.recorded, device=policy.device)
        differences += (recorded_N - logprobs_N).tolist()
    return differences


def _judge(group: TrainingGroup, differences: Sequence[float], settings: Learner) -> _Sound | Fault:
    """Leave out drifting answers, and the group when too few remain or it drifts as a whole.

    The advantages of the others are taken again: their baseline had the answers that are left out.
    """
    limit = settings.max_drift
    rest = iter(differences)
    by_row = {
        place: list(islice(rest, len(row.token_ids)))
        for place, row in enumerate(group.rows)
        if row.trainable
    }
    over = {
        place: why for place, of_row in by_row.items() if (why := excess(measure(of_row), limit))
    }
    kept = [value for place, of_row in by_row.items() if place not in over for value in of_row]
    if len(by_row) - len(over) < MIN_TRAINABLE:
        place, why = next(iter(over.items()))
        text = f"{len(over)} of {len(by_row)} answers drift; answer {place}: {why}"
        return Fault(DRIFT, text)
    why_group = excess(measure(kept), limit)
    if why_group is not None:
        return Fault(DRIFT, why_group)
    for place, why in over.items():
        log.warning("answer_left_out", group_id=group.group_id, index=place, reason=DRIFT, text=why)
    if not over:
        return _Sound(group=group, drifted=(), differences=kept)
    counted = [row.counted and place not in over for place, row in enumerate(group.rows)]
    advantages = assign(group.scores, counted, settings.advantage)
    rows = tuple(
        replace(row, trainable=row.trainable and counts, counted=counts, advantage=advantage)
        for row, counts, advantage in zip(group.rows, counted, advantages, strict=True)
    )
    return _Sound(group=replace(group, rows=rows), drifted=tuple(over), differences=kept)


def _check_together(differences: Sequence[Sequence[float]], limit: float) -> Drift | None:
    """Measure the drift of all groups together. Raises: DriftError when it exceeds the limit."""
    pooled = [value for of_group in differences for value in of_group]
    if not pooled:
        return None
    drift = measure(pooled)
    log.info("drift_checked", groups=len(differences), **asdict(drift))
    why = excess(drift, limit)
    if why is not None:
        raise DriftError(f"all groups together drift: {why}; {_DRIFT_ADVICE}")
    return drift
