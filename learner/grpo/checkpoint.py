"""What the trainer writes: checkpoints between two steps, and the files of a finished adapter.

In a checkpoint `state.json` has what was found out (the checked groups, the faults, the steps'
figures) and the SHA-256 of `tensors.safetensors`, which has the adapter, the optimiser's moments
and the state of torch's random numbers. Of the groups only what the trainer changed is written,
never tokens or texts: those are in the store, which may encrypt them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from learner.adapter_folder import CURVES, file_digest, read_plain
from learner.errors import CheckpointError
from learner.explain import one_line
from learner.grpo.chance import deal
from learner.grpo.checks import Checked
from learner.grpo.optimizer import Moments
from learner.policy.adapter_io import as_os_error, save_adapter
from learner.policy.logprobs import Policy
from learner.policy.self_test import write_probe
from learner.progress import export
from learner.records import (
    Fault,
    StepMetrics,
    TrainableRow,
    TrainingGroup,
    TrainingJob,
    TrainingOutcome,
)
from learner.resume import STATE

log = structlog.get_logger()

Record = TypeVar("Record", TrainableRow, TrainingGroup)

FORMAT = 4
TENSORS = "tensors.safetensors"
WEIGHT, RANDOM, DEVICE_RANDOM = "weight.", "random", "random."
FIRST, SECOND = "first.", "second."
"""Names of tensors, or their prefixes."""
_GIVEN = ("group_id", "prompt_token_ids", "token_ids", "rows")
"""Fields of a group or a row that the trainer never changes, or that are written by themselves."""


DAMAGE = (
    SafetensorError,
    msgspec.MsgspecError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)
"""Errors of reading a file that is damaged: other types than were written, or deep nesting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run between two of its steps."""

    checked: Checked
    """Its groups are those that are still trained on, with all that was found out about them."""
    faults: Mapping[str, Fault]
    """Faults of every group that was left out so far."""
    metrics: tuple[StepMetrics, ...] = ()
    """Figures of the steps that are done."""
    weights: Mapping[str, Tensor] | None = None
    """Parameter name -> value; None: that of the start."""
    moments: Moments | None = None
    """None: no step is done."""

    def after_step(
        self, parameters: Mapping[str, Parameter], moments: Moments, metrics: StepMetrics
    ) -> Snapshot:
        """Return the run after another step. The parameters are not copied: write it at once."""
        done = (*self.metrics, metrics)
        return replace(self, weights=dict(parameters), moments=moments, metrics=done)

    def without(self, failed: Mapping[str, Fault]) -> Snapshot:
        """Return the run at its start, without the groups that failed."""
        groups = tuple(one for one in self.checked.groups if one.group_id not in failed)
        return Snapshot(
            checked=replace(self.checked, groups=groups), faults={**self.faults, **failed}
        )


def keep(one: Snapshot, job: TrainingJob) -> None:
    """Keep where the run is, if its job says where. Raises: RunStoppedError."""
    if job.checkpoints is not None:
        job.checkpoints.keep(lambda folder: save_snapshot(one, job, folder))


def resumed(job: TrainingJob, parameters: Mapping[str, Parameter]) -> Snapshot | None:
    """Return where the run was when it was killed, and set the weights and the random numbers.

    Returns: None when it begins now. A checkpoint that cannot be used is discarded.
    Raises: OSError when it cannot be removed.
    """
    newest = job.checkpoints.newest() if job.checkpoints is not None else None
    if job.checkpoints is None or newest is None:
        return None
    try:
        one, random = load_snapshot(newest, job, parameters)
        set_random(random)
    except (CheckpointError, OSError) as error:
        job.checkpoints.discard(one_line(error))
        return None
    if one.weights is not None:
        set_weights(parameters, one.weights)
    log.info("run_goes_on", steps_done=len(one.metrics), groups=len(one.checked.groups))
    return one


def set_weights(parameters: Mapping[str, Parameter], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


def save_snapshot(one: Snapshot, job: TrainingJob, folder: Path) -> None:
    """Write a checkpoint. Raises: OSError."""
    tensors = {RANDOM: torch.get_rng_state()}
    if torch.cuda.is_initialized():
        for number, random in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"{DEVICE_RANDOM}{number}"] = random
    tensors |= _named(WEIGHT, one.weights or {})
    if one.moments is not None:
        tensors |= _named(FIRST, one.moments.first) | _named(SECOND, one.moments.second)
    try:
        save_file(tensors, folder / TENSORS)
    except SafetensorError as error:
        raise as_os_error(error, folder / TENSORS) from error
    given = {group.group_id: group for group in job.groups}
    state = {
        "checked": asdict(replace(one.checked, groups=())),
        "groups": [_changes(given[group.group_id], group) for group in one.checked.groups],
        "faults": {group_id: asdict(fault) for group_id, fault in one.faults.items()},
        "metrics": [asdict(step) for step in one.metrics],
        "has_weights": one.weights is not None,
        "moments_steps": None if one.moments is None else one.moments.steps,
        "tensors_sha256": file_digest(folder / TENSORS),
    }
    text = json.dumps(state)
    whole = {
        "format": FORMAT,
        "step": len(one.metrics),
        "steps": len(deal(one.checked.groups, job.settings.groups_per_step)),
        "sha256": _sha256(text),
        "state": text,
    }
    (folder / STATE).write_text(json.dumps(whole) + "\n", encoding="utf-8")


def load_snapshot(
    folder: Path, job: TrainingJob, parameters: Mapping[str, Parameter]
) -> tuple[Snapshot, Mapping[str, Tensor]]:
    """Read a checkpoint of this job.

    Returns: it, and the states of torch's random numbers, for `set_random`.
    Raises: CheckpointError when it is damaged, or belongs to another version; OSError.
    """
    try:
        whole = json.loads(read_plain(folder / STATE))
        if whole["format"] != FORMAT:
            raise CheckpointError(f"its format is {whole['format']!r}, not {FORMAT}")
        if _sha256(whole["state"]) != whole["sha256"]:
            raise CheckpointError(f"{STATE} was changed")
        state = json.loads(whole["state"])
        if file_digest(folder / TENSORS) != state["tensors_sha256"]:
            raise CheckpointError(f"{TENSORS} was changed")
        tensors = load_file(folder / TENSORS)
        given = {group.group_id: group for group in job.groups}
        groups = tuple(_with_changes(given, one) for one in state["groups"])
        checked = msgspec.convert(state["checked"], Checked, str_keys=True)
        moments_steps = state["moments_steps"]
        one = Snapshot(
            checked=replace(checked, groups=groups),
            faults=msgspec.convert(state["faults"], dict[str, Fault]),
            metrics=msgspec.convert(state["metrics"], tuple[StepMetrics, ...]),
            weights=_of(WEIGHT, tensors, parameters) if state["has_weights"] else None,
            moments=None
            if moments_steps is None
            else Moments(
                steps=int(moments_steps),
                first=_of(FIRST, tensors, parameters),
                second=_of(SECOND, tensors, parameters),
            ),
        )
    except DAMAGE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"cannot be read ({type(error).__name__}: {error})") from error
    return one, {name: t for name, t in tensors.items() if name.startswith(RANDOM)}


def set_random(states: Mapping[str, Tensor]) -> None:
    """Set torch's random numbers to those of a checkpoint. A card that is not there is left out.

    Raises: CheckpointError when they are no states of this torch.
    """
    try:
        torch.set_rng_state(states[RANDOM])
        for name, state in states.items():
            number = name.removeprefix(DEVICE_RANDOM) if name.startswith(DEVICE_RANDOM) else ""
            if number and int(number) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(number))
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"its random numbers cannot be set ({one_line(error)})") from error


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: one.detach().cpu().contiguous() for name, one in tensors.items()}


def _of(
    prefix: str, tensors: Mapping[str, Tensor], parameters: Mapping[str, Parameter]
) -> dict[str, Tensor]:
    """Return the tensors with this prefix, each on the device of its parameter."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensor = tensors[prefix + name]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise ValueError(f"{name} has another shape or type")
        found[name] = tensor.to(parameter.device)
    return found


