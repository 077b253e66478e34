"""Steps in a tracker: what it gets, and that it never costs the run."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from learner.progress import export
from learner.progress.export import (
    EXPERIMENT,
    LONGEST,
    MOST,
    RUN_TAG,
    ExportedRun,
    Opening,
    bounded,
    exported_run,
    facts_of,
    figures_of,
    why_no_export,
)
from learner.records import End, Parent, StepMetrics
from sidecar.settings import Learner, Serving, Settings

NUMBERS: dict[str, Any] = {
    **dict.fromkeys(StepMetrics.__dataclass_fields__, 0.5),
    "left_out": {},
}


def a_step(number: int, **changes: Any) -> StepMetrics:
    return StepMetrics(**{**NUMBERS, "step": number, **changes})


class Kept:
    """A tracker in memory."""

    def __init__(self, opening: Opening, *, breaks: bool = False) -> None:
        self.opening = opening
        self.breaks = breaks
        self.seen: list[tuple[int, float]] = []
        self.closed: list[tuple[End | None, str]] = []

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        if self.breaks:
            raise ZeroDivisionError("the server is away")
        self.seen.append((step, figures["learner/loss"]))

    def close(self, how: End | None, adapter: str) -> None:
        self.closed.append((how, adapter))
        if self.breaks:
            raise ZeroDivisionError("it is still away")


def test_an_attempt_that_is_given_up_is_a_run_of_its_own_and_the_end_comes_last() -> None:
    opened: list[Kept] = []

    def make(opening: Opening) -> Kept:
        opened.append(Kept(opening))
        return opened[-1]

    run = ExportedRun(make, "r1", facts={"base": "b"})

    run.begin_steps(())
    run.keep_step(a_step(1, loss=0.25))
    run.begin_steps(())  # the steps begin anew
    run.keep_step(a_step(1, loss=0.75))
    run.keep_step(a_step(2, loss=1.0))
    first, second = opened
    assert second.closed == []  # the publication is still to come
    run.end("ok", "m--v1")

    assert first.opening == Opening(run_id="r1", name="r1", facts={"base": "b"}, goes_on=False)
    assert (first.seen, first.closed) == ([(1, 0.25)], [("killed", "")])
    assert (second.opening.name, second.seen) == ("r1-2", [(1, 0.75), (2, 1.0)])
    assert second.closed == [("ok", "m--v1")]


def test_a_tracker_that_fails_is_said_once_and_told_the_end_all_the_same() -> None:
    opened: list[Kept] = []

    def make(opening: Opening) -> Kept:
        opened.append(Kept(opening, breaks=True))
        return opened[-1]

    run = ExportedRun(make, "r1")

    with capture_logs() as logs:
        run.begin_steps(())
        run.keep_step(a_step(1))
        run.keep_step(a_step(2))
        run.end("failed", "")

    assert [one["event"] for one in logs] == ["export_failed"]
    assert "the server is away" in logs[0]["error"]
    assert [one.closed for one in opened] == [[("failed", "")]]


def test_a_tracker_that_hangs_costs_its_curves_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SEND_S", 0.01)
    free = threading.Event()

    class Hangs(Kept):
        def write(self, step: int, figures: Mapping[str, float]) -> None:
            free.wait(60)

        def close(self, how: End | None, adapter: str) -> None:
            free.wait(60)

    run = ExportedRun(Hangs, "r1")
    with capture_logs() as logs:
        run.keep_step(a_step(1))
        run.end("ok", "m--v1")
    free.set()

    assert [one["error"] for one in logs] == ["it did not answer within 0.01 s"]


def test_facts_are_settings_parent_base_and_versions_and_nothing_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    learner = Learner(export="mlflow:http://tracking/?token=hunter2", learning_rate=0.0005)
    settings = Settings(
        serving=Serving(model="m", base_model_path="/weights/base"), learner=learner
    )

    facts = facts_of(settings, Parent(name="m--v1", digest="d1"))

    assert facts["learner.learning_rate"] == 0.0005
    assert (facts["parent"], facts["parent_digest"]) == ("m--v1", "d1")
    assert (facts["base"], facts["model"]) == ("/weights/base", "m")
    assert facts["library.torch"]
    assert "hunter2" not in str(facts)
    assert bounded(facts) == facts  # none is lost

    cut = bounded({f"k{number}": "x" * 1_000 for number in range(2 * MOST)})
    assert (len(cut), {len(str(one)) for one in cut.values()}) == (MOST, {LONGEST})


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


class Server:
    """An MLflow server in memory, and its client: what the learner calls of
    `mlflow.MlflowClient` (mlflow/tracking/client.py of 3.17), with its names of parameters."""

    def __init__(self) -> None:
        self.runs: list[SimpleNamespace] = []

    def __call__(self, tracking_uri: str) -> Server:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if self.runs else None

    def create_experiment(self, name: str) -> str:
        assert name == EXPERIMENT
        return "7"

    def create_run(self, experiment_id: str, tags: dict[str, str], run_name: str) -> Any:
        run_id = f"x{len(self.runs)}"
        info = SimpleNamespace(run_id=run_id, run_name=run_name, status="RUNNING")
        data = SimpleNamespace(tags=dict(tags), params={}, metrics=[])
        self.runs.append(SimpleNamespace(info=info, data=data))
        return self.runs[-1]

    def search_runs(
        self, experiment_ids: list[str], filter_string: str, max_results: int, order_by: list[str]
    ) -> list[Any]:
        (wanted,) = re.findall("'(.*)'", filter_string)
        assert order_by == ["attributes.start_time DESC"]
        return [
            one
            for one in self.runs[::-1]
            if wanted in (one.info.status, one.data.tags.get(RUN_TAG))
        ][:max_results]

    def update_run(self, run_id: str, status: str) -> None:
        self._of(run_id).info.status = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self._of(run_id).info.status = status

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._of(run_id).data.tags[key] = value

    def log_batch(self, run_id: str, params: list[tuple[str, str]]) -> None:
        self._of(run_id).data.params.update(params)

    def log_metric(self, run_id: str, key: str, value: float, step: int) -> None:
        if key == "learner/loss":
            self._of(run_id).data.metrics.append((step, value))

    def _of(self, run_id: str) -> Any:
        return next(one for one in self.runs if one.info.run_id == run_id)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made, client, entities = Server(), ModuleType("mlflow"), ModuleType("mlflow.entities")
    client.MlflowClient = made  # type: ignore[attr-defined]
    entities.Param = lambda key, value: (key, value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", client)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setattr(export, "find_spec", lambda name: name)
    return made


def mlflow_run(run_id: str, uri: str = "http://tracking", **named: Any) -> ExportedRun:
    facts: Callable[[], Mapping[str, Any]] = lambda: {"base": "b", "learner.rank": 8}  # noqa: E731
    run = exported_run(f"mlflow:{uri}", run_id, facts=facts, **named)
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("how", "status"), [("ok", "FINISHED"), ("failed", "FAILED"), ("killed", "KILLED")]
)
def test_mlflow_gets_one_run_with_parameters_steps_and_its_end(
    how: End, status: str, server: Server
) -> None:
    run = mlflow_run("r1")
    run.begin_steps(())
    run.keep_step(a_step(2, loss=0.125))
    (kept,) = server.runs
    assert kept.info.status == "RUNNING"
    run.end(how, "m--v1" if how == "ok" else "")

    assert (kept.info.run_name, kept.info.status) == ("r1", status)
    assert kept.data.metrics == [(2, 0.125)]
    assert kept.data.params == {"base": "b", "learner.rank": "8"}
    assert kept.data.tags.get("sidecar.adapter") == ("m--v1" if how == "ok" else None)


def test_a_run_of_mlflow_that_goes_on_after_a_kill_is_the_same_run(server: Server) -> None:
    killed = mlflow_run("r1")
    killed.begin_steps(())
    killed.keep_step(a_step(1, loss=0.5))  # and SIGKILL

    again = mlflow_run("r1")
    again.begin_steps([a_step(1)])
    again.keep_step(a_step(2, loss=0.25))
    again.end("ok", "m--v1")

    (kept,) = server.runs
    assert kept.data.metrics == [(1, 0.5), (2, 0.25)]
    assert kept.info.status == "FINISHED"


def test_a_run_that_another_process_goes_on_with_is_not_ended(server: Server) -> None:
    run = mlflow_run("r1")
    run.begin_steps(())
    run.keep_step(a_step(1))
    run.end(None, "")

    assert [one.info.status for one in server.runs] == ["RUNNING"]


@pytest.mark.parametrize(("how", "code"), [("ok", 0), ("failed", 1)])
def test_wandb_gets_one_run_of_the_project(
    how: End, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def init(**named: Any) -> Any:
        calls.append(named)
        return SimpleNamespace(
            log=lambda data, step: calls.append((data["learner/loss"], step)),
            finish=lambda exit_code: calls.append(("end", exit_code)),
            summary={},
        )

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(export, "find_spec", lambda name: name)

    run = exported_run("wandb:support", "r1", facts=lambda: {"learner.rank": 8})
    assert run is not None
    run.begin_steps(())
    run.keep_step(a_step(1, loss=0.125))
    run.end(how, "")

    begun = {
        "project": "support",
        "name": "r1",
        "id": "r1",
        "resume": "allow",
        "config": {"learner.rank": 8},
    }
    assert calls == [begun, (0.125, 1), ("end", code)]


class Writer:
    """Keeps what torch's `SummaryWriter` is told."""

    calls: ClassVar[list[tuple[Any, ...]]]

    def __init__(self, log_dir: str) -> None:
        type(self).calls = [("log_dir", log_dir)]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))


