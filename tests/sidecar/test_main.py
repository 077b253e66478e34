"""The process: how it starts, what it refuses, how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest


def _start(state_dir: Path, *lines: str) -> subprocess.Popen[str]:
    config = state_dir / "sidecar.toml"
    config.write_text("\n".join([f'state_dir = "{state_dir}"', *lines]))
    return subprocess.Popen(
        [sys.executable, "-m", "sidecar", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=state_dir,
    )


def test_it_starts_without_vllm_says_what_to_check_and_stops_on_term(state_dir: Path) -> None:
    process = _start(
        state_dir,
        "telemetry = {log_json = true}",
        'serving = {upstreams = ["http://127.0.0.1:9"]}',
        "proxy = {port = 0}",
    )
    assert process.stderr is not None
    seen: dict[str, str] = {}
    while "upstream_unreachable" not in seen:
        line = process.stderr.readline()
        assert line, "the process ended early"
        seen |= {event: line for event in ("proxy_ready", "upstream_unreachable") if event in line}

    assert "http://127.0.0.1:9" in seen["upstream_unreachable"]
    assert "is vLLM running" in seen["upstream_unreachable"]
    port = seen["proxy_ready"].split('"port": ')[1].split(",")[0].rstrip("}\n")
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz")
    raised.value.close()
    assert raised.value.code == 503

    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert "proxy_stopped" in rest
    assert not list(state_dir.glob("*.sock"))


def test_it_refuses_unsafe_settings_in_one_line(state_dir: Path) -> None:
    process = _start(state_dir, 'proxy = {host = "0.0.0.0"}')

    error = process.communicate(timeout=60)[1]

    assert process.returncode == 2
    assert "proxy.host 0.0.0.0 is reachable from outside" in error
    assert len(error.splitlines()) == 1


def test_a_port_that_is_taken_is_said_in_one_line(state_dir: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = _start(state_dir, f"proxy = {{port = {taken.getsockname()[1]}}}")
        error = process.communicate(timeout=60)[1]

    assert process.returncode == 1
    assert "sidecar proxy: cannot listen on proxy.host 127.0.0.1" in error.splitlines()[-1]
    assert "set another proxy.port" in error.splitlines()[-1]
