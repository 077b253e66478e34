"""A proxy with Kafka: one process or several, it forwards what its outbox holds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.capture.outbox import Outbox
from sidecar.settings import KafkaUrl, read_bus_url
from support.exchanges import make_plain_exchange
from support.kafka_broker import UP_S, Broker


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + UP_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_kafka_gets_what_the_proxy_recorded_and_the_forwarder_ends_with_the_proxy(
    broker: Broker, tmp_path: Path, free_port: Callable[[], int], workers: int
) -> None:
    place = read_bus_url(broker.new_url())
    assert isinstance(place, KafkaUrl)
    state, port = tmp_path / "state", free_port()
    outbox = Outbox(state / "outbox.db", max_rows=10)
    outbox.write([make_plain_exchange(name) for name in "abc"])
    outbox.close()
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f'state_dir = "{state}"\n[serving]\nupstreams = ["http://127.0.0.1:9"]\n'
        f'[proxy]\nport = {port}\nworkers = {workers}\n[bus]\nurl = "{place}"\n'
        f'[kafka]\npartitions = 2\n[store]\nurl = "sqlite:///{tmp_path}/store.db"\n'
    )

    def metrics() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                return str(reply.read().decode())
        except (urllib.error.URLError, ConnectionError):  # it starts
            return ""

    command = [sys.executable, "-P", "-m", "sidecar", "--config", str(config)]
    with (tmp_path / "log").open("wb") as log:
        proxy = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: "sidecar_forwarded_total 3.0" in metrics())
        found = {one.value for one in broker.records(place.topic, 3)}
        until(lambda: "sidecar_forward_waiting 0.0" in metrics())  # it is looked at now and then
        shown = metrics()
        forwarder = int((state / "forward.lock").read_text())
    finally:
        proxy.send_signal(signal.SIGKILL)
        proxy.wait()

    assert len(found) == 3
    assert "sidecar_forward_reachable 1.0" in shown
    until(lambda: not is_alive(forwarder))
