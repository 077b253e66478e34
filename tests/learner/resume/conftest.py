"""Runs of the real trainer on a tiny model, in processes of their own that can be killed."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from demo.ports import free_port
from learner.policy.adapter_io import load_policy
from learner.records import Parent
from sidecar.settings import Learner, Serving, Settings, Store
from sidecar.store.database import Database
from support.migrated_store import open_migrated
from tests.learner.conftest import PutGroup, logprobs_of, make_answer, make_scored_group

PROMPTS = ((1, 2, 3), (4, 5, 6, 7), (8, 9), (10, 11, 12), (13, 14), (15, 16, 17), (18, 19))
ANSWERS = ((10, 11, 12), (20, 21), (30, 31, 32, 33), (40,))
SCORES = (1.0, 0.8, 0.2, 0.0)
FOREIGN = "4"
"""The group whose recorded log-probabilities are those of another model."""
PER_STEP = 2
"""Of six groups, so that a run takes three steps."""

Start = Callable[..., dict[str, Any]]
World = Callable[..., Settings]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = open_migrated(tmp_path / "template.db")
    yield found
    found.close()


@pytest.fixture
def template(tmp_path: Path, tiny_base: Path, database: Database, put_group: PutGroup) -> Path:
    """A store with six groups that the base sampled, and one that it did not."""
    settings = Learner(rank=4, alpha=8, precision="float32", threads=1)
    base = load_policy(str(tiny_base), Parent(name="base"), settings)
    for number, prompt in enumerate(PROMPTS):
        recorded = logprobs_of(base, prompt, ANSWERS)
        off = 1.0 if str(number) == FOREIGN else 0.0
        answers = [
            make_answer(index, token_ids=ids, logprobs=tuple(v - off for v in values))
            for index, (ids, values) in enumerate(zip(ANSWERS, recorded, strict=True))
        ]
        put_group(
            make_scored_group(
                SCORES, answers=answers, group_id=str(number), prompt_token_ids=prompt
            )
        )
    path = tmp_path / "whole.db"
    with closing(sqlite3.connect(tmp_path / "template.db")) as connection:
        connection.execute("VACUUM INTO ?", (str(path),))
    return path


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Ask the process that forks runs, a line for a line. One for all tests: its imports take
    longer than the runs of a test."""
    log = tmp_path_factory.mktemp("forking") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killed_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        asking, answers = process.stdin, process.stdout
        assert asking is not None
        assert answers is not None

        def ask(line: str) -> str:
            asking.write(line + "\n")
            asking.flush()
            answer = answers.readline()
            assert answer, log.read_text()
            return answer

        yield ask
        asking.close()


@pytest.fixture
def start(tmp_path: Path, forking: Callable[[str], str]) -> Start:
    """start(settings, run_id, kill_at=): a run in a process of its own, or several; how it ended.

    kill_at: (name, n): the nth event of this name, or of any for "". Process `rank` of `processes`
    is `sent` a signal there, and the others too with `to_all`.
    """

    def ask(
        settings: Settings,
        run_id: str,
        kill_at: tuple[str, int] = ("", 0),
        *,
        sent: int = signal.SIGKILL,
        processes: int = 1,
        rank: int = 0,
        to_all: bool = False,
    ) -> dict[str, Any]:
        asked = {
            "settings": settings.model_dump(mode="json"),
            "run_id": run_id,
            "kill_at": kill_at,
            "signal": sent,
            "processes": processes,
            "port": free_port() if processes > 1 else 0,
            "rank": rank,
            "to_all": to_all,
            "events": str(tmp_path / "events"),
        }
        return dict(json.loads(forking(json.dumps(asked))))

    return ask


@pytest.fixture
def world(tmp_path: Path, template: Path, tiny_base: Path) -> Callable[..., Settings]:
    """world(name, **learner settings): settings of a store and an adapters_dir of their own."""

    def make(name: str, **changes: Any) -> Settings:
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(template, folder / "store.db")
        values = {
            "min_groups": 2,
            "rank": 4,
            "alpha": 8,
            "precision": "float32",
            "learning_rate": 0.02,
            "threads": 1,
            "groups_per_step": PER_STEP,
            "loss": "ppo_decoupled",
            "adapters_dir": folder / "adapters",
            **changes,
        }
        return Settings(
            serving=Serving(model="m", base_model_path=str(tiny_base)),
            store=Store(url=f"sqlite:///{folder / 'store.db'}"),
            state_dir=folder,
            learner=Learner(**values),
        )

    return make
