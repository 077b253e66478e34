"""Send a run and its steps to TensorBoard, MLflow or Weights & Biases; draw them.

The packages are no dependency, and are imported when a run is opened. A tracker that is not
installed, fails or hangs is said once in the log and costs its curves only: the store has them. The
tracker's run is opened at the first step, or when the steps go on after those of a process that
ended. Its end is told when the run itself has ended: after the publication, or when its row says
how it failed.

What is called: `mlflow.MlflowClient` (docs of MLflow 3, python_api/mlflow.client), `wandb.init` and
its run (docs.wandb.ai/ref/python), `torch.utils.tensorboard.SummaryWriter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import structlog
from sqlalchemy.orm import Session

from learner.errors import NothingToLearnError, RunStoppedError
from learner.explain import one_line
from learner.origin import code_version, library_versions
from learner.patience import in_thread
from learner.progress.watch import Keeper, Progress, RunWatch, StoredRun, how_ended
from learner.records import End, Parent, StepMetrics, Watch
from sidecar.errors import StoreError
from sidecar.settings import Settings
from sidecar.store.database import Database

# What a tracker is told of a run besides its figures: what it was made with.

Fact = str | int | float | bool

NOT_SENT = frozenset({"adapters_dir", "export"})
"""Settings that say where files are."""
MOST = 100
"""Facts of a run: MLflow takes as many parameters in one call
(`mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH`)."""
LONGEST = 250
"""Characters of a value: the smallest limit that a release of MLflow had for a parameter."""


def facts_of(settings: Settings, parent: Parent) -> dict[str, Fact]:
    """Return model, base, parent, versions and the settings `[learner]`, by name."""
    learner = settings.learner.model_dump(mode="json", exclude={*NOT_SENT, "advanced"})
    learner |= settings.learner.advanced.model_dump(mode="json")
    return bounded(
        {
            "model": settings.line.name,
            "base": settings.serving.base_model_path,
            "parent": parent.name,
            "parent_digest": parent.digest,
            "commit": code_version().commit or "",
            **{f"library.{name}": said for name, said in library_versions().items()},
            **{f"learner.{name}": value for name, value in learner.items()},
        }
    )


def bounded(found: Mapping[str, object]) -> dict[str, Fact]:
    """Return the first `MOST` facts, texts cut to `LONGEST` characters. Pure."""
    return {
        name: value if isinstance(value, bool | int | float) else str(value)[:LONGEST]
        for name, value in list(found.items())[:MOST]
    }


EXPERIMENT = "learning-sidecar"
"""MLflow's experiment that holds the runs, and those of `sidecar adapters push`."""
RUN_TAG = "sidecar.run_id"
"""Tag of a run of MLflow: the id of our run, whatever somebody names it there."""
ADAPTER = "adapter"
STATUS: dict[End, str] = {"ok": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
"""Our end -> MLflow's status of a run."""
EXIT_CODE: dict[End, int] = {"ok": 0, "failed": 1, "killed": 1}
"""Our end -> W&B's exit code: any but 0 shows the run as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The run that a tracker is to open."""

    run_id: str
    name: str
    """The id, with the number of the attempt behind it from the second on."""
    facts: Mapping[str, Fact]
    goes_on: bool
    """The steps go on after those that a process which ended wrote."""


class Tracker(Protocol):
    """One run in a tracker. It may raise anything."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a step's figures, by name."""

    def close(self, how: End | None, adapter: str) -> None:
        """Send what is buffered, and end the run.

        how: None: another process goes on with it. adapter: the version that it made; "": none.
        """


class _TensorBoard:
    def __init__(self, folder: str, opening: Opening) -> None:
        # torch has the writer, and a run has loaded torch; it needs the package tensorboard.
        summary: Any = import_module("torch.utils.tensorboard")
        self._writer = summary.SummaryWriter(log_dir=f"{folder}/{opening.name}")
        if not opening.goes_on:
            self._writer.add_text("run", _table(opening.facts), 0)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, how: End | None, adapter: str) -> None:
        if how is not None:
            self._writer.add_text("end", f"{how} {adapter}".strip(), 0)
        self._writer.close()


def mlflow_experiment(client: Any) -> str:  # Any: mlflow is not installed with the sidecar
    """Return the id of the experiment `EXPERIMENT`, which is made where there is none."""
    known = client.get_experiment_by_name(EXPERIMENT)
    found: str = client.create_experiment(EXPERIMENT) if known is None else known.experiment_id
    return found


