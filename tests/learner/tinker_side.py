"""What `test_tinker_server.py` does with the package `tinker`, in a process of its own: the package
leaves its connections open, which pytest takes for a fault.

    python -P tinker_side.py FOLDER

FOLDER has `given.pickle` (settings, groups, base) and gets `start/`, the adapter that the server
began with; `adapter/`, the run's; and `found.pickle`.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner import tinker
from learner.adapter_folder import LINEAGE
from learner.errors import ParentError
from learner.policy.adapter_io import load_shapes, take_adapter
from learner.records import Parent, TrainingGroup, TrainingJob, TrainingOutcome
from learner.tinker import STATE, Lora, TinkerServer, TinkerTrainer, logprobs
from sidecar.settings import Learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    settings: dict[str, Any]
    groups: tuple[TrainingGroup, ...]
    base: str
    epsilon: float
    """Of the server's Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    outcome: TrainingOutcome
    again: list[list[list[float]]]
    """Log-probabilities of all groups under the adapter that the next run would go on from."""
    gone: str
    """What is said of a state that the server does not have."""


def main(folder: Path) -> None:
    given: Given = pickle.loads((folder / "given.pickle").read_bytes())
    tinker.EPSILON = given.epsilon
    (folder / "adapter").mkdir()
    job = TrainingJob(
        base_model_path=given.base,
        parent=Parent(name="base"),
        groups=given.groups,
        settings=Learner.model_validate(given.settings),
        folder=folder / "adapter",
        check_stop=lambda: None,
    )
    servers: list[TinkerServer] = []

    def connect(of: TrainingJob) -> Callable[[Parent], Lora]:
        servers.append(TinkerServer(of))

        def opened(version: Parent) -> Lora:
            lora = servers[0].open(version)
            for name in ("of_server", "start"):
                (folder / name).mkdir()
            lora.save(folder / "of_server")
            shapes = load_shapes(of.base_model_path, version, of.settings)
            take_adapter(shapes, folder / "of_server", folder / "start")
            return lora

        return opened

    outcome = TinkerTrainer(connect).train(job)
    _told(job.folder, outcome.algorithm[STATE])
    version = Parent(name="m--v1", path=job.folder)
    again = logprobs(servers[0].open(version), job, job.groups)
    (folder / "gone").mkdir()
    _told(folder / "gone", "tinker://model_0/weights/gone")
    try:
        servers[0].open(Parent(name="m--v2", path=folder / "gone"))
        gone = ""
    except ParentError as error:
        gone = str(error)
    found = Found(outcome=outcome, again=again, gone=gone)
    (folder / "found.pickle").write_bytes(pickle.dumps(found))


def _told(folder: Path, state: object) -> None:
    (folder / LINEAGE).write_text(json.dumps({"algorithm": {STATE: state}}))


if __name__ == "__main__":
    # By its own name, which the pickles have.
    from tests.learner import tinker_side

    tinker_side.main(Path(sys.argv[1]))
