"""What every Kafka client of the sidecar has in common: connection, errors in words, logging.

`kafka` is imported when a client is made: an installation with the embedded bus never loads it.
Producers, consumers and the admin client of `kafka-python` take the same names for the connection.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any

import structlog

from sidecar.hiding import beginning, hide_in_text, hide_values
from sidecar.settings import Kafka, KafkaUrl

log = structlog.get_logger()
RECONNECT_FIRST_MS = 50
RECONNECT_LAST_MS = 1_000
"""Pauses between attempts to connect to a broker double from the first to the last. The library's
default of 30 s lets a broker that is back wait for as long as it was away."""
REQUEST_TIMEOUT_MS = 10_000
"""A broker that answers no request for so long counts as away. A broker answers within
milliseconds; a join waits longer, and the library extends its limit by itself."""
BOOTSTRAP_TIMEOUT_MS = 5_000
"""How long the first connection may take. The caller tries again, with pauses of its own."""
METADATA_MAX_AGE_MS = 30_000
"""Partitions that an operator adds are seen after so long; the library's default is 5 minutes."""
QUIET_S = 30.0
"""The same warning of the library is logged once in this time: it repeats them at each attempt."""
_TELLS_CAUSE = re.compile(r"authenti|authori|certificate|ssl|refused|resolve|address", re.I)
REMEMBERED = 100
"""Different warnings of which the time is kept."""


def connection_config(place: KafkaUrl, kafka: Kafka, role: str) -> dict[str, Any]:
    """Return the arguments of a client that reach the brokers. They hold the passwords.

    From now on the library's warnings go to our log.

    role: what the client is for; brokers show it in their logs and quotas.
    """
    LIBRARY.install(lambda text: without(kafka, text))
    config: dict[str, Any] = {
        "bootstrap_servers": list(place.servers),
        "client_id": f"sidecar-{role}",
        "security_protocol": kafka.security_protocol,
        "reconnect_backoff_ms": RECONNECT_FIRST_MS,
        "reconnect_backoff_max_ms": RECONNECT_LAST_MS,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        "bootstrap_timeout_ms": BOOTSTRAP_TIMEOUT_MS,
        "metadata_max_age_ms": METADATA_MAX_AGE_MS,
    }
    if kafka.security_protocol.startswith("SASL"):
        config |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": _secret(kafka.sasl_password),
        }
    if kafka.security_protocol.endswith("SSL"):
        config |= {
            "ssl_cafile": kafka.ssl_cafile or None,
            "ssl_certfile": kafka.ssl_certfile or None,
            "ssl_keyfile": kafka.ssl_keyfile or None,
            "ssl_password": _secret(kafka.ssl_key_password),
            "ssl_check_hostname": kafka.ssl_check_hostname,
        }
    return config


def open_client(make: Any, config: dict[str, Any]) -> Any:  # Any: the library has no types
    """Make a producer, a consumer or an admin client. make: its class.

    A client that cannot connect is closed: the library would leave a thread and sockets behind at
    each attempt.
    """
    LIBRARY.last = ""
    default = make.DEFAULT_CONFIG["kafka_client"]
    made: list[Any] = []

    def hold(**inner: Any) -> Any:
        made.append(default(**inner))
        return made[-1]

    try:
        return make(**config, kafka_client=hold)
    except BaseException:
        for one in made:
            one.close()
        raise


def _secret(value: Any) -> str | None:  # Any: a SecretStr, or None
    return None if value is None else value.get_secret_value()


def describe(error: BaseException, place: KafkaUrl, kafka: Kafka) -> str:
    """Return one line about an error, with the brokers' names and without credentials."""
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    cause = LIBRARY.last
    if cause and cause not in said:
        said += f" (last warning: {cause})"
    return f"Kafka at {','.join(place.servers)}, topic {place.topic}: {without(kafka, said)}"


def without(kafka: Kafka, text: str) -> str:
    """Return the text on one line without the passwords in the settings and what looks like one."""
    secrets = [_secret(kafka.sasl_password), _secret(kafka.ssl_key_password)]
    line = " ".join(beginning(text).split())
    return hide_in_text(hide_values(line, filter(None, secrets)))[:500]


class LibraryLog(logging.Handler):
    """Passes the warnings of `kafka-python` on as events, each once in `QUIET_S` seconds.

    An away broker makes the library warn several times a second. Its debug messages contain
    passwords and records; they are never passed on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._logged: dict[str, float] = {}
        self.last = ""
        """The latest warning that tells a cause: exceptions only say that the time was over."""
        self._hide: Callable[[str], str] = hide_in_text

    def install(self, hide: Callable[[str], str]) -> None:
        """Take the place of other handlers of the library. hide: removes secrets from a text."""
        library = logging.getLogger("kafka")
        library.propagate = False
        library.setLevel(logging.WARNING)
        library.handlers = [self]
        self._hide = hide

    def emit(self, record: logging.LogRecord) -> None:
        text = self._hide(" ".join(record.getMessage().split()))[:300]
        if _TELLS_CAUSE.search(text):
            self.last = text
        now = self._clock()
        # The format, because messages differ in pauses and ports.
        kind = str(record.msg)[:200] if record.args else text
        if now - self._logged.get(kind, -QUIET_S) < QUIET_S:
            return
        if len(self._logged) >= REMEMBERED:
            self._logged.clear()
        self._logged[kind] = now
        log.warning("kafka_library", source=record.name, text=text)


LIBRARY = LibraryLog()
