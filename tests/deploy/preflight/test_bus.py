"""What `config check --online` finds of Kafka."""

from __future__ import annotations

from pathlib import Path

from deploy.preflight.settings import check_bus, check_places
from sidecar.settings import Bus, Kafka, Settings
from support.kafka_broker import Broker, unclosed_sockets


def test_a_kafka_that_is_away_is_an_error_that_names_it() -> None:
    with unclosed_sockets():
        (found,) = check_bus(Settings(bus=Bus(url="kafka://127.0.0.1:1,localhost:1/t")))

    assert (found.level, found.setting) == ("error", "bus.url")
    assert "Kafka at 127.0.0.1:1,localhost:1, topic t" in found.text


def test_kafka_lacks_topics_only_if_nobody_may_create_them(broker: Broker) -> None:
    bus = Bus(url=broker.new_url())

    assert list(check_bus(Settings(bus=bus))) == []
    (found,) = check_bus(Settings(bus=bus, kafka=Kafka(create_topics=False)))
    assert found.setting == "kafka.create_topics"
    assert ".dead-letters is not there" in found.text


def test_with_kafka_the_folder_of_the_outbox_is_the_state_dir(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    settings = Settings(state_dir=tmp_path / "state", bus=Bus(url="kafka://h:1,h2:1/t"))

    found = {one.setting for one in check_places(settings, running=True)}

    assert {"state_dir", "bus.url"} <= found
