"""Send the steps of a run to TensorBoard, MLflow or Weights & Biases (`learner.export`).

The packages are imported when a run begins, and are no dependency. A tracker that is not installed,
or fails, is said once in the log and costs its curves only: the store has them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import structlog

from learner.explain import one_line
from learner.progress.estimate import Progress
from learner.records import StepMetrics

log = structlog.get_logger()

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""Kind of tracker -> the package that it needs."""
PREFIX = "learner/"


class Tracker(Protocol):
    """One run in a tracker. It may raise anything."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a step's figures, by name."""
        ...

    def close(self) -> None:
        """Send what is buffered, and end the run."""
        ...


class ExportedRun:
    """Implements `learner.progress.watch.Keeper` over a tracker."""

    def __init__(self, make: Callable[[str], Tracker], run_id: str) -> None:
        """make: opens a run of this name. An attempt of the steps that begins anew gets a name of
        its own, because a tracker keeps what it has."""
        self._make = make
        self._run_id = run_id
        self._attempts = 0
        self._tracker: Tracker | None = None
        self._failed = False

    def keep_progress(self, found: Progress) -> None:
        if found.phase == "saving":
            self._try(self._close)

    def drop_steps(self) -> None:
        self._try(self._close)
        self._attempts += 1

    def go_on(self, steps: Sequence[StepMetrics]) -> None:
        """The tracker has these steps: the process that was killed wrote them."""
        self._attempts += 1

    def keep_step(self, metrics: StepMetrics) -> None:
        self._try(lambda: self._write(metrics))

    def _write(self, metrics: StepMetrics) -> None:
        if self._tracker is None:
            again = f"-{self._attempts}" if self._attempts > 1 else ""
            self._tracker = self._make(f"{self._run_id}{again}")
        self._tracker.write(metrics.step, figures_of(metrics))

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()

    def _try(self, act: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001  a tracker's library raises what it likes
            self._failed = True
            log.warning("export_failed", run_id=self._run_id, error=one_line(error))


def figures_of(metrics: StepMetrics) -> dict[str, float]:
    """Return the figures of a step that are finite numbers, by name. Pure."""
    return {
        PREFIX + name: float(value)
        for name, value in metrics.flat.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def why_no_export(setting: str) -> str:
    """Say why `learner.export` cannot work here; "" when it can. Imports nothing."""
    kind = setting.partition(":")[0]
    package = PACKAGES.get(kind)
    if package is None or find_spec(package) is not None:
        return ""
    return f"{package} cannot be imported; run `pip install {package}`, or remove the setting"


def exported_run(setting: str, run_id: str) -> ExportedRun | None:
    """Return the export that `learner.export` names; None when it names none, or cannot (logged).

    setting: `tensorboard:DIR`, `mlflow:URI`, `wandb:PROJECT`, or "".
    """
    if not setting:
        return None
    if why := why_no_export(setting):
        log.warning("export_unavailable", run_id=run_id, export=setting, why=why)
        return None
    kind, _, place = setting.partition(":")
    return ExportedRun(lambda name: TRACKERS[kind](place, name), run_id)


class _TensorBoard:
    def __init__(self, folder: str, name: str) -> None:
        # torch has the writer, and a run has loaded torch; it needs the package tensorboard.
        summary: Any = import_module("torch.utils.tensorboard")
        self._writer = summary.SummaryWriter(log_dir=f"{folder}/{name}")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Mlflow:
    def __init__(self, uri: str, name: str) -> None:
        client: Any = import_module("mlflow").MlflowClient(tracking_uri=uri)
        found = client.get_experiment_by_name(EXPERIMENT)
        kept = client.create_experiment(EXPERIMENT) if found is None else found.experiment_id
        self._client = client
        self._run = client.create_run(kept, run_name=name).info.run_id

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


class _Wandb:
    def __init__(self, project: str, name: str) -> None:
        wandb: Any = import_module("wandb")
        # A run that goes on after a kill adds to its curves; by default it would replace them.
        self._run = wandb.init(project=project, name=name, id=name, resume="allow")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


EXPERIMENT = "learning-sidecar"
"""MLflow's experiment that holds the runs."""
TRACKERS: dict[str, Callable[[str, str], Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
    "wandb": _Wandb,
}
"""Kind -> opens a run: (place, name)."""
