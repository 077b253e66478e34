"""Send a run and its steps to TensorBoard, MLflow or Weights & Biases (`learner.export`).

The packages are no dependency. A tracker that is not installed, or fails, is said once in the log
and costs its curves only: the store has them too. The tracker's run is opened at the first step, or
when the steps go on after those of a process that ended. Its end is told when the run itself has
ended: after the publication, or when its row says how it failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import structlog

from learner.explain import one_line
from learner.progress.estimate import Progress
from learner.progress.facts import Fact
from learner.progress.trackers import TRACKERS, Opening, Tracker
from learner.records import End, StepMetrics

log = structlog.get_logger()

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""Kind of tracker -> the package that it needs."""
PREFIX = "learner/"


def nothing_known(run_id: str) -> End | None:
    """Know of no run how it ended."""
    return None


class ExportedRun:
    """Implements `learner.progress.watch.Keeper` over a tracker."""

    def __init__(
        self,
        make: Callable[[Opening], Tracker],
        run_id: str,
        *,
        facts: Mapping[str, Fact] | None = None,
        how_ended: Callable[[str], End | None] = nothing_known,
    ) -> None:
        """make: opens a run. An attempt of the steps that begins anew gets a run and a name of its
        own, because a tracker keeps what it has.

        facts: what the run is made with. how_ended: as `Tracker.end_left` has it.
        """
        self._make = make
        self._run_id = run_id
        self._facts = facts or {}
        self._how_ended = how_ended
        self._attempts = 0
        self._tracker: Tracker | None = None
        self._failed = False

    def keep_progress(self, found: Progress) -> None: ...

    def drop_steps(self) -> None:
        self._try(lambda: self._close("killed"))
        self._attempts += 1

    def go_on(self, steps: Sequence[StepMetrics]) -> None:
        """The tracker has these steps: the process that was killed wrote them."""
        self._attempts += 1
        self._try(lambda: self._open(goes_on=True))

    def keep_step(self, metrics: StepMetrics) -> None:
        self._try(lambda: self._write(metrics))

    def end(self, how: End | None, adapter: str) -> None:
        # Also where a step could not be sent: a server that was away may be back.
        again = self._failed
        self._failed = False
        self._try(lambda: self._close(how, adapter), said=again)

    def _open(self, *, goes_on: bool) -> Tracker:
        again = f"-{self._attempts}" if self._attempts > 1 else ""
        name = f"{self._run_id}{again}"
        tracker = self._make(
            Opening(run_id=self._run_id, name=name, facts=self._facts, goes_on=goes_on)
        )
        self._tracker = tracker
        tracker.end_left(self._how_ended)
        return tracker

    def _write(self, metrics: StepMetrics) -> None:
        tracker = self._tracker or self._open(goes_on=False)
        tracker.write(metrics.step, figures_of(metrics))

    def _close(self, how: End | None, adapter: str = "") -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close(how, adapter)

    def _try(self, act: Callable[[], object], *, said: bool = False) -> None:
        """said: a failure of this tracker is in the log already."""
        if self._failed:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001  a tracker's library raises what it likes
            self._failed = True
            if not said:
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


def exported_run(
    setting: str,
    run_id: str,
    *,
    facts: Callable[[], Mapping[str, Fact]] = dict,
    how_ended: Callable[[str], End | None] = nothing_known,
) -> ExportedRun | None:
    """Return the export that `learner.export` names; None when it names none, or cannot (logged).

    setting: `tensorboard:DIR`, `mlflow:URI`, `wandb:PROJECT`, or "". facts, how_ended: as
    `ExportedRun` has them.
    """
    if not setting:
        return None
    if why := why_no_export(setting):
        log.warning("export_unavailable", run_id=run_id, export=setting, why=why)
        return None
    kind, _, place = setting.partition(":")
    return ExportedRun(
        lambda opening: TRACKERS[kind](place, opening),
        run_id,
        facts=facts(),
        how_ended=how_ended,
    )