def _changes(given: TrainingGroup, now: TrainingGroup) -> dict[str, Any]:
    rows = zip(given.rows, now.rows, strict=True)
    return {
        "group_id": now.group_id,
        "group": _changed(given, now),
        "rows": [_changed(before, after) for before, after in rows],
    }


def _changed(before: Record, after: Record) -> dict[str, Any]:
    return {
        field.name: getattr(after, field.name)
        for field in fields(before)
        if field.name not in _GIVEN and getattr(before, field.name) != getattr(after, field.name)
    }


def _with_changes(given: Mapping[str, TrainingGroup], changes: Mapping[str, Any]) -> TrainingGroup:
    group = given[changes["group_id"]]
    rows = zip(group.rows, changes["rows"], strict=True)
    changed = tuple(replace(row, **_frozen(of_row)) for row, of_row in rows)
    return replace(group, rows=changed, **_frozen(changes["group"]))


def _frozen(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values as the records hold them: lists are tuples there."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# Write what a run made: the adapter, its probe and its curves.


def save(policy: Policy, job: TrainingJob, outcome: TrainingOutcome) -> str | None:
    """Write the adapter's folder. Returns: the digest of its probe, as `write_probe`."""
    save_adapter(policy, job.folder)
    draw_curves(outcome, job.folder)
    return write_probe(policy, job.base_model_path, job.folder, tolerance=job.settings.max_drift)


def draw_curves(outcome: TrainingOutcome, folder: Path) -> None:
    """Draw the steps. Without matplotlib, and where it fails, there is no plot (logged)."""
    try:
        export.draw(
            [asdict(one) for one in outcome.metrics], folder / CURVES, title="optimiser steps"
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        (folder / CURVES).unlink(missing_ok=True)
        log.info("no_curves", why=one_line(error))
