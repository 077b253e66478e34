"""Check every group before the first step, and leave out what cannot be trained on.

Each group goes once through the model with the adapter that sampled it: the parent, the base, or
another registered version, whose folder is loaded for this. So answers of an ancestor are checked
as exactly as the parent's own. `learner.grpo.answers` decides about each answer. A group whose
sampler is not available is not trained on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
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
from learner.grpo.advantages import MIN_SPREAD
from learner.grpo.answers import (
    ALL_TOUCHED,
    DRIFT,
    GEOMETRIC,
    OUT_OF_VOCABULARY,
    QUIET,
    SAMPLE_SIZE,
    TOO_FEW,
    UNKNOWN,
    Judged,
    excess,
    judge_answers,
    leave_out_far,
    measure,
)
from learner.grpo.chance import BY_CHANCE
from learner.policy.adapter_io import sampled_by
from learner.policy.architecture import LONGROPE, fix_positions
from learner.policy.logprobs import Policy, joint_groups, joint_pack, packs_of
from learner.policy.memory import is_out_of_memory
from learner.policy.packing import Pack, packed_length
from learner.records import (
    CheckedAnswers,
    Drift,
    Fault,
    Parent,
    Silent,
    TrainableRow,
    TrainingGroup,
    TrainingJob,
)
from sidecar.records import BASE

log = structlog.get_logger()

FOLLOWED = 4
"""Groups that tell which frequencies the server uses: hundreds of tokens, where tens of them tell
0.4 nats a token from 0.04 of rounding."""
OUT_OF_MEMORY = "out_of_memory"
UNCHECKED = "drift_unchecked"
TOO_LONG = "too_long"
NON_FINITE = "non_finite_gradient"
FAILED = "computation_failed"
SAYS_NOTHING = (
    UNCHECKED, OUT_OF_MEMORY, TOO_LONG, ALL_TOUCHED, UNKNOWN, GEOMETRIC, TOO_FEW, SAMPLE_SIZE,
    BY_CHANCE, *QUIET,
)  # fmt: skip
"""Reasons that tell nothing about the other groups, nor of the settings."""
REASONS = (*SAYS_NOTHING, DRIFT, NON_FINITE, OUT_OF_VOCABULARY, FAILED)
"""Reasons for which the trainer leaves a group out."""
_COMPUTATION = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, AssertionError)
"""Errors of torch and a model's code for input that they cannot compute."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Result of checking every group."""

    groups: tuple[TrainingGroup, ...]
    """Groups to train on, in the job's order; answers that are left out are not trainable."""
    faults: Mapping[str, Fault]
    answers: Mapping[str, CheckedAnswers]
    """Group id -> what was decided about its answers, for the groups to train on."""
    drift: Drift | None
    """Drift over all groups to train on; None when nothing of them was recorded."""


def check_groups(policy: Policy, job: TrainingJob) -> Checked:
    """Compare every group with the log-probabilities of the adapter that sampled it.

    Raises: DriftError, FaultyGroupsError or OutOfMemoryError when more than half of the groups
        fail, none fits into memory, or all together drift; RunStoppedError between packs.
    """
    found: dict[str, Judged | Fault] = {}
    for name in dict.fromkeys(group.adapter for group in job.groups):
        members = [group for group in job.groups if group.adapter == name]
        known: Sequence[Judged | Fault]
        try:
            with _under(policy, job, name):
                known = job.ranks.each(members, lambda group: _check(policy, group, job))
        except ParentError as error:
            known = [Fault(UNCHECKED, one_line(error))] * len(members)
        found |= zip((group.group_id for group in members), known, strict=True)
    return gathered(found, job)


