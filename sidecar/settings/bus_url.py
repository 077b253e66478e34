"""Read `bus.url`: the file of the embedded bus, or the servers and the topic of Kafka. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator

from sidecar.settings.kinds import MAX_PORT, checked_host

OUTBOX_SCHEME = "sqlite:///"
KAFKA_SCHEME = "kafka://"
KAFKA_PORT = 9092
"""The port that Kafka's own configuration files use; taken when the URL names none."""
DEAD_LETTERS = ".dead-letters"
"""What follows the topic's name in the name of its dead-letter topic."""
_MAX_TOPIC = 249 - len(DEAD_LETTERS)
"""Kafka takes 249 characters, and the name of the dead-letter topic is longer."""
_TOPIC = re.compile(r"[A-Za-z0-9._-]+")
_EXAMPLES = "give sqlite:///path/to/outbox.db or kafka://host:port,host:port/topic"


@dataclass(frozen=True, slots=True)
class OutboxUrl:
    """The embedded bus."""

    path: str


@dataclass(frozen=True, slots=True)
class KafkaUrl:
    """A Kafka cluster and the topic of the exchanges."""

    servers: tuple[str, ...]
    """`host:port` of the brokers that are asked first."""
    topic: str

    @property
    def dead_letters(self) -> str:
        """The topic of the records that cannot be stored."""
        return self.topic + DEAD_LETTERS

    def __str__(self) -> str:
        return f"{KAFKA_SCHEME}{','.join(self.servers)}/{self.topic}"


PlaceOfBus: TypeAlias = OutboxUrl | KafkaUrl


def read_bus_url(url: str) -> PlaceOfBus:
    """Return where the bus is. Raises: ValueError, which quotes nothing that may be a secret."""
    if url.startswith(OUTBOX_SCHEME):
        return OutboxUrl(_file(url.removeprefix(OUTBOX_SCHEME)))
    if url.startswith(KAFKA_SCHEME):
        return _kafka(url.removeprefix(KAFKA_SCHEME))
    raise ValueError(f"is no bus that this release knows; {_EXAMPLES}")


def outbox_file(url: str, state_dir: Path) -> Path:
    """Return the file in which the proxy keeps records: the embedded bus, or what waits for Kafka.

    Raises: ValueError for a `bus.url` that is no bus.
    """
    place = read_bus_url(url)
    return Path(place.path) if isinstance(place, OutboxUrl) else state_dir / "outbox.db"


def _file(path: str) -> str:
    if not path or "\0" in path:
        raise ValueError(f"names no file; {_EXAMPLES}")
    if path == ":memory:":
        raise ValueError("memory is not shared between processes; name a file")
    return path


def _kafka(rest: str) -> KafkaUrl:
    if "@" in rest:
        raise ValueError(
            "holds a user name or a password; set kafka.sasl_username, and the password by the "
            "environment variable SIDECAR_KAFKA__SASL_PASSWORD"
        )
    if "?" in rest or "#" in rest:
        raise ValueError("holds `?` or `#`; options belong in the section [kafka]")
    servers, slash, topic = rest.partition("/")
    if not slash or not topic:
        raise ValueError("names no topic; give kafka://host:port,host:port/topic")
    if not _TOPIC.fullmatch(topic) or topic in (".", "..") or len(topic) > _MAX_TOPIC:
        raise ValueError(
            f"names a topic that Kafka refuses; give at most {_MAX_TOPIC} letters, digits, "
            "dots, dashes and underscores"
        )
    return KafkaUrl(tuple(_server(server) for server in servers.split(",")), topic)


def _server(server: str) -> str:
    try:
        parts = urlsplit(f"//{server}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"has a port that is no number from 1 to {MAX_PORT}") from error
    if not host or port == 0 or parts.path:
        raise ValueError("names a server without a host, or its port 0; give host:port")
    try:
        checked_host(host)
    except ValueError as error:
        raise ValueError(
            "names a server that is no address and no host name; give kafka://host:port/topic"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{KAFKA_PORT if port is None else port}"


def _checked(url: str) -> str:
    read_bus_url(url)
    return url


BusUrl = Annotated[str, AfterValidator(_checked)]