class _Mlflow:
    def __init__(self, uri: str, opening: Opening) -> None:
        client: Any = import_module("mlflow").MlflowClient(tracking_uri=uri)
        self._experiment = mlflow_experiment(client)
        self._client = client
        known = self._newest(opening.run_id) if opening.goes_on else None
        if known is None:
            self._run = self._create(opening)
        else:
            self._run = known
            client.update_run(known, status="RUNNING")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, how: End | None, adapter: str) -> None:
        if how is None:
            return
        if adapter:
            self._client.set_tag(self._run, f"sidecar.{ADAPTER}", adapter)
        self._client.set_terminated(self._run, status=STATUS[how])

    def _create(self, opening: Opening) -> str:
        made: str = self._client.create_run(
            self._experiment, tags={RUN_TAG: opening.run_id}, run_name=opening.name
        ).info.run_id
        entities: Any = import_module("mlflow.entities")
        params = [entities.Param(name, str(value)) for name, value in opening.facts.items()]
        self._client.log_batch(made, params=params)
        return made

    def _newest(self, run_id: str) -> str | None:
        found = self._client.search_runs(
            [self._experiment],
            filter_string=f"tags.`{RUN_TAG}` = '{run_id}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        return found[0].info.run_id if found else None


class _Wandb:
    def __init__(self, project: str, opening: Opening) -> None:
        wandb: Any = import_module("wandb")
        # A run that goes on after a kill adds to its curves; by default it would replace them.
        self._run = wandb.init(
            project=project,
            name=opening.name,
            id=opening.name,
            resume="allow",
            config=dict(opening.facts),
        )

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, how: End | None, adapter: str) -> None:
        if adapter:
            self._run.summary[ADAPTER] = adapter
        self._run.finish(exit_code=EXIT_CODE[how or "killed"])


def _table(facts: Mapping[str, Fact]) -> str:
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items()]
    return "\n".join(["| what | value |", "|---|---|", *rows])


TRACKERS: dict[str, Callable[[str, Opening], Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
    "wandb": _Wandb,
}
"""Kind, which is the package that it needs -> opens a run: (place, what to open)."""


# What a run tells its tracker.

log = structlog.get_logger()

PREFIX = "learner/"
SEND_S = 30.0
"""Longest time of one call of a tracker, whose library may repeat a request for an hour."""


class ExportedRun:
    """Implements `learner.progress.watch.Keeper` over a tracker."""

    def __init__(
        self,
        make: Callable[[Opening], Tracker],
        run_id: str,
        *,
        facts: Mapping[str, Fact] | None = None,
    ) -> None:
        """make: opens a run. An attempt of the steps that begins anew gets a run and a name of its
        own, because a tracker keeps what it has."""
        self._make = make
        self._run_id = run_id
        self._facts = facts or {}
        self._attempts = 0
        self._tracker: Tracker | None = None
        self._failed = False

    def keep_progress(self, found: Progress) -> None: ...

    def begin_steps(self, done: Sequence[StepMetrics]) -> None:
        """The tracker has the steps that are done: the process that was killed wrote them."""
        self._attempts += 1
        self._try((lambda: self._open(goes_on=True)) if done else (lambda: self._close("killed")))

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
        self._tracker = self._make(
            Opening(run_id=self._run_id, name=name, facts=self._facts, goes_on=goes_on)
        )
        return self._tracker

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
            sent = in_thread(act)
            if not wait([sent], SEND_S).done:
                raise TimeoutError(f"it did not answer within {SEND_S:g} s")
            sent.result()
        except (Exception, SystemExit) as error:  # noqa: BLE001  a tracker's library raises what it likes
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
    package = setting.partition(":")[0]
    if package not in TRACKERS or find_spec(package) is not None:
        return ""
    return f"{package} cannot be imported; run `pip install {package}`, or remove the setting"


def exported_run(
    setting: str, run_id: str, *, facts: Callable[[], Mapping[str, Fact]] = dict
) -> ExportedRun | None:
    """Return the export that `learner.export` names; None when it names none, or cannot (logged).

    setting: `tensorboard:DIR`, `mlflow:URI`, `wandb:PROJECT`, or "". facts: as `ExportedRun`.
    """
    if not setting:
        return None
    if why := why_no_export(setting):
        log.warning("export_unavailable", run_id=run_id, export=setting, why=why)
        return None
    kind, _, place = setting.partition(":")
    return ExportedRun(lambda opening: TRACKERS[kind](place, opening), run_id, facts=facts())


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
        """Return a watch that keeps what a run tells where the settings say; it is loading now."""
        self._run_id, self._holds = run_id, holds
        keepers: list[Keeper] = [StoredRun(self._database, run_id, clock=self._clock, holds=holds)]
        exported = exported_run(
            self._settings.learner.export, run_id, facts=lambda: facts_of(self._settings, parent)
        )
        if exported is not None:
            keepers.append(exported)
        self._watch = RunWatch(keepers, show=self._show)
        self._watch.phase("loading")
        return self._watch

    def __enter__(self) -> Observed:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
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
        try:
            with self._database.write(alone=False) as session:  # `holds` locks the row
                return self._holds(session)
        except StoreError:  # then no other process could take it over either
            return True
