"""The process that does several runs: each is as in a process of its own, and it knows its end."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import update

from learner.command import FAILED, RENEW, STOPPED, TRAINED
from sidecar.store.database import Database
from sidecar.store.models import AdapterRow, AliasRow, GroupRow, RunRow
from support.forking import Fork, Forked, forking
from tests.learner.conftest import PutGroup, make_scored_group

pytestmark = pytest.mark.timeout(1800)
OWN = "support"
CONFIG = """
state_dir = "{folder}/state"
[serving]
model = "m"
base_model_path = "{base}"
own_adapters = ["support"]
[store]
url = "{store}"
[learner]
adapters_dir = "{folder}/adapters"
min_groups = 2
rank = 4
alpha = 8
precision = "float32"
groups_per_step = 1
learning_rate = {rate}
max_drift = 10
threads = 1
pack_tokens = 2048
"""


@pytest.fixture(scope="module")
def fork() -> Iterator[Fork]:
    with forking("support.resident_worker", "transformers.models.llama.modeling_llama") as found:
        yield found


@pytest.fixture
def base(tiny_base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_base, tmp_path / "base"))


@pytest.fixture
def configure(base: Path, database: Database, tmp_path: Path) -> Callable[..., Path]:
    """configure(name, store=, rate=): a settings file with a folder of its own."""

    def make(name: str, *, store: str = database.url, rate: float = 0.02) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        text = CONFIG.format(folder=folder, base=base, store=store, rate=rate)
        (folder / "sidecar.toml").write_text(text)
        return folder / "sidecar.toml"

    return make


class Worker:
    """The process, and our end of its socket."""

    def __init__(self, fork: Fork, config: Path, *, kill_at: int = 0) -> None:
        path, self.out = config.with_name("socket"), config.with_name("out")
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            arguments = (str(path), str(kill_at), "--config", str(config))
            self.process: Forked = fork("support.resident_worker", *arguments, out=self.out)
            listening.settimeout(300)
            self.control = Connection(listening.accept()[0].detach())

    def run(self, run_id: str, project: str | None = None) -> int | None:
        """Returns: the exit code that it tells; None: it ended instead."""
        self.control.send((run_id, project))
        try:
            return int(self.control.recv())
        except (EOFError, ConnectionResetError):
            return None

    def ended(self) -> int:
        return self.process.wait(300)


@pytest.fixture
def worker(fork: Fork) -> Iterator[Callable[..., Worker]]:
    """worker(config, kill_at=): a process that waits for its first run."""
    made: list[Worker] = []

    def start(config: Path, *, kill_at: int = 0) -> Worker:
        made.append(Worker(fork, config, kill_at=kill_at))
        return made[-1]

    yield start
    for one in made:
        one.control.close()
        one.process.kill()


@pytest.fixture
def put(put_group: PutGroup, database: Database) -> Callable[..., None]:
    """put(number, project): two groups, the same ones but for their ids."""

    def make(number: int, project: str | None = None) -> None:
        for which, scores in (("a", [0.0, 1.0, 0.4]), ("b", [0.6, 0.2, 0.9])):
            put_group(make_scored_group(scores, group_id=f"{number}{which}"))
        with database.write() as session:
            mine = GroupRow.group_id.startswith(str(number))
            session.execute(update(GroupRow).where(mine).values(project=project))

    return make


@pytest.fixture
def alone(
    fork: Fork, configure: Callable[..., Path], database: Database, tmp_path: Path
) -> Callable[..., str]:
    """alone(number, project): the digest of what a run in a process of its own makes of a copy of
    the store, as it is now."""

    def run(number: int, project: str | None = None) -> str:
        path = tmp_path / f"copy-{number}.db"
        with closing(sqlite3.connect(database.url.removeprefix("sqlite:///"))) as connection:
            connection.execute("VACUUM INTO ?", (str(path),))
        config = configure(f"alone-{number}", store=f"sqlite:///{path}")
        words = ("--project", project) if project else ()
        process = fork("learner.__main__", "--once", "--config", str(config), *words)
        assert process.wait(300) == TRAINED
        copy = Database(f"sqlite:///{path}")
        try:
            with copy.read() as session:
                (row,) = session.query(RunRow).filter(RunRow.run_id.not_like("r%")).all()
                return session.get_one(AdapterRow, row.adapter).digest
        finally:
            copy.close()

    return run


def made_by(database: Database, run_id: str) -> AdapterRow:
    with database.read() as session:
        return session.get_one(AdapterRow, session.get_one(RunRow, run_id).adapter)


def test_each_run_of_a_process_makes_what_a_process_of_its_own_makes(
    worker: Callable[..., Worker],
    configure: Callable[..., Path],
    put: Callable[..., None],
    alone: Callable[..., str],
    database: Database,
) -> None:
    """Two lines; the third run is like the first, the last one continues what the first made."""
    one = worker(configure("one"))
    digests = []
    for number, project in enumerate((None, OWN, None, None)):
        put(number, project)
        if number == 3:
            with database.write() as session:
                name = made_by(database, "r0").name
                session.add(AliasRow(model="m", alias="champion", adapter=name, generation=1))
        expected = alone(number, project)

        assert one.run(f"r{number}", project) == TRAINED

        digests.append(made_by(database, f"r{number}").digest)
        assert digests[-1] == expected, f"run {number}"
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert made_by(database, "r1").model == f"m@@{OWN}"
    one.control.close()
    assert one.ended() == STOPPED
    before, after = json.loads(one.out.read_text().splitlines()[-1])
    assert after == before


def test_it_ends_before_a_run_on_a_base_or_with_settings_that_are_not_its_own(
    worker: Callable[..., Worker],
    configure: Callable[..., Path],
    put: Callable[..., None],
    alone: Callable[..., str],
    database: Database,
    base: Path,
) -> None:
    put(0)
    one = worker(configure("one"))
    assert one.run("r0") == TRAINED
    put(1)
    weights = base / "model.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})

    assert one.run("r1") is None

    assert one.ended() == RENEW
    with database.read() as session:
        assert session.get(RunRow, "r1") is None, "nothing was begun"
    expected = alone(1)
    two = worker(configure("one"))
    assert two.run("r1") == TRAINED
    assert made_by(database, "r1").digest == expected != made_by(database, "r0").digest
    configure("one", rate=0.01)
    assert two.run("r2") is None
    assert two.ended() == RENEW


def test_a_run_in_which_it_is_killed_goes_on_in_the_next_process(
    worker: Callable[..., Worker],
    configure: Callable[..., Path],
    put: Callable[..., None],
    alone: Callable[..., str],
    database: Database,
) -> None:
    put(0)
    one = worker(configure("one"), kill_at=4)  # the second step of the second run
    assert one.run("r0") == TRAINED
    put(1, OWN)
    expected = alone(1, OWN)

    assert one.run("r1", OWN) is None

    assert one.ended() == -signal.SIGKILL
    two = worker(configure("one"))
    assert two.run("r2", OWN) == TRAINED
    with database.read() as session:
        row = session.get_one(RunRow, "r1")
        assert (row.status, [one["step"] for one in row.deaths or []]) == ("finished", [1])
        assert session.get(RunRow, "r2") is None
    assert made_by(database, "r1").digest == expected


def test_it_ends_with_a_run_that_fails_and_goes_on_after_one_with_nothing_to_learn(
    worker: Callable[..., Worker],
    configure: Callable[..., Path],
    put: Callable[..., None],
    database: Database,
) -> None:
    one = worker(configure("one"))
    assert one.run("r0") == 3
    put(1)
    with database.write() as session:
        session.add(AliasRow(model="m", alias="champion", adapter="m--v9-x", generation=1))

    assert one.run("r1") is None

    assert one.ended() == FAILED


def test_a_signal_ends_it_while_it_waits(
    worker: Callable[..., Worker], configure: Callable[..., Path]
) -> None:
    one = worker(configure("one"))
    assert one.run("r0") == 3
    one.process.send_signal(signal.SIGTERM)

    with pytest.raises(EOFError):
        one.control.recv()
    assert one.ended() == STOPPED