def test_tensorboard_gets_one_folder_with_each_figure_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(export, "find_spec", lambda name: name)

    export_two_steps("tensorboard:/runs")

    begun, facts, *written, end, ended = [
        one for one in Writer.calls if one[0] != "add_scalar" or one[1] == "learner/loss"
    ]
    assert (begun, facts[:2]) == (("log_dir", "/runs/r1"), ("add_text", "run"))
    assert "| learner.rank | 8 |" in facts[2]
    assert written == [
        ("add_scalar", "learner/loss", 0.75, 1),
        ("flush",),
        ("add_scalar", "learner/loss", 1.0, 2),
        ("flush",),
    ]
    assert (end, ended) == (("add_text", "end", "ok m--v1", 0), ("close",))


def export_two_steps(setting: str) -> None:
    run = exported_run(setting, "r1", facts=lambda: {"learner.rank": 8})
    assert run is not None
    run.begin_steps(())
    run.keep_step(a_step(1, loss=0.75))
    run.keep_step(a_step(2, loss=1.0))
    run.end("ok", "m--v1")


@pytest.mark.parametrize(
    "wrong", ["tensorboard", "tensorboard:", "csv:x", "mlflow:http://me:secret@host", "wandb:a b"]
)
def test_a_setting_that_names_no_tracker_is_refused_without_being_quoted(wrong: str) -> None:
    with pytest.raises(ValidationError, match="tensorboard:FOLDER") as caught:
        Learner(export=wrong)

    assert "secret" not in str(caught.value.errors(include_input=False))
