"""The topics on Kafka: create those that are missing, and report what differs from the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from sidecar.forwarding.client import connection_config, open_client
from sidecar.settings import Kafka, KafkaUrl

log = structlog.get_logger()


def ensure_topics(place: KafkaUrl, kafka: Kafka) -> None:
    """Create the topic of the exchanges and the one of the dead letters unless they exist.

    A topic that exists is never changed; `topic_differs` says where it is not as in the settings.
    Raises: KafkaError of the library, also when a topic is missing and may not be created.
    """
    from kafka import KafkaAdminClient
    from kafka.errors import TopicAlreadyExistsError, UnknownTopicOrPartitionError

    admin = open_client(KafkaAdminClient, connection_config(place, kafka, "admin"))
    try:
        names = [place.topic, place.dead_letters]
        found = {one["name"]: one for one in admin.describe_topics(names) if not one["error_code"]}
        missing = [name for name in names if name not in found]
        if missing and not kafka.create_topics:
            raise UnknownTopicOrPartitionError(
                f"{', '.join(missing)} does not exist and kafka.create_topics is false"
            )
        for name in missing:
            try:
                admin.create_topics({name: wanted(name, place, kafka)}, wait_for_metadata=True)
                log.info("topic_created", topic=name)
            except TopicAlreadyExistsError:  # another proxy was first
                log.debug("topic_exists", topic=name)
        if place.topic in found:
            set_there = _configs(admin, place.topic)
            for what, is_now, wish in differences(
                len(found[place.topic]["partitions"]), set_there, kafka
            ):
                log.warning(
                    "topic_differs", topic=place.topic, what=what, is_now=is_now, in_settings=wish
                )
    finally:
        admin.close()


def missing_topics(place: KafkaUrl, kafka: Kafka) -> list[str]:
    """Return the topics that the brokers do not have. Raises: KafkaError of the library."""
    from kafka import KafkaAdminClient

    names = [place.topic, place.dead_letters]
    admin = open_client(KafkaAdminClient, connection_config(place, kafka, "admin"))
    try:
        found = {one["name"] for one in admin.describe_topics(names) if not one["error_code"]}
    finally:
        admin.close()
    return [name for name in names if name not in found]


def wanted(name: str, place: KafkaUrl, kafka: Kafka) -> dict[str, Any]:  # Any: the library's
    """Return how a topic is created. Pure."""
    return {
        "num_partitions": kafka.partitions if name == place.topic else 1,
        "replication_factor": kafka.replication_factor or -1,  # -1: the brokers' default
        "configs": {
            "cleanup.policy": "delete",
            "max.message.bytes": str(kafka.max_message_bytes),
            "retention.ms": str(kafka.retention_hours * 3_600_000),
        },
    }


def differences(
    partitions: int, set_there: Mapping[str, str], kafka: Kafka
) -> Sequence[tuple[str, str, str]]:
    """Return name, present value and wanted value of what a topic has unlike the settings. Pure."""
    pairs = (
        ("partitions", str(partitions), str(kafka.partitions)),
        ("max.message.bytes", set_there.get("max.message.bytes"), str(kafka.max_message_bytes)),
        ("retention.ms", set_there.get("retention.ms"), str(kafka.retention_hours * 3_600_000)),
    )
    return [
        (what, is_now, wish)
        for what, is_now, wish in pairs
        if is_now is not None and is_now != wish
    ]


def _configs(admin: Any, topic: str) -> dict[str, str]:  # Any: the library has no types
    """Return the configuration of a topic; empty where the caller may not read it."""
    from kafka.admin import ConfigResource, ConfigResourceType
    from kafka.errors import KafkaError

    try:
        found = admin.describe_configs(
            [ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all"
        )
    except KafkaError as error:
        log.info("topic_not_compared", topic=topic, why=type(error).__name__)
        return {}
    return {name: str(one["value"]) for name, one in found["topic"][topic].items()}