def gathered(found: Mapping[str, Judged | Fault], job: TrainingJob) -> Checked:
    """Return the result of checking every group. found: by group. Raises: as `check_groups`."""
    job.report("")
    faults = {group_id: one for group_id, one in found.items() if isinstance(one, Fault)}
    log_faults(faults)
    refuse_most(faults, len(job.groups))
    sound = [one for group in job.groups if isinstance(one := found[group.group_id], Judged)]
    return Checked(
        groups=tuple(one.group for one in sound),
        faults=faults,
        answers={one.group.group_id: one.answers for one in sound},
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
            # Of several groups none is named: the runs to come find out which it was.
            what, named = f"group {group_id}", {group_id: fault}
            if not group_id:
                what, named = "several groups", {}
            raise FaultyGroupsError(
                f"the GPU failed while it computed {what}: {fault.text}; what it computed is left "
                "out of the next run",
                named,
            ) from error
    # Outside of the handler, because the error's frames keep the tensors alive.
    torch.cuda.empty_cache()
    return fault


def faults_of(groups: Sequence[TrainingGroup], found: Sequence[object]) -> dict[str, Fault]:
    """Return the faults among what was found, by the group's id."""
    return {
        group.group_id: one
        for group, one in zip(groups, found, strict=True)
        if isinstance(one, Fault)
    }


def log_faults(faults: Mapping[str, Fault]) -> None:
    for group_id, fault in faults.items():
        log.warning("group_left_out", group_id=group_id, reason=fault.reason, text=fault.text)


def log_left_out(judged: Judged) -> None:
    for place, text in judged.texts.items():
        log.warning(
            "answer_left_out",
            group_id=judged.group.group_id,
            index=place,
            reason=judged.answers.left_out[place],
            text=text,
        )


def refuse_most(faults: Mapping[str, Fault], groups: int) -> None:
    """Refuse the run when more than half of its groups fail: the cause may lie outside them.

    faults: faults among all `groups`. Those of `SAYS_NOTHING`, which say nothing about the other
        groups, do not count: the others are trained on.
    Raises: DriftError, NonFiniteError, FaultyGroupsError, by the usual reason; OutOfMemoryError
        when no group fits.
    """
    counted = {g: f for g, f in faults.items() if f.reason not in SAYS_NOTHING}
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


def follow_server(policy: Policy, job: TrainingJob) -> None:
    """Set the rotary frequencies with which the recorded log-probabilities agree best.

    For models whose server may use one set or another (`learner.policy.architecture`); the first
    groups with answers of the base or of the parent tell, computed with both.
    """
    if not policy.shape.by_length:
        return
    known = [group for group in job.groups if group.adapter in (BASE, job.parent.name)]
    off = dict.fromkeys((False, True), 0.0)
    for stretched in off:
        fix_positions(policy.model, stretched=stretched)
        for group in known[:FOLLOWED]:
            with _under(policy, job, group.adapter):
                found = attempt(group.group_id, job, partial(_recompute, policy, group, job))
            if not isinstance(found, Fault):
                off[stretched] += _distance(group, found)
    # No evidence: as the policy was loaded. All processes must take the same.
    usual = policy.shape.by_length == LONGROPE
    chosen = usual if off[False] == off[True] else off[True] < off[False]
    stretched = job.ranks.first(lambda: chosen)
    fix_positions(policy.model, stretched=stretched)
    log.info("positions_chosen", kind=policy.shape.by_length, stretched=stretched, nats=off)


def _distance(group: TrainingGroup, found: Mapping[int, list[float] | Fault]) -> float:
    """Return the sum of |recorded - recomputed| over the tokens of a group, in nats."""
    return sum(
        abs(value - recorded)
        for place, values in found.items()
        if isinstance(values, list) and group.rows[place].recorded
        for value, recorded in zip(values, group.rows[place].logprobs, strict=True)
    )


def _under(policy: Policy, job: TrainingJob, name: str) -> AbstractContextManager[None]:
    if name == job.parent.name:
        return nullcontext()
    sampler = Parent(name=BASE) if name == BASE else job.samplers.get(name)
    if sampler is None:
        raise ParentError(f"adapter {name} is not registered")
    return sampled_by(policy, sampler)


def _check(policy: Policy, group: TrainingGroup, job: TrainingJob) -> Judged | Fault:
    found = attempt(group.group_id, job, lambda: _recompute(policy, group, job))
    return found if isinstance(found, Fault) else decide(group, found, job)


def decide(
    group: TrainingGroup, found: Mapping[int, list[float] | Fault], job: TrainingJob
) -> Judged | Fault:
    """As `judge_answers`, which it logs."""
    least = job.least_spread.get(group.group_id, MIN_SPREAD)
    judged = judge_answers(group, found, job.settings, least_spread=least)
    if isinstance(judged, Judged):
        log_left_out(judged)
        if group.sessions and group.adapter == job.parent.name:
            judged = replace(judged, group=_started(judged.group, found))
    return judged


def _started(group: TrainingGroup, values: Mapping[int, list[float] | Fault]) -> TrainingGroup:
    """Return sessions of the parent with `TrainableRow.start`: what was recomputed is without the
    server's rounding, which `learner.grpo.chance` would take for a move."""
    rows = tuple(
        row if isinstance(found := values.get(place, []), Fault) else replace(row, start=(*found,))
        for place, row in enumerate(group.rows)
    )
    return replace(group, rows=rows)


def _recompute(
    policy: Policy, group: TrainingGroup, job: TrainingJob
) -> dict[int, list[float] | Fault] | Fault:
    """Compute the log-probabilities of the trainable answers, by index.

    Returns: for an answer with a token id outside of the vocabulary, its fault; a fault alone when
        the prompt has one, or the model has too few positions.
    """
    prompt = _foreign(group.prompt_token_ids, policy.vocabulary) or _too_long(group, policy)
    if prompt is not None:
        return prompt
    foreign = {
        place: fault
        for place, row in enumerate(group.rows)
        if row.trainable and (fault := _foreign(row.token_ids, policy.vocabulary))
    }
    rows = tuple(
        replace(row, kept=(), trainable=row.trainable and place not in foreign)
        for place, row in enumerate(group.rows)
    )
    packs = packs_of(policy, replace(group, rows=rows), job.settings.pack_tokens)
    rest = iter(_values(policy, packs, job))
    return foreign | {
        place: [next(rest) for _ in row.token_ids]
        for place, row in enumerate(rows)
        if row.trainable
    }


def _foreign(ids: Sequence[int], vocabulary: int) -> Fault | None:
    token = next((one for one in ids if not 0 <= one < vocabulary), None)
    if token is None:
        return None
    text = f"token id {token} is outside the base's vocabulary of {vocabulary}"
    return Fault(OUT_OF_VOCABULARY, text)


def _too_long(group: TrainingGroup, policy: Policy) -> Fault | None:
    """Return the fault of a group that goes past the base's last position, or None.

    As `pack_tokens`, it costs the whole group: without its longest answers the others would teach
    that length costs nothing.
    """
    prompt = len(group.prompt_token_ids)
    longest = max((len(row.token_ids) for row in group.rows if row.trainable), default=0)
    most = policy.shape.positions
    if most is None or packed_length(prompt, [longest]) <= most:
        return None
    what = f"its prompt has {prompt} tokens and its longest answer {longest}"
    return Fault(TOO_LONG, f"{what}; the base has {most} positions")


def _check_together(differences: Sequence[Sequence[float]], limit: float) -> Drift | None:
    pooled = [value for of_group in differences for value in of_group]
    if not pooled:
        return None
    drift = measure(pooled)
    log.info("drift_checked", groups=len(differences), **asdict(drift))
    why = excess(drift, limit)
    if why is not None:
        raise DriftError(f"all groups together drift: {why}; {_DRIFT_ADVICE}")
    return drift


# Log-probabilities under the policy at the start of a run, for the objectives that read them, and
# for sessions.


def moved(group: TrainingGroup, job: TrainingJob) -> bool:
    """Return True for sessions that another adapter than the parent sampled: how far the policy is
    from it is asked before the first step, whatever the loss."""
    return bool(group.sessions) and group.adapter != job.parent.name


def from_start(
    policy: Policy | None, checked: Checked, job: TrainingJob, asked: Sequence[TrainingGroup]
) -> tuple[Checked, dict[str, Fault]]:
    """Compute checked groups at the start of the run, and leave out the answers too far off.

    policy: None: the groups have it already.
    asked: the groups that are computed; the others stay as they are.

    Returns: the groups that are left, with `TrainableRow.start`, and the faults of the others.
    Raises: RunStoppedError between packs.
    """
    groups: Sequence[TrainingGroup] = asked
    faults: dict[str, Fault] = {}
    if policy is not None:
        groups, faults = with_start(policy, asked, job)
    answers = dict(checked.answers)
    near: dict[str, TrainingGroup] = {}
    for group in groups:
        name = group.group_id
        known, least = answers[name], job.least_spread.get(name, MIN_SPREAD)
        found = leave_out_far(group, known, job.settings, least_spread=least)
        if isinstance(found, Judged):
            log_left_out(found)
            near[name] = found.group
            answers[name] = found.answers
        else:
            faults[name] = found
    log_faults(faults)
    left = {name: one for name, one in answers.items() if name not in faults}
    kept = [near.get(g.group_id, g) for g in checked.groups if g.group_id not in faults]
    return replace(checked, groups=tuple(kept), answers=left), faults


def with_start(
    policy: Policy, groups: Sequence[TrainingGroup], job: TrainingJob
) -> tuple[tuple[TrainingGroup, ...], dict[str, Fault]]:
    """Compute every group once under the policy, before its first step.

    Groups that begin alike are computed together, on a card others too. Where that fails, or a
    value is not finite, each of them is computed alone, so that a fault is that of one group.
    Returns: the groups with `TrainableRow.start`, and the faults of those that failed.
    Raises: RunStoppedError between packs.
    """
    alike = job.settings.pack_tokens if policy.shape.packs else 0
    joint = joint_groups(groups, max_tokens=alike, room=policy.joint)
    firsts = [replace(groups[unit[0]]) for unit in joint]  # copies: one group may come twice
    units = {id(first): unit for first, unit in zip(firsts, joint, strict=True)}

    def compute(first: TrainingGroup) -> dict[int, TrainingGroup | Fault]:
        return _unit(policy, groups, units[id(first)], job)

    known = job.ranks.each(firsts, compute)
    job.report("")
    found = {number: one for of_unit in known for number, one in of_unit.items()}
    in_order = [found[number] for number in range(len(groups))]
    sound = tuple(one for one in in_order if not isinstance(one, Fault))
    return sound, faults_of(groups, in_order)


def _unit(
    policy: Policy, groups: Sequence[TrainingGroup], unit: Sequence[int], job: TrainingJob
) -> dict[int, TrainingGroup | Fault]:
    """Compute groups that share a pack, or one group: together if possible, else each alone."""

    def values(pack: Pack) -> list[float] | Fault:
        found = _values(policy, [pack], job)
        finite = all(map(math.isfinite, found))
        return found if finite else Fault(NON_FINITE, "a value is not finite")

    members = [groups[number] for number in unit]
    if len(unit) > 1 and (found := together(members, job, values, by_token=True)) is not None:
        done = zip(unit, members, found, strict=True)
        return {number: _with_values(group, iter(part)) for number, group, part in done}
    alone = [attempt(one.group_id, job, partial(_start, policy, one, job)) for one in members]
    return dict(zip(unit, alone, strict=True))


def together(
    groups: Sequence[TrainingGroup],
    job: TrainingJob,
    compute: Callable[[Pack], list[float] | Fault],
    *,
    by_token: bool = False,
) -> list[list[float]] | None:
    """Compute groups in one pack. Nobody is named meanwhile: none of them is to blame if the
    process dies.

    by_token: `compute` finds a number for each kept token, not for each trainable row.
    Returns: what it finds, by group; None where it fails (logged): each is computed alone then.
    """
    found = attempt("", replace(job, watch=Silent()), lambda: compute(joint_pack(groups)))
    if isinstance(found, Fault):
        log.info("joint_pack_failed", groups=len(groups), why=found.text)
        return None
    rest = iter(found)
    parts: list[list[float]] = []
    for group in groups:
        rows = [row for row in group.rows if row.trainable]
        number = sum(row.kept_tokens for row in rows) if by_token else len(rows)
        parts.append(list(islice(rest, number)))
        job.watch.done(group.group_id)
    return parts


def _start(policy: Policy, group: TrainingGroup, job: TrainingJob) -> TrainingGroup:
    packs = packs_of(policy, group, job.settings.pack_tokens)
    return _with_values(group, iter(_values(policy, packs, job)))


def _values(policy: Policy, packs: Sequence[Pack], job: TrainingJob) -> list[float]:
    values: list[float] = []
    for pack in packs:
        job.check_stop()
        with torch.no_grad():
            values += policy.logprobs(pack)[0].tolist()
    return values


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
