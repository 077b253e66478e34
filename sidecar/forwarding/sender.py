"""Send records to Kafka until the brokers have them; keep apart what is not taken."""

from __future__ import annotations

import logging
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from sidecar.capture.outbox import OutboxRow
from sidecar.errors import ForwardingError
from sidecar.hiding import beginning, hide_in_text, hide_values
from sidecar.settings import Kafka, KafkaUrl

# Records that Kafka does not take, kept whole in a file of their own beside the outbox.

log = structlog.get_logger()
DEAD_LETTERS_DAYS = 30.0
"""Days that records stay which Kafka did not take, or which could not be stored."""
FILE = "dead-letters.db"
MAX_BYTES = 256 * 2**20
"""Payloads that are kept: six of the largest that a proxy captures by default."""
EXPIRED_ROWS = 5
"""Records that one transaction deletes by their age; each is over what a topic takes, 1 MB."""
INTERVAL_S = 3_600.0
"""Between two looks for records that are too old."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS dead_letter(
    exchange_id TEXT PRIMARY KEY, at REAL, reason TEXT, payload BLOB)"""


class DeadLetters:
    """Writes the file. One thread at a time."""

    def __init__(
        self, path: Path, *, max_bytes: int = MAX_BYTES, max_age_s: float | None = None
    ) -> None:
        """max_age_s: since the record was written to the outbox; None: it stays."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._due = 0.0

    def keep(self, row: OutboxRow, reason: str) -> bool:
        """Keep a record. A repeated one takes the place of the first.

        Returns: False when the file cannot be written; the record is lost then, and logged.
        """
        try:
            self._write(row, reason)
        except (sqlite3.Error, OSError) as error:
            log.error("dead_letter_lost", exchange_id=row.exchange_id, why=str(error))
            return False
        return True

    def expire(self, now: float) -> int:
        """Delete a few of the records that are too old, if it is time to look for them.

        now: Unix seconds. Returns: how many were deleted.
        """
        if self._max_age_s is None or now < self._due or not self._path.exists():
            return 0
        gone = 0
        try:
            gone = self._delete_before(now - self._max_age_s)
        except sqlite3.Error as error:
            log.warning("dead_letters_not_expired", why=str(error), again_in_s=INTERVAL_S)
        if gone < EXPIRED_ROWS:
            self._due = now + INTERVAL_S
        return gone

    def _delete_before(self, time: float) -> int:
        with closing(sqlite3.connect(self._path)) as connection:
            connection.execute("PRAGMA secure_delete=ON")
            with connection:
                connection.execute(_SCHEMA)
                return connection.execute(
                    "DELETE FROM dead_letter WHERE rowid IN "
                    "(SELECT rowid FROM dead_letter WHERE at < ? ORDER BY rowid LIMIT ?)",
                    (time, EXPIRED_ROWS),
                ).rowcount

    def _write(self, row: OutboxRow, reason: str) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)  # it contains what users wrote
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute(_SCHEMA)
            connection.execute(
                "INSERT OR REPLACE INTO dead_letter VALUES (?, ?, ?, ?)",
                (row.exchange_id, row.at, reason, row.payload),
            )
            self._bound(connection)

    def _bound(self, connection: sqlite3.Connection) -> None:
        sizes = connection.execute(
            "SELECT rowid, LENGTH(payload) FROM dead_letter ORDER BY rowid DESC"
        ).fetchall()
        size = 0
        for number, (rowid, length) in enumerate(sizes):
            size += length
            if number and size > self._max_bytes:
                connection.execute("DELETE FROM dead_letter WHERE rowid <= ?", (rowid,))
                return


# What every Kafka client of the sidecar has in common: connection, errors in words, logging.

RECONNECT_FIRST_MS = 50
RECONNECT_LAST_MS = 1_000
"""Pauses between attempts to connect to a broker double from the first to the last. The library's
default of 30 s lets a broker that is back wait for as long as it was away."""
REQUEST_TIMEOUT_MS = 10_000
"""A broker that answers no request for so long counts as away. A broker answers within
milliseconds; a join waits longer, and the library extends its limit by itself."""
BOOTSTRAP_TIMEOUT_MS = 5_000
"""How long the first connection may take. The caller tries again, with pauses of its own."""
MAX_MESSAGE_BYTES = 8 * 2**20
"""Largest compressed batch that a topic which is created takes. An exchange that alone is larger is
set aside."""
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
            "ssl_check_hostname": True,
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


# The topics on Kafka: create those that are missing, and report what differs from the settings.


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
    config = connection_config(place, kafka, "admin")
    with closing(open_client(KafkaAdminClient, config)) as admin:
        found = {one["name"] for one in admin.describe_topics(names) if not one["error_code"]}
    return [name for name in names if name not in found]


def wanted(name: str, place: KafkaUrl, kafka: Kafka) -> dict[str, Any]:  # Any: the library's
    """Return how a topic is created. Pure."""
    return {
        "num_partitions": kafka.partitions if name == place.topic else 1,
        "replication_factor": kafka.replication_factor or -1,  # -1: the brokers' default
        "configs": {
            "cleanup.policy": "delete",
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            "retention.ms": str(kafka.retention_hours * 3_600_000),
        },
    }


def differences(
    partitions: int, set_there: Mapping[str, str], kafka: Kafka
) -> Sequence[tuple[str, str, str]]:
    """Return name, present value and wanted value of what a topic has unlike the settings. Pure."""
    pairs = (
        ("partitions", str(partitions), str(kafka.partitions)),
        ("max.message.bytes", set_there.get("max.message.bytes"), str(MAX_MESSAGE_BYTES)),
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


DELIVERY_S = 30.0
"""The producer tries a batch again for so long by itself, and the brokers drop what they have
already. It outlasts the restart of a broker. After it the records are sent by a new producer, and
some may be on the topic twice."""
MAX_BLOCK_MS = 10_000
"""How long `send` waits to learn the topic's partitions."""
COMPRESSION = "zstd"
LINGER_MS = 50
"""A batch that is not full waits so long for more records; the end of a round sends it at once."""
BATCH_BYTES = 2**19
"""Uncompressed size of a full batch. It is compressed as a whole: the default of 16 KiB would hold
three exchanges, which have little in common."""
MAX_REQUEST_BYTES = 96 * 2**20
"""Largest uncompressed record. Brokers accept requests up to 100 MiB (socket.request.max.bytes);
what counts for the topic's limit is the compressed size, which only they check."""
SLICE_S, PAUSE_S = 0.5, 0.01
CLOSE_S = 1.0
TOO_LARGE = "too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record for the topic."""

    key: bytes
    """Records of one key stay in order."""
    value: bytes
    exchange_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a record is not on the topic."""

    reason: str
    """A label of few values."""
    message: str
    final: bool
    """Another attempt would fail alike: the record is to be set aside."""


class Sender(Protocol):
    """Sends records. One thread at a time."""

    def send(self, records: Sequence[Record]) -> Sequence[Failure | None]:
        """Send records in order and wait for the acknowledgements.

        Returns: for each record None when all in-sync replicas have it, else why not.
        """

    def announce(self, exchange_id: str, reason: str, size: int) -> None:
        """Note on the dead-letter topic that a record was set aside. Failures are only logged."""

    def close(self) -> None: ...


class KafkaSender:
    """The real `Sender`: an idempotent producer that waits for all in-sync replicas."""

    def __init__(
        self,
        place: KafkaUrl,
        kafka: Kafka,
        hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """hurry: returns True when nobody can wait for an acknowledgement any longer.

        Raises: ForwardingError when the brokers cannot be reached or a topic is missing.
        """
        from kafka.errors import KafkaError

        self._place, self._kafka, self._hurry = place, kafka, hurry
        try:
            ensure_topics(place, kafka)
            self._producer = self._open()
        except KafkaError as error:
            raise ForwardingError(reason_of(error), describe(error, place, kafka)) from error

    def _open(self) -> Any:  # Any: the library has no types
        from kafka import KafkaProducer

        return open_client(KafkaProducer, producer_config(self._place, self._kafka))

    def send(self, records: Sequence[Record]) -> Sequence[Failure | None]:
        """As the contract says. The library fails a whole round for one record that is too large,
        so those of them that may be innocent are sent again, one by one."""
        from kafka.errors import KafkaError

        outcomes = list(self._send(records))
        if len(records) == 1:
            return outcomes
        in_doubt = True  # what the last failure left of the producer
        for number, failure in enumerate(outcomes):
            if failure is None or not failure.final:
                continue
            try:
                if in_doubt:
                    self.close()
                    self._producer = self._open()
            except KafkaError as error:
                outcomes[number] = self._failure(error)
                continue
            (outcomes[number],) = self._send([records[number]])
            in_doubt = outcomes[number] is not None
        return outcomes

    def _send(self, records: Sequence[Record]) -> Sequence[Failure | None]:
        from kafka.errors import KafkaError

        sent: list[Any] = []  # the library's futures, or the error of `send`
        for record in records:
            try:
                sent.append(
                    self._producer.send(
                        self._place.topic,
                        key=record.key,
                        value=record.value,
                        headers=[("exchange-id", record.exchange_id.encode())],
                    )
                )
            except KafkaError as error:
                sent.append(error)
                if not self._failure(error).final:  # the topic is unknown, or nobody answers
                    break
        self._await([one for one in sent if not isinstance(one, Exception)])
        outcomes = [self._outcome(one) for one in sent]
        return [*outcomes, *outcomes[-1:] * (len(records) - len(sent))]

    def _await(self, futures: Sequence[Any]) -> None:
        """Wait until every record is acknowledged or has failed."""
        from kafka.errors import KafkaError

        deadline = time.monotonic() + DELIVERY_S + SLICE_S
        while not all(one.is_done for one in futures):
            if time.monotonic() >= deadline or self._hurry():
                return
            try:
                self._producer.flush(timeout=SLICE_S)
            except KafkaError:  # the time is over, or a batch that was too large has been split
                time.sleep(PAUSE_S)

    def _outcome(self, one: Any) -> Failure | None:  # Any: as in `send`
        if isinstance(one, Exception):
            return self._failure(one)
        if not one.is_done:
            return Failure(reason="timeout", message="no acknowledgement yet", final=False)
        return self._failure(one.exception) if one.failed() else None

    def _failure(self, error: Exception) -> Failure:
        reason = reason_of(error)
        message = describe(error, self._place, self._kafka)
        return Failure(reason=reason, message=message, final=reason == TOO_LARGE)

    def announce(self, exchange_id: str, reason: str, size: int) -> None:
        from kafka.errors import KafkaError

        headers = [
            ("exchange-id", exchange_id.encode()),
            ("reason", without(self._kafka, reason).encode()),
            ("bytes", str(size).encode()),
            ("set-aside-by", b"proxy"),
        ]
        try:
            self._producer.send(
                self._place.dead_letters, key=exchange_id.encode(), value=b"", headers=headers
            )
        except KafkaError as error:
            log.warning(
                "dead_letter_not_announced",
                exchange_id=exchange_id,
                why=describe(error, self._place, self._kafka),
            )

    def close(self) -> None:
        self._producer.close(timeout=CLOSE_S)


def producer_config(place: KafkaUrl, kafka: Kafka) -> dict[str, Any]:
    """Return the arguments of the library's producer. Pure."""
    return {
        **connection_config(place, kafka, "forward"),
        "acks": "all",
        "enable_idempotence": True,
        "compression_type": COMPRESSION,
        "delivery_timeout_ms": int(DELIVERY_S * 1_000),
        "max_block_ms": MAX_BLOCK_MS,
        "linger_ms": LINGER_MS,
        "batch_size": BATCH_BYTES,
        "max_request_size": MAX_REQUEST_BYTES,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
    }


def reason_of(error: BaseException) -> str:
    """Return the label under which an error of the library is counted."""
    from kafka import errors

    kinds: tuple[tuple[str, tuple[type[Exception], ...]], ...] = (
        (TOO_LARGE, (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError)),
        ("not_authorized", (errors.AuthorizationError,)),
        ("not_authenticated", (errors.SaslAuthenticationFailedError,)),
        ("unknown_topic", (errors.UnknownTopicOrPartitionError, errors.InvalidTopicError)),
        ("too_few_replicas", (errors.NotEnoughReplicasError,)),
        ("timeout", (errors.KafkaTimeoutError, errors.RequestTimedOutError)),
        ("unreachable", (errors.InvalidMetadataError, errors.NodeNotReadyError)),
    )
    return next((name for name, types in kinds if isinstance(error, types)), "failed")
