"""One run in TensorBoard, MLflow or Weights & Biases. The packages are imported when one is opened.

What is called: `mlflow.MlflowClient` (docs of MLflow 3, python_api/mlflow.client), `wandb.init` and
its run (docs.wandb.ai/ref/python), `torch.utils.tensorboard.SummaryWriter`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from learner.origin import code_version, library_versions
from learner.records import End, Parent
from sidecar.settings import Settings

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
    learner = settings.learner.model_dump(mode="json", exclude=set(NOT_SENT))
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
MOST_LEFT = 100
"""Runs of others that are looked at, and ended, when a run of MLflow is opened."""


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

    def end_left(self, how_ended: Callable[[str], End | None]) -> None:
        """End what the tracker shows as running of runs that are over: a process that was killed
        told it nothing.

        how_ended: id of a run -> how it ended; None: it did not, or is not known.
        """
        ...

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a step's figures, by name."""
        ...

    def close(self, how: End | None, adapter: str) -> None:
        """Send what is buffered, and end the run.

        how: None: another process goes on with it. adapter: the version that it made; "": none.
        """
        ...


class _TensorBoard:
    def __init__(self, folder: str, opening: Opening) -> None:
        # torch has the writer, and a run has loaded torch; it needs the package tensorboard.
        summary: Any = import_module("torch.utils.tensorboard")
        self._writer = summary.SummaryWriter(log_dir=f"{folder}/{opening.name}")
        if not opening.goes_on:
            self._writer.add_text("run", _table(opening.facts), 0)

    def end_left(self, how_ended: Callable[[str], End | None]) -> None:
        """It has no status of a run."""

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
        self._run_id = opening.run_id
        known = self._newest(opening.run_id) if opening.goes_on else None
        if known is None:
            self._run = self._create(opening)
        else:
            self._run = known
            client.update_run(known, status="RUNNING")

    def end_left(self, how_ended: Callable[[str], End | None]) -> None:
        for one in self._found("attributes.status = 'RUNNING'", MOST_LEFT):
            if one.info.run_id == self._run:
                continue
            run_id = one.data.tags.get(RUN_TAG) or one.info.run_name
            # Of our own, it is of steps that were given up, or lost with their process.
            how = "killed" if run_id == self._run_id else how_ended(run_id or "")
            if how is not None:
                self._client.set_terminated(one.info.run_id, status=STATUS[how])

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
        found = self._found(f"tags.`{RUN_TAG}` = '{run_id}'", 1)
        return found[0].info.run_id if found else None

    def _found(self, which: str, most: int) -> Any:  # Any: mlflow's list of its own runs
        return self._client.search_runs(
            [self._experiment],
            filter_string=which,
            max_results=most,
            order_by=["attributes.start_time DESC"],
        )


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

    def end_left(self, how_ended: Callable[[str], End | None]) -> None:
        """Its server finds by itself that a process is gone."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self, how: End | None, adapter: str) -> None:
        if adapter:
            self._run.summary[ADAPTER] = adapter
        self._run.finish(exit_code=EXIT_CODE[how or "killed"])


def _table(facts: Mapping[str, Fact]) -> str:
    """Return the facts as a table of Markdown, which TensorBoard shows."""
    rows = [f"| {name} | {str(value).replace('|', '/')} |" for name, value in facts.items()]
    return "\n".join(["| what | value |", "|---|---|", *rows])


TRACKERS: dict[str, Callable[[str, Opening], Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _Mlflow,
    "wandb": _Wandb,
}
"""Kind -> opens a run: (place, what to open)."""
