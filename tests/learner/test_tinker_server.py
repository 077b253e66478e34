"""A run on a real server of the Tinker API, SkyRL's on the CPU, beside our own trainer.

The server's environment is named by SIDECAR_TINKER_ENV, or is `.venv-tinker`; CONTRIBUTING.md says
how to make it.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import httpx
import pytest
from safetensors.torch import load_file

from deploy.engine.validation import Registered, ServingLimits, validate_folder
from learner.adapter_folder import WEIGHTS, folder_digest
from learner.grpo import optimizer
from learner.grpo.trainer import GrpoTrainer
from learner.policy.adapter_io import load_policy
from learner.records import Parent, TrainingJob
from sidecar.settings import Learner
from tests.learner.conftest import job_of, make_group, make_row, on_policy, own_logprobs
from tests.learner.tinker_side import Found, Given

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models" / "smollm2-135m"
ENVIRONMENT = Path(os.environ.get("SIDECAR_TINKER_ENV", ROOT / ".venv-tinker"))
START_S = 300.0
RANK = 4
FARTHEST, NEAREST = 0.01, 0.95
"""Of the two updates of a matrix: the median distance, as a part of ours, and the least cosine.
Both trainers compute in float32, and Adam moves a weight by the sign of a gradient that is near 0:
the median was 0.001, and single matrices `lora_A`, whose gradient comes through a `lora_B` of one
step, had 0.97."""

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
    # With the server's own numbers each adapter has room for 32 of rank 32: over 10 GB.
    room = json.dumps({"max_lora_adapters": 4, "max_lora_rank": RANK})
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
def job(url: str, base: Path) -> TrainingJob:
    """Four groups of two answers, which the base gave: two steps."""
    settings = Learner(
        tinker_url=url,
        rank=RANK,
        groups_per_step=2,
        precision="float32",
        pack_tokens=256,
    )
    answers = [
        ([504, 253, 1250], [314, 253, 3575, 30], [28, 339, 416]),
        ([1, 6330, 30], [2683, 314, 198], [19, 20, 21, 22]),
        ([788, 260, 905], [284, 260, 1343, 335], [2, 3, 4]),
        ([260, 2240, 282], [4649, 314, 7042], [216, 216, 216, 40]),
    ]
    policy = load_policy(str(base), Parent(name="base"), settings)
    groups = [
        make_group(
            prompt, [make_row(good, 0.5 / (n + 1)), make_row(bad, -0.5 / (n + 1))], group_id=str(n)
        )
        for n, (prompt, good, bad) in enumerate(answers)
    ]
    told = [on_policy(policy, one) for one in groups]
    return job_of(told, settings, base_model_path=str(base))


def test_a_run_equals_that_of_our_own_trainer_and_its_adapter_passes_the_gate_and_goes_on(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _on_server(job, tmp_path)
    own, start, adapter = tmp_path / "own", tmp_path / "start", tmp_path / "adapter"
    own.mkdir()
    monkeypatch.setattr(optimizer, "MAX_GRAD_NORM", 1e9)  # SkyRL's JAX clips no gradient

    # The same groups and loss, from the adapter that the server began with.
    local = job.settings.model_copy(update={"tinker_url": ""})
    parent = Parent(name="base", path=start)
    ours = GrpoTrainer().train(replace(job, settings=local, folder=own, parent=parent))

    before, here, there = (load_file(one / WEIGHTS) for one in (start, own, adapter))
    assert before.keys() == here.keys() == there.keys()
    off, cosines = [], []
    for name, first in before.items():
        a, b = (one[name].double() - first.double() for one in (here, there))
        off.append(float((a - b).norm() / a.norm()))
        cosines.append(float((a * b).sum() / (a.norm() * b.norm())))
    assert min(cosines) > NEAREST
    assert median(off) < FARTHEST
    for one, two in zip(ours.metrics, found.outcome.metrics, strict=True):
        for figure in ("loss", "ratio_mean", "approx_kl", "learning_rate", "tokens"):
            value = getattr(one, figure)
            assert getattr(two, figure) == pytest.approx(value, rel=1e-2, abs=1e-4), figure

    # What the gate asks of a folder.
    bases = frozenset({job.base_model_path})
    limits = ServingLimits(max_rank=RANK, bases=bases, base_model_path=job.base_model_path)
    validate_folder(adapter, Registered(digest=folder_digest(adapter)), limits)

    # The next run: the server goes on from its state, which is this adapter.
    version = Parent(name="m--v1", path=adapter)
    policy = load_policy(job.base_model_path, version, local)
    for known, values in zip(job.groups, found.again, strict=True):
        for served, own_values in zip(values, own_logprobs(policy, known), strict=True):
            assert served == pytest.approx(own_values, abs=1e-3)
    assert "failed at loading m--v2 from tinker://model_0/weights/gone" in found.gone


def _on_server(job: TrainingJob, folder: Path) -> Found:
    """Do all that needs the server, in another process."""
    settings = job.settings.model_dump(mode="json")
    # As large beside SkyRL's means over 4 sequences of 6 tokens as ours is beside the gradient.
    epsilon = 1e-8 / (4 * 6)
    given = Given(settings=settings, groups=job.groups, base=job.base_model_path, epsilon=epsilon)
    (folder / "given.pickle").write_bytes(pickle.dumps(given))
    script = str(Path(__file__).with_name("tinker_side.py"))
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-P", script, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Found = pickle.loads((folder / "found.pickle").read_bytes())
    return found
