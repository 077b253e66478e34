"""The forwarding process as its proxy sees it: counted, started again, and ended. No broker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sidecar.capture.outbox import Outbox
from sidecar.forwarding.process import ForwardingProcess, forwarding_process
from sidecar.metrics.families import MetricTable
from sidecar.metrics.hot import MetricSet
from sidecar.metrics.proxy import ForwardingMetrics
from sidecar.settings import Bus, Settings
from support.exchanges import make_plain_exchange

SECRET = "s3cret-value"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.tier_2
async def test_it_is_counted_and_started_again_and_loses_nothing_while_kafka_is_away(
    tmp_path: Path, capfd: object
) -> None:
    config = tmp_path / "sidecar.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\n[bus]\nurl = "kafka://127.0.0.1:1/t"\n'
        '[kafka]\nsecurity_protocol = "SASL_PLAINTEXT"\nsasl_mechanism = "PLAIN"\n'
        f'sasl_username = "u"\nsasl_password = "{SECRET}"\n'
    )
    outbox = Outbox(tmp_path / "state" / "outbox.db", max_rows=10)
    outbox.write([make_plain_exchange("a"), make_plain_exchange("b")])
    registry = CollectorRegistry()
    process = ForwardingProcess(config, ForwardingMetrics(MetricSet(registry, MetricTable())))

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(name, labels) or 0.0

    process.start()
    await until(lambda: value("sidecar_forward_waiting") == 2)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: value("sidecar_forward_restarts_total") == 1)
    await until(lambda: process.pid not in (None, first))
    outbox.write([make_plain_exchange("c")])
    await until(lambda: value("sidecar_forward_waiting") == 3)
    await process.stop()
    outbox.close()

    assert process.pid is None
    assert value("sidecar_forward_reachable") == 0
    assert value("sidecar_forwarded_total") == 0
    output = "".join(capfd.readouterr())  # type: ignore[attr-defined]
    assert "forwarder_ended" in output
    assert SECRET not in output


def test_the_embedded_bus_has_no_such_process() -> None:
    metrics = ForwardingMetrics(MetricSet(CollectorRegistry(), MetricTable()))

    assert forwarding_process(Settings(), None, metrics) is None
    with_kafka = Settings(bus=Bus(url="kafka://h/t"))
    assert forwarding_process(with_kafka, None, metrics) is not None
