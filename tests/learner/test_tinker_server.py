"""A run on a real server of the Tinker API, SkyRL's on the CPU, beside our own trainer.

The server's environment is named by SIDECAR_TINKER_ENV, or is `.venv-tinker`; CONTRIBUTING.md says
how to make it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from deploy.engine.lora_weights import check_config
from learner.adapter_folder import CONFIG, LINEAGE, WEIGHTS
from learner.errors import ParentError, TinkerServerError
from learner.grpo.trainer import GrpoTrainer
from learner.policy.adapter_io import load_policy
from learner.policy.logprobs import packs_of
from learner.records import Parent, TrainingGroup, TrainingJob
from learner.tinker import STATE, TinkerServer, TinkerTrainer, state_of
from sidecar.settings import Learner
from tests.learner.conftest import job_of

if TYPE_CHECKING:
    from tests.learner.conftest import MakeGroup, MakeRow

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models" / "smollm2-135m"
ENVIRONMENT = Path(os.environ.get("SIDECAR_TINKER_ENV", ROOT / ".venv-tinker"))
START_S = 300.0
ALLOWED = 0.999
"""Least cosine of the two updates of a matrix. Both compute in float32."""

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin" / "uv").exists() or find_spec("tinker") is None,
        reason="no Tinker server: SIDECAR_TINKER_ENV names no environment with skyrl and uv, or "
        "the package tinker is missing (CONTRIBUTING.md, `A Tinker server`)",
    ),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's model is not there: make setup"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model in float32, in which both trainers then compute."""
    folder = tmp_path_factory.mktemp("base")
    for file in MODEL.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


@pytest.fixture(scope="module")
def url(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server on a free port."""
    folder = tmp_path_factory.mktemp("tinker")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}"
    environ = {**os.environ, "VIRTUAL_ENV": str(ENVIRONMENT), "PATH": path, "JAX_PLATFORMS": "cpu"}
    environ.pop("PYTHONPATH", None)
    # Two places for adapters of this rank: with the server's defaults it takes 10 GB.
    room = json.dumps({"max_lora_adapters": 4, "max_lora_rank": 4})
    command = ["uv", "run", "--no-project", "--active", "-m", "skyrl.tinker.api"]
    command += ["--base-model", str(base), "--backend", "jax", "--backend-config", room]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--checkpoints-base", str(folder / "checkpoints")]
    command += ["--database-url", f"sqlite:///{folder / 'server.db'}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(address, server, folder / "log")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # uv, the API and the engine: a session of their own
        server.wait()


def _wait_until_up(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        try:
            if httpx.get(f"{address}/api/v1/healthz").is_success:
                return
        except httpx.TransportError:
            threading.Event().wait(1.0)
    pytest.fail(f"the Tinker server did not start: {log.read_text()[-2000:]}")


@pytest.fixture
def job(url: str, base: Path, tmp_path: Path, row: MakeRow, group: MakeGroup) -> TrainingJob:
    """Two groups of two answers, which the base gave; one step has both."""
    settings = Learner(
        backend="tinker",
        tinker_url=url,
        rank=4,
        groups_per_step=2,
        precision="float32",
        pack_tokens=256,
        processes_timeout_s=600,
    )
    groups = [
        group([504, 253, 1250], [row([314, 253, 3575, 30], 0.5), row([28, 339, 416], -0.5)]),
        group([1, 6330, 30], [row([2683, 314, 198], -0.25), row([19, 20, 21, 22], 0.25)]),
    ]
    told = [
        _recorded(replace(one, group_id=str(number)), base, settings)
        for number, one in enumerate(groups)
    ]
    folder = tmp_path / "adapter"
    folder.mkdir()
    return job_of(told, settings, base_model_path=str(base), folder=folder)


def _recorded(group: TrainingGroup, base: Path, settings: Learner) -> TrainingGroup:
    """Let the base have given the answers."""
    policy = load_policy(str(base), Parent(name="base"), settings)
    values: list[float] = []
    for pack in packs_of(policy, group, settings.pack_tokens):
        values += policy.logprobs(pack)[0].tolist()
    rest = iter(values)
    rows = [replace(one, logprobs=tuple(next(rest) for _ in one.token_ids)) for one in group.rows]
    return replace(group, rows=tuple(rows))


def test_a_run_equals_that_of_our_own_trainer(job: TrainingJob, tmp_path: Path) -> None:
    starts: list[Path] = []

    def connect(of: TrainingJob) -> Any:  # Any: what it opens is a `Lora`
        server = TinkerServer(of)

        def opened(start: Parent) -> Any:
            lora = server.open(start)
            given, folder = tmp_path / "given", tmp_path / "start"
            given.mkdir()
            folder.mkdir()
            lora.save(given)
            from learner.policy.adapter_io import load_shapes, take_adapter

            take_adapter(load_shapes(of.base_model_path, start, of.settings), given, folder)
            starts.append(folder)
            return lora

        return opened

    outcome = TinkerTrainer(connect).train(job)
    own = tmp_path / "own"
    own.mkdir()
    local = job.settings.model_copy(update={"backend": "local", "max_drift": 10.0})
    parent = Parent(name="base", path=starts[0])
    expected = GrpoTrainer().train(
        replace(job, settings=local, folder=own, parent=parent, signals=())
    )
    start, here, there = (load_file(one / WEIGHTS) for one in (starts[0], own, job.folder))
    assert start.keys() == here.keys() == there.keys()
    cosines, norms = {}, {}
    for name, before in start.items():
        a, b = (one[name].double() - before.double() for one in (here, there))
        if float(a.norm()) or float(b.norm()):
            cosines[name] = float((a * b).sum() / (a.norm() * b.norm()))
            norms[name] = float(b.norm() / a.norm())
    print(min(cosines.values()), min(norms.values()), max(norms.values()), len(cosines))
    print(outcome.metrics, expected.metrics, outcome.drift)
    assert min(cosines.values()) > ALLOWED
