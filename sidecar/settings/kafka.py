"""The section of the settings for Kafka; used when `bus.url` names it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr

from sidecar.settings.kinds import Between, Line, Word, no_empty_key
from sidecar.settings.section import Section


def _password(secret: SecretStr) -> SecretStr:
    if any(char in secret.get_secret_value() for char in "\0\r\n"):
        raise ValueError("holds a line's end or a NUL byte; give the password alone")
    return secret


Password = Annotated[
    Annotated[SecretStr, AfterValidator(_password)] | None, BeforeValidator(no_empty_key)
]
"""An empty environment variable counts as not set."""


class Kafka(Section):
    """How Kafka is reached, what its topics are like, and how records are spread over them."""

    group: Line = ""
    """The consumer group of the ingest processes. Empty: `<topic>.ingest`."""
    partition_by: Literal["caller", "session"] = "caller"
    """What records share a partition, and with it an order and a consumer. `caller`: of one
    project, API key and user; no session is ever split. `session`: of one session key of the proxy;
    spreads better, and splits conversations whose opening changes and that send no header."""
    compression: Literal["none", "gzip", "zstd"] = "zstd"
    """`none`, `gzip` or `zstd`."""
    create_topics: bool = True
    """Create topics that are missing. False: somebody else does, and they are only checked."""
    partitions: Annotated[int, Between(1, 10_000, "each ingest process needs one at least")] = 8
    """Partitions of a topic that is created: the most ingest processes that can share the work."""
    replication_factor: Annotated[
        int, Between(0, 100, "0 takes the brokers' default.replication.factor")
    ] = 0
    """Replicas of a topic that is created; 0 takes the brokers' default. Three survive the loss of
    a broker."""
    retention_hours: Annotated[
        int, Between(1, 87_600, "records that ingest has not read by then are lost")
    ] = 168
    """How long a topic that is created keeps records, including those that ingest has stored. They
    hold content of users."""
    max_message_bytes: Annotated[
        int,
        Between(10_000, 100_000_000, "brokers refuse a request over 100 MiB by default"),
    ] = 8 * 2**20
    """Largest compressed batch that a topic which is created takes. The proxy sets aside an
    exchange that alone is larger."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How the brokers are reached: with TLS (`SSL`), with a password (`SASL_...`), or both."""
    sasl_mechanism: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    """Needed with SASL_PLAINTEXT and SASL_SSL."""
    sasl_username: Line = ""
    """User of `sasl_mechanism`; the password is `sasl_password`."""
    sasl_password: Password = None
    """A secret: set it by `SIDECAR_KAFKA__SASL_PASSWORD`."""
    ssl_cafile: Word = ""
    """Certificates (PEM) that sign the brokers'. Empty: those of the system."""
    ssl_certfile: Word = ""
    """The client's own certificate (PEM), where the brokers ask for one."""
    ssl_keyfile: Word = ""
    """The key (PEM) of `ssl_certfile`."""
    ssl_key_password: Password = None
    """A secret: set it by `SIDECAR_KAFKA__SSL_KEY_PASSWORD`."""
    ssl_check_hostname: bool = True
    """The broker's certificate must name its host."""
