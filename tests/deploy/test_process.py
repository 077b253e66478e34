"""The control process itself: starts without vLLM and judge, obeys signals, imports no torch."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.ports import free_port
from support.adapter_endpoints import vllm_in_thread
from tests.deploy.conftest import World


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write settings with a `state_dir` of the test's own: in the working folder's, which is the
    default, a control of another worker's test may hold the lock."""
    values: dict[str, dict[str, Any]] = {
        "serving": {"upstreams": [f"http://127.0.0.1:{free_port()}"], "model": "m"},
        "store": {"url": f"sqlite:///{folder / 'store.db'}"},
        "admin": {"port": 0},
        "telemetry": {"log_json": True},
        **sections,
    }
    lines = [f"state_dir = {json.dumps(str(folder / 'state'))}"]
    lines += [
        line
        for name, section in values.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(v)}" for key, v in section.items()))
    ]
    path = folder / "sidecar.toml"
    path.write_text("\n".join(lines))
    return path


@contextlib.contextmanager
def control(config: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    assert process.stderr is not None
    for line in process.stderr:
        found = json.loads(line)
        if found["event"] == event:
            return dict(found)
    raise AssertionError(f"the process ended before {event}")


def test_it_serves_while_vllm_and_judge_are_away_and_stops_on_sigterm(tmp_path: Path) -> None:
    with control(write_config(tmp_path)) as process:
        admin = wait_for(process, "control_ready")["admin"]
        wait_for(process, "engine_away")

        ready = httpx.get(f"{admin}/readyz")
        status = httpx.get(f"{admin}/admin/v1/status").json()
        back = httpx.post(f"{admin}/admin/v1/rollback", json={"to": "base", "reason": "test"})

        assert ready.status_code == 200
        assert status["champion"] == "base"
        assert status["routing"]["generation"] == 1
        assert "gave no reply" in status["engine"]["away"]
        assert back.json()["changed"] is False
        process.send_signal(signal.SIGTERM)
        wait_for(process, "control_stopped")
        assert process.wait(20) == 0


def test_every_replica_is_kept_and_one_that_is_down_is_shown(tmp_path: Path, world: World) -> None:
    name = world.register(1)
    world.promote(name)
    down = f"http://127.0.0.1:{free_port()}"
    with vllm_in_thread() as (first, one), vllm_in_thread() as (second, other):
        config = write_config(
            tmp_path,
            serving={"upstreams": [down, first, second], "model": "m"},
            store={"url": world.database.url},
        )
        with control(config) as process:
            admin = wait_for(process, "control_ready")["admin"]
            wait_for(process, "adapter_loaded")
            wait_for(process, "adapter_loaded")
            deadline = time.monotonic() + 60
            while (engine := httpx.get(f"{admin}/admin/v1/status").json()["engine"])["loaded"] != [
                name
            ]:
                assert time.monotonic() < deadline, engine
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0

    assert (one.loads, other.loads) == ([name], [name])
    assert engine["away"] is None
    assert "gave no reply" in engine["replicas"][down]["away"]
    assert engine["replicas"][first] == {"away": None, "loaded": [name], "refused": {}}


def test_a_vllm_that_only_samples_gets_the_adapters_and_is_waited_for_by_nobody(
    tmp_path: Path, world: World
) -> None:
    name = world.register(1)
    world.promote(name)
    away = f"http://127.0.0.1:{free_port()}"
    with vllm_in_thread() as (serving, one), vllm_in_thread() as (sampling, other):
        config = write_config(
            tmp_path,
            serving={"upstreams": [serving], "model": "m"},
            groups={"sampling_upstreams": [sampling, away, serving]},
            store={"url": world.database.url},
        )
        with control(config) as process:
            admin = wait_for(process, "control_ready")["admin"]
            loaded = {wait_for(process, "adapter_loaded")["replica"] for _ in range(2)}
            engine = httpx.get(f"{admin}/admin/v1/status").json()["engine"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0

    assert loaded == {serving, sampling}
    assert (one.loads, other.loads) == ([name], [name])
    assert list(engine["replicas"]) == [serving]
    assert engine["away"] is None


def test_a_taken_port_is_one_line_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deploy.__main__ import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["--config", str(write_config(tmp_path, admin={"port": port}))])

    assert code == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        f"sidecar control: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "set admin.port"
    )


def test_an_own_id_that_is_no_file_is_one_line_and_exit_1(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    (tmp_path / "state" / "control-id").mkdir(parents=True)

    with control(config) as process:
        _, said = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "Traceback" not in said
    assert f"sidecar control: {tmp_path}/state/control-id: Is a directory" in said


def test_wrong_settings_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from deploy.__main__ import main

    config = write_config(tmp_path, canary={"step": [1]})

    assert main(["--config", str(config)]) == 2
    assert capsys.readouterr().err == (
        "sidecar control: unknown setting canary.step; did you mean canary.steps?\n"
    )


def test_deploy_imports_no_torch_and_no_litellm() -> None:
    code = (
        "import deploy.admin.app, deploy.canary.controller, deploy.process, sys;"
        "import deploy.registry.lineage;"
        "assert not {'torch', 'litellm', 'transformers'} & set(sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
