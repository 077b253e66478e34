"""`torchrun -m learner --once` and `learner.processes`, from a store to a registered version."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
from safetensors.torch import load_file
from sqlalchemy import select

from demo.ports import free_port
from learner.adapter_folder import CURVES, WEIGHTS
from learner.command import STOPPED
from learner.distributed.place import ADDRESS, LOCAL_RANK, LOCAL_SIZE, PORT, RANK, SIZE, Place
from learner.once import follow, telemetry_of
from learner.records import TrainingGroup
from sidecar.settings import Learner, Settings, Telemetry
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, GroupRow, RunRow
from support.forking import Fork
from tests.learner.conftest import PutGroup, make_answer, make_scored_group

ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def config(settings: Settings, tmp_path: Path) -> Callable[..., Path]:
    """config(**learner settings): a settings file."""

    def write(**learner: object) -> Path:
        values = {"adapters_dir": str(settings.learner.adapters_dir), **learner}
        more = "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
        path = tmp_path / "together.toml"
        path.write_text(
            f"""[serving]
model = "m"
base_model_path = "{settings.serving.base_model_path}"
[store]
url = "{settings.store.url}"
[learner]
min_groups = 2
rank = 4
alpha = 8
precision = "float32"
groups_per_step = 4
learning_rate = 0.02
threads = 1
{more}
"""
        )
        return path

    return write


@pytest.fixture
def stored_groups(groups: tuple[TrainingGroup, ...], put_group: PutGroup) -> None:
    """The groups of the other tests, in the store."""
    for group in groups:
        answers = [
            replace(make_answer(place), token_ids=row.token_ids, logprobs=row.logprobs)
            for place, row in enumerate(group.rows)
        ]
        put_group(
            make_scored_group(
                group.scores,
                answers=answers,
                group_id=group.group_id,
                prompt_token_ids=group.prompt_token_ids,
            )
        )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.usefixtures("stored_groups")
def test_torchrun_trains_and_registers_one_version(
    config: Callable[..., Path], database: Database
) -> None:
    path = str(config())

    done = run(*TORCHRUN, "-m", "learner", "--once", "--config", path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained m--v1-") == 1
    for event, times in {"step_done": 2, "drift_checked": 1, "rank_done": 0}.items():
        assert done.stderr.count(f"] {event} ") == times, done.stderr
    with database.read() as session:
        (version,) = session.scalars(select(AdapterRow)).all()
        (row,) = session.scalars(select(RunRow)).all()
        assert (row.status, row.adapter) == ("finished", version.name)
        assert set(session.scalars(select(GroupRow.status))) == {"trained"}
    assert load_file(Path(version.path) / WEIGHTS)


@pytest.mark.usefixtures("stored_groups")
def test_the_setting_starts_the_processes_and_they_may_share_the_base(
    config: Callable[..., Path], database: Database
) -> None:
    path = str(config(processes=2, shard_base=True))

    done = run(sys.executable, "-m", "learner", "--once", "--config", path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "\ntrained m--v1-" in done.stdout
    with database.read() as session:
        (row,) = session.scalars(select(RunRow)).all()
        (version,) = session.scalars(select(AdapterRow)).all()
        assert row.status == "finished"
    assert (Path(version.path) / CURVES).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """Give the process its handler and its log back."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    structlog.contextvars.unbind_contextvars("rank")


@pytest.mark.parametrize(
    ("level", "rank", "its"),
    [("info", 0, "info"), ("info", 1, "warning"), ("error", 1, "error"), ("debug", 1, "debug")],
)
def test_other_processes_than_the_first_log_what_is_wrong_alone(
    level: Literal["info", "error", "debug"], rank: int, its: str
) -> None:
    found = telemetry_of(Telemetry(log_level=level), Place(rank, 2, rank, 2))

    assert found.log_level == its


@pytest.mark.usefixtures("_own_signals")
def test_a_warning_of_another_process_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[dict[str, Any]] = []

    def work(*_: object) -> None:
        bound.append(structlog.contextvars.get_contextvars())

    monkeypatch.setattr("learner.distributed.trainer.work", work)

    assert follow(Learner(), Place(1, 2, 1, 2), threading.Event()) == 0

    assert bound[0]["rank"] == 1


@pytest.mark.usefixtures("_own_signals")
def test_a_process_whose_parent_ended_while_it_started_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel's TERM came when the handler of a first process was set."""
    monkeypatch.setattr("learner.distributed.trainer.work", lambda _: pytest.fail("it waits"))
    stopping = threading.Event()
    stopping.set()

    assert follow(Learner(), Place(1, 2, 1, 2), stopping) == STOPPED


def test_nothing_to_learn_is_no_failure_of_a_job(
    config: Callable[..., Path], fork: Fork, tmp_path: Path
) -> None:
    """Each process of a job ends with 0: with the place that torchrun would tell it."""
    job = {ADDRESS: "127.0.0.1", PORT: str(free_port()), SIZE: "2", LOCAL_SIZE: "2"}
    arguments = ("--once", "--config", str(config()))

    ranks = [
        fork(
            "learner.__main__",
            *arguments,
            environ={**job, RANK: str(rank), LOCAL_RANK: str(rank)},
            out=tmp_path / f"said-{rank}",
        )
        for rank in range(2)
    ]

    assert [one.wait(200) for one in ranks] == [0, 0]
    said = (tmp_path / "said-0").read_text()
    assert said.startswith("nothing to learn: 0 fresh scored groups wait")
