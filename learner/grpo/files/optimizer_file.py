"""Keep the optimiser's second moment beside the adapter that it belongs to.

`optimizer.safetensors` in the adapter's folder: vLLM does not read it, and the digest does not
cover it; the lineage has its SHA-256, and a file with another is not used. A folder without it, of
an older release or of another trainer, starts from nothing. The first moment is not kept: each run
has its own (`learner.grpo.optimizer`). The same moments are the same bytes in every process:
safetensors writes the entries of its metadata in an order that is drawn each time, so there is one
entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from learner.adapter_folder import LINEAGE, OPTIMIZER, file_digest, read_plain
from learner.errors import OptimizerStateError
from learner.grpo.optimizer import OptimizerState
from learner.policy.adapter_io import as_os_error
from learner.records import Parent

log = structlog.get_logger()

FORMAT = 3
HEAD = "optimizer"
"""The entry of the metadata, JSON of `format` and `steps`. Format 1 has these two as entries."""
FIRST, SECOND = "first.", "second."
"""Prefixes of the tensors' names. Formats 1 and 2 have the first moment too, which is not used."""


def save_state(state: OptimizerState, folder: Path) -> None:
    """Write the moments. Raises: OSError when the disk refuses."""
    tensors = {SECOND + name: one.cpu().contiguous() for name, one in state.second.items()}
    head = json.dumps({"format": FORMAT, "steps": state.steps})
    try:
        save_file(tensors, folder / OPTIMIZER, metadata={HEAD: head})
    except SafetensorError as error:
        raise as_os_error(error, folder / OPTIMIZER) from error


def parents_state(parent: Parent, parameters: Mapping[str, Parameter]) -> OptimizerState | None:
    """Return the moments beside the parent; None where it has none, or damaged ones (logged).

    Without them a run is a little noisier in its first steps, so they are no reason to stop.
    """
    if parent.path is None:
        return None
    try:
        _require_as_saved(parent.path)
        state = load_state(parent.path, parameters)
    except (OptimizerStateError, OSError) as error:
        log.warning("optimizer_state_unusable", parent=parent.name, error=str(error))
        return None
    if state is None:
        log.info("optimizer_state_missing", parent=parent.name)
    return state


def _require_as_saved(folder: Path) -> None:
    """Compare the moments with the digest in the folder's lineage, where both are there.

    The adapter's digest does not cover them, and one changed number among them changes every
    weight of the next run that it belongs to.
    Raises: OptimizerStateError; OSError.
    """
    path = folder / OPTIMIZER
    if not path.is_file():
        return
    try:
        lineage = json.loads(read_plain(folder / LINEAGE))
        said = lineage.get("algorithm", {}).get("optimizer_sha256")
    except FileNotFoundError:  # of another trainer
        return
    except (ValueError, AttributeError, RecursionError) as error:
        raise OptimizerStateError(
            f"{path}: {LINEAGE}, which has its digest, cannot be read ({error})"
        ) from error
    if said is not None and said != (found := file_digest(path)):
        raise OptimizerStateError(
            f"{path}: was changed after it was saved (SHA-256 {found[:12]}, {LINEAGE} says "
            f"{str(said)[:12]})"
        )


def load_state(folder: Path, parameters: Mapping[str, Parameter]) -> OptimizerState | None:
    """Read the moments that belong to these parameters; None when the folder has none.

    Raises: OptimizerStateError when the file is damaged or belongs to other parameters; OSError.
    """
    path = folder / OPTIMIZER
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            steps = _steps(path, file.metadata() or {})
            names = {name for name in file.keys() if not name.startswith(FIRST)}  # noqa: SIM118
            if names != {SECOND + name for name in parameters}:
                raise OptimizerStateError(f"{path}: belongs to other matrices")
            second = {n: _read(file.get_tensor(SECOND + n), p) for n, p in parameters.items()}
    except (SafetensorError, ValueError, TypeError, RecursionError) as error:
        raise OptimizerStateError(f"{path}: cannot be read ({error})") from error
    if any(bool((one < 0).any()) for one in second.values()):
        raise OptimizerStateError(f"{path}: a mean of squares is below 0")
    return OptimizerState(steps=steps, second=second)


def _steps(path: Path, metadata: Mapping[str, str]) -> int:
    """Read the number of steps behind the moments. Raises: OptimizerStateError, ValueError."""
    found = json.loads(metadata[HEAD]) if HEAD in metadata else metadata
    number = found.get("format") if isinstance(found, Mapping) else None
    steps = int(found.get("steps", "")) if str(number) in ("1", "2", str(FORMAT)) else -1
    if steps < 0:
        raise OptimizerStateError(f"{path}: has format {number!r}")
    return steps


def _read(tensor: Tensor, parameter: Parameter) -> Tensor:
    if tensor.shape != parameter.shape:
        raise ValueError(f"shape {tuple(tensor.shape)} in place of {tuple(parameter.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError("an infinity or NaN")
    return tensor.to(device=parameter.device, dtype=parameter.dtype)
