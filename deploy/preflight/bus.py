"""Ask Kafka, where the bus is one, whether it answers and has the topics. Nothing is created."""

from __future__ import annotations

from deploy.preflight.findings import Finding, error
from sidecar.forwarding.client import describe
from sidecar.forwarding.topics import missing_topics
from sidecar.settings import KafkaUrl, Settings, read_bus_url


def check_bus(settings: Settings) -> Finding | None:
    """Return what keeps records from passing; None with the embedded bus, or when nothing does."""
    place, kafka = read_bus_url(settings.bus.url), settings.kafka
    if not isinstance(place, KafkaUrl):
        return None
    from kafka.errors import KafkaError

    try:
        missing = missing_topics(place, kafka)
    except KafkaError as problem:
        why = describe(problem, place, kafka)
        to_do = "start the brokers, or correct the address or [kafka]"
        return error("bus.url", f"{why}; {to_do}", "kafka_away")
    if missing and not kafka.create_topics:
        names = " and ".join(missing)
        return error(
            "kafka.create_topics",
            f"is false and {names} is not there or may not be seen; create it, or set it to true",
        )
    return None
