"""One contract for the fake sender and the one for Kafka, and what only Kafka does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from sidecar.errors import ForwardingError
from sidecar.forwarding.sender import KafkaSender, Record, Sender, ensure_topics
from sidecar.settings import Kafka, KafkaUrl, read_bus_url
from support.kafka_broker import PASSWORD, TLS, USER, Broker, unclosed_sockets
from support.memory_sender import MemorySender
from support.processes import until

LIMIT = 20_000


def record(name: str, size: int = 10, key: str = "k") -> Record:
    return Record(key=key.encode(), value=os.urandom(size), exchange_id=name)


def place_of(url: str) -> KafkaUrl:
    place = read_bus_url(url)
    assert isinstance(place, KafkaUrl)
    return place


@dataclass
class Opened:
    sender: Sender
    kept: Callable[[int], list[tuple[str, bytes]]]
    """The given number of records that were kept: ids and values, in order."""


@pytest.fixture(params=["memory", "kafka"])
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    if request.param == "memory":
        memory = MemorySender(LIMIT)
        yield Opened(memory, lambda _: [(one.exchange_id, one.value) for one in memory.kept])
        return
    broker: Broker = request.getfixturevalue("broker")
    place = place_of(broker.new_url())
    monkeypatch.setattr("sidecar.forwarding.sender.MAX_MESSAGE_BYTES", LIMIT)
    sender = KafkaSender(place, Kafka(partitions=2))

    def kept(count: int) -> list[tuple[str, bytes]]:
        found = broker.records(place.topic, count)
        return [(dict(one.headers)["exchange-id"].decode(), one.value) for one in found]

    yield Opened(sender, kept)
    sender.close()


def test_what_is_acknowledged_is_kept_in_order(opened: Opened) -> None:
    records = [record(str(number)) for number in range(50)]

    assert opened.sender.send(records[:30]) == [None] * 30
    assert opened.sender.send(records[30:]) == [None] * 20

    assert opened.kept(50) == [(one.exchange_id, one.value) for one in records]


def test_a_record_over_the_limit_fails_for_good_and_alone(opened: Opened) -> None:
    records = [record("a"), record("big", 2 * LIMIT), record("c")]

    before, failure, behind = opened.sender.send(records)

    assert failure is not None
    assert (before, failure.reason, failure.final, behind) == (None, "too_large", True, None)
    assert [name for name, _ in opened.kept(2)] == ["a", "c"]


def test_kafka_gets_topics_as_the_settings_say_and_keeps_them_as_they_are(broker: Broker) -> None:
    from kafka import KafkaAdminClient
    from kafka.admin import ConfigResource, ConfigResourceType

    place = place_of(broker.new_url())
    ensure_topics(place, Kafka(partitions=3, retention_hours=2))
    ensure_topics(place, Kafka(partitions=5))  # another proxy with other settings

    admin = KafkaAdminClient(bootstrap_servers=broker.server)
    try:
        topics = admin.describe_topics([place.topic, place.dead_letters])
        found = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, place.topic)])
    finally:
        admin.close()
    assert {one["name"]: len(one["partitions"]) for one in topics} == {
        place.topic: 3,
        place.dead_letters: 1,
    }
    values = {name: one["value"] for name, one in found["topic"][place.topic].items()}
    assert values["retention.ms"] == "7200000"
    assert values["max.message.bytes"] == "8388608"


def test_kafka_without_the_topic_is_an_error_when_none_may_be_created(broker: Broker) -> None:
    with pytest.raises(ForwardingError, match="create_topics is false") as raised:
        KafkaSender(place_of(broker.new_url()), Kafka(create_topics=False))

    assert raised.value.reason == "unknown_topic"


def test_kafka_that_is_away_is_an_error_that_names_it(free_port: Callable[[], int]) -> None:
    server = f"127.0.0.1:{free_port()}"

    with unclosed_sockets(), pytest.raises(ForwardingError, match=server):
        KafkaSender(place_of(f"kafka://{server}/t"), Kafka())


def secured(password: str) -> Kafka:
    values: dict[str, Any] = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_username": USER,
        "sasl_password": password,
        "ssl_cafile": str(TLS / "loopback_cert.pem"),
    }
    return Kafka(**values)


def opened_in_time(place: KafkaUrl, settings: Kafka) -> KafkaSender:
    """Open a sender; on a busy machine the broker may need several of the client's time limits."""
    senders: list[KafkaSender] = []

    def opens() -> bool:
        with suppress(ForwardingError):
            senders.append(KafkaSender(place, settings))
        return bool(senders)

    until(opens)
    return senders[0]


def test_kafka_by_tls_and_password(broker: Broker) -> None:
    if not broker.secure_server:
        pytest.skip("the broker of SIDECAR_TEST_KAFKA is not known to take TLS and a password")
    topic = place_of(broker.new_url()).topic
    place = place_of(f"kafka://{broker.secure_server}/{topic}")

    with unclosed_sockets(), pytest.raises(ForwardingError, match=broker.secure_server) as raised:
        KafkaSender(place, secured("wrong-" + PASSWORD))
    with unclosed_sockets():
        sender = opened_in_time(place, secured(PASSWORD))
    outcomes = sender.send([record("a")])
    sender.close()

    assert PASSWORD not in str(raised.value)
    assert outcomes == [None]
    assert len(broker.records(topic, 1)) == 1
