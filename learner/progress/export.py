"""Send a run and its steps to TensorBoard, MLflow or Weights & Biases (`learner.export`).

The packages are no dependency. A tracker that is not installed, or fails, is said once in the log
and costs its curves only: the store has them too. The tracker's run is opened at the first step, or
when the steps go on after those of a process that ended. Its end is told when the run itself has
ended: after the publication, or when its row says how it failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog
from sqlalchemy.orm import Session

from learner.errors import NothingToLearnError, RunStoppedError
from learner.explain import one_line
from learner.progress.trackers import TRACKERS, Fact, Opening, Tracker, facts_of
from learner.progress.watch import Keeper, Progress, RunWatch, StoredRun, how_ended
from learner.records import End, Parent, StepMetrics, Watch
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database

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


# Draw the steps of a run.

PANELS = (
    (
        "score, and spread within groups, of each\nstep's own groups, sampled before the run",
        ("reward_mean", "reward_spread"),
    ),
    ("loss", ("loss",)),
    ("KL, nats a token: to the sampler, to the base", ("approx_kl", "kl_base")),
    ("entropy, nats a token", ("entropy",)),
    ("share of tokens clipped", ("clip_share",)),
    ("gradient norm", ("grad_norm",)),
    ("norm of the update", ("update_norm",)),
    ("tokens of an answer", ("answer_tokens",)),
    ("tokens per second", ("tokens_per_s",)),
)
"""Title and figures of each axis. The score is no learning curve: its answers were sampled before
the run, so no step of the run can raise it."""
COLORS = ("#1f6f8b", "#c8553d")


def draw(steps: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG with the figures of a run's steps, the first step first.

    Raises: ImportError without matplotlib, which the extra `learner` installs; OSError.
    """
    from matplotlib.figure import Figure  # without pyplot: no backend is chosen

    figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=9, parse_math=False)  # an id may hold `$`
    places = [_value(one.get("step", place)) for place, one in enumerate(steps, 1)]
    for axis, (words, keys) in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        for key, color in zip(keys, COLORS, strict=False):
            values = [_value(one.get(key)) for one in steps]
            axis.plot(places, values, "o-", markersize=3, color=color, label=key)
        if len(keys) > 1:
            axis.legend(fontsize=6, frameon=False)
        axis.set_title(words, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.locator_params(axis="x", integer=True)
    figure.savefig(path, format="png")


def _value(found: object) -> float:
    """Return a figure; NaN, which is not drawn, for what is none or too large for a float."""
    if not isinstance(found, int | float):
        return float("nan")
    try:
        return float(found)
    except OverflowError:
        return float("nan")


# Make the watch of a run, and tell how the run ended.


class Observed:
    """A run and those who are told of it: a context, behind which the run's end is in the store."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        clock: Callable[[], float],
        show: Callable[[str], None],
    ) -> None:
        """clock: Unix seconds. show: prints a line for a person."""
        self.adapter = ""
        """The version that the run made."""
        self.left = False
        """True: the run left its work to the next start (`learner.runs.interrupted`)."""
        self._settings = settings
        self._database = database
        self._clock = clock
        self._show = show
        self._watch: RunWatch | None = None
        self._run_id = ""
        self._holds: Callable[[Session], bool] = lambda session: True

    def watch(self, run_id: str, parent: Parent, holds: Callable[[Session], bool]) -> Watch:
        """Return a watch that keeps what a run tells where the settings say; it is loading now.

        holds: as `StoredRun` has it.
        """
        self._run_id, self._holds = run_id, holds
        keepers: list[Keeper] = [StoredRun(self._database, run_id, clock=self._clock, holds=holds)]
        exported = exported_run(
            self._settings.learner.export,
            run_id,
            facts=lambda: facts_of(self._settings, parent),
            how_ended=partial(how_ended, self._database),
        )
        if exported is not None:
            keepers.append(exported)
        self._watch = RunWatch(keepers, show=self._show)
        self._watch.phase("loading")
        return self._watch

    def __enter__(self) -> Observed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.end(self._how(error), self.adapter)

    def _how(self, error: BaseException | None) -> End | None:
        if error is None or isinstance(error, NothingToLearnError):
            return "ok"
        recorded = how_ended(self._database, self._run_id)
        if recorded is not None:
            return recorded
        if isinstance(error, RunStoppedError) and not self._is_ours():
            return None
        return "killed" if self.left or not isinstance(error, Exception) else "failed"

    def _is_ours(self) -> bool:
        """Return False when another process goes on with the run."""
        try:
            with self._database.write(alone=False) as session:  # `holds` locks the row
                return self._holds(session)
        except StoreError:  # then no other process could take it over either
            return True
