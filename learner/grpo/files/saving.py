"""Write what a run made: the adapter, its moments, its probe and its curves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import structlog

from learner.adapter_folder import CURVES, OPTIMIZER, file_digest
from learner.explain import one_line
from learner.grpo.files.optimizer_file import save_state
from learner.grpo.optimizer import OptimizerState
from learner.policy.adapter_io import save_adapter
from learner.policy.logprobs import Policy
from learner.policy.probe import write_probe
from learner.progress import plot
from learner.records import TrainingJob, TrainingOutcome

log = structlog.get_logger()


def save(
    policy: Policy, job: TrainingJob, outcome: TrainingOutcome, state: OptimizerState
) -> dict[str, str | None]:
    """Write the adapter's folder. Returns: the digests of files that have no place in its own."""
    save_adapter(policy, job.folder)
    save_state(state, job.folder)
    _draw_curves(outcome, job.folder)
    return {
        "optimizer_sha256": file_digest(job.folder / OPTIMIZER),
        "probe_sha256": write_probe(
            policy, job.base_model_path, job.folder, tolerance=job.settings.max_drift
        ),
    }


def _draw_curves(outcome: TrainingOutcome, folder: Path) -> None:
    """Draw the steps. Without matplotlib, and where it fails, there is no plot (logged)."""
    try:
        plot.draw(
            [asdict(one) for one in outcome.metrics], folder / CURVES, title="optimiser steps"
        )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        (folder / CURVES).unlink(missing_ok=True)
        log.info("no_curves", why=one_line(error))
