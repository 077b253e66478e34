"""Steps in a tracker: what it gets, and that it never costs the run."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from learner.progress import export
from learner.progress.estimate import Progress
from learner.progress.export import (
    EXPERIMENT,
    ExportedRun,
    exported_run,
    figures_of,
    why_no_export,
)
from learner.records import StepMetrics
from sidecar.settings import Learner

NUMBERS: dict[str, Any] = {
    **dict.fromkeys(StepMetrics.__dataclass_fields__, 0.5),
    "left_out": {},
}


def a_step(number: int, **changes: Any) -> StepMetrics:
    return StepMetrics(**{**NUMBERS, "step": number, **changes})


class Kept:
    """A tracker in memory."""

    def __init__(self, name: str, *, breaks: bool = False) -> None:
        self.name = name
        self.breaks = breaks
        self.seen: list[tuple[int, float]] = []
        self.closed = False

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self.breaks:
            raise ZeroDivisionError("the server is away")
        self.seen.append((step, figures["learner/loss"]))

    def close(self) -> None:
        self.closed = True


def test_steps_go_to_the_tracker_and_it_is_closed_when_the_run_saves() -> None:
    opened: list[Kept] = []

    def make(name: str) -> Kept:
        opened.append(Kept(name))
        return opened[-1]

    run = ExportedRun(make, "r1")

    run.drop_steps()
    run.keep_step(a_step(1, loss=0.25))
    run.drop_steps()  # the steps begin anew
    run.keep_step(a_step(1, loss=0.75))
    run.keep_step(a_step(2, loss=1.0))
    run.keep_progress(Progress(phase="saving"))

    first, second = opened
    assert (first.name, first.seen, first.closed) == ("r1", [(1, 0.25)], True)
    assert (second.name, second.seen) == ("r1-2", [(1, 0.75), (2, 1.0)])
    assert second.closed


def test_a_tracker_that_fails_is_said_once_and_asked_no_more() -> None:
    run = ExportedRun(lambda name: Kept(name, breaks=True), "r1")

    with capture_logs() as logs:
        run.drop_steps()
        run.keep_step(a_step(1))
        run.keep_step(a_step(2))
        run.keep_progress(Progress(phase="saving"))

    assert [one["event"] for one in logs] == ["export_failed"]
    assert "the server is away" in logs[0]["error"]


def test_figures_that_are_no_number_are_left_out() -> None:
    found = figures_of(a_step(3, loss=float("nan"), kl_base=None, groups=4))

    assert found["learner/groups"] == 4.0
    assert not {"learner/loss", "learner/kl_base", "learner/step"} & found.keys()


def test_what_a_step_left_out_is_one_number_for_each_reason() -> None:
    found = figures_of(a_step(1, left_out={"answers.top_p": 2, "groups.drift": 1}))

    counts = {name: value for name, value in found.items() if "left_out" in name}
    assert counts == {"learner/left_out.answers.top_p": 2.0, "learner/left_out.groups.drift": 1.0}


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow", "wandb"])
def test_a_package_that_is_absent_is_said_and_costs_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None)

    with capture_logs() as logs:
        assert exported_run(f"{kind}:x", "r1") is None

    (said,) = logs
    assert said["event"] == "export_unavailable"
    assert f"pip install {kind}" in said["why"]
    assert why_no_export("") == ""


def test_no_setting_is_no_export() -> None:
    assert exported_run("", "r1") is None


def test_mlflow_gets_one_run_with_each_figure_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            calls.append(("experiment", name))
            return "7"

        def create_run(self, experiment: str, run_name: str) -> Any:
            calls.append(("run", experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="x"))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            if name == "learner/loss":
                calls.append((run, name, value, step))

        def set_terminated(self, run: str) -> None:
            calls.append(("end", run))

    module = ModuleType("mlflow")
    module.MlflowClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setattr(export, "find_spec", lambda name: name)

    run = exported_run("mlflow:http://tracking", "r1")
    assert run is not None
    run.drop_steps()
    run.keep_step(a_step(2, loss=0.125))
    run.keep_progress(Progress(phase="saving"))

    assert calls == [
        ("client", "http://tracking"),
        ("experiment", EXPERIMENT),
        ("run", "7", "r1"),
        ("x", "learner/loss", 0.125, 2),
        ("end", "x"),
    ]


def test_wandb_gets_one_run_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def init(**named: Any) -> Any:
        calls.append(named)
        return SimpleNamespace(
            log=lambda figures, step: calls.append((figures["learner/loss"], step)),
            finish=lambda: calls.append("end"),
        )

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(export, "find_spec", lambda name: name)

    run = exported_run("wandb:support", "r1")
    assert run is not None
    run.drop_steps()
    run.keep_step(a_step(1, loss=0.125))
    run.keep_progress(Progress(phase="saving"))

    begun = {"project": "support", "name": "r1", "id": "r1", "resume": "allow"}
    assert calls == [begun, (0.125, 1), "end"]


def test_tensorboard_gets_one_folder_with_each_figure_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = torchs_writer(calls)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(export, "find_spec", lambda name: name)

    export_two_steps("tensorboard:/runs")

    begun, *written, ended = [
        (name, given)
        for name, given in calls
        if name != "add_scalar" or given["tag"] == "learner/loss"
    ]
    assert (begun[0], begun[1]["log_dir"]) == ("__init__", "/runs/r1")
    assert [(name, one.get("global_step"), one.get("scalar_value")) for name, one in written] == [
        ("add_scalar", 1, 0.75),
        ("flush", None, None),
        ("add_scalar", 2, 1.0),
        ("flush", None, None),
    ]
    assert ended[0] == "close"


def torchs_writer(calls: list[tuple[str, dict[str, Any]]]) -> type:
    """Return torch's writer with methods that keep what they are called with.

    Their parameters are those of torch's source; it cannot be imported without tensorboard.
    """
    torch = find_spec("torch")  # which does not import it
    assert torch is not None
    assert torch.origin is not None
    source = Path(torch.origin).parent / "utils" / "tensorboard" / "writer.py"
    (writer,) = [
        one
        for one in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(one, ast.ClassDef) and one.name == "SummaryWriter"
    ]
    methods = [one for one in writer.body if isinstance(one, ast.FunctionDef)]
    for method in methods:
        method.body = ast.parse(f"calls.append(({method.name!r}, locals()))").body
    writer.body = list(methods)
    found: dict[str, Any] = {"calls": calls}
    exec(compile(ast.Module(body=[writer], type_ignores=[]), str(source), "exec"), found)
    made: type = found["SummaryWriter"]
    return made


def export_two_steps(setting: str) -> None:
    run = exported_run(setting, "r1")
    assert run is not None
    run.drop_steps()
    run.keep_step(a_step(1, loss=0.75))
    run.keep_step(a_step(2, loss=1.0))
    run.keep_progress(Progress(phase="saving"))


@pytest.mark.filterwarnings("ignore")  # of the packages, whose versions are not pinned
def test_the_real_tensorboard_has_every_step(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard: pip install tensorboard",
    )

    export_two_steps(f"tensorboard:{tmp_path}")

    found = events.EventAccumulator(str(tmp_path / "r1"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("learner/loss")] == [(1, 0.75), (2, 1.0)]


@pytest.mark.filterwarnings("ignore")  # of the packages, whose versions are not pinned
def test_the_real_mlflow_has_every_step(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow: pip install mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    export_two_steps(f"mlflow:{uri}")

    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("r1", "FINISHED")
    steps = client.get_metric_history(run.info.run_id, "learner/loss")
    assert [(one.step, one.value) for one in steps] == [(1, 0.75), (2, 1.0)]


@pytest.mark.filterwarnings("ignore")  # of the packages, whose versions are not pinned
def test_the_real_wandb_has_every_step_without_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    with capture_logs() as logs:
        export_two_steps("wandb:support")

    assert logs == []
    (file,) = tmp_path.glob("wandb/offline-run-*-r1/run-r1.wandb")
    give_up_at = time.monotonic() + 60
    while file.read_bytes().count(b"learner/loss") < 2:  # wandb's own process writes it
        assert time.monotonic() < give_up_at, "wandb wrote no step"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "wrong", ["tensorboard", "tensorboard:", "csv:x", "mlflow:http://me:secret@host", "wandb:a b"]
)
def test_a_setting_that_names_no_tracker_is_refused_without_being_quoted(wrong: str) -> None:
    with pytest.raises(ValidationError, match="tensorboard:FOLDER") as caught:
        Learner(export=wrong)

    assert "secret" not in str(caught.value.errors(include_input=False))


@pytest.mark.parametrize("good", ["", "tensorboard:/runs", "mlflow:sqlite:///m.db", "wandb:p"])
def test_a_setting_that_names_a_tracker_is_taken(good: str) -> None:
    assert Learner(export=good).export == good
