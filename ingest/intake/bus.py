"""The bus as ingest reads it: embedded, or Kafka with offsets committed after the store.

What was read and not committed is kept here and given again, as the `BusReader` contract wants.
The brokers give each partition to one process of the group. When a partition comes from another
process, `epoch` changes: what that one stored is then in the store and not in this one's memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import structlog
from kafka import ConsumerRebalanceListener, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import CommitFailedError, KafkaError
from kafka.structs import OffsetAndMetadata

from ingest.errors import BusError
from sidecar.capture.outbox import OutboxReader
from sidecar.conditions import Condition, write
from sidecar.errors import OutboxError, SettingsError, StoreError
from sidecar.forwarding.sender import (
    MAX_MESSAGE_BYTES,
    REQUEST_TIMEOUT_MS,
    connection_config,
    describe,
    open_client,
    without,
)
from sidecar.settings import Kafka, KafkaUrl, OutboxUrl, read_bus_url
from sidecar.store.database import Database
from sidecar.visible import counted

# The bus as ingest needs it: read a batch, store it, then commit its position.

BATCH_BYTES = 4 * 2**20
"""Payload of one batch: over 500 exchanges of ordinary size, or ten with prompts of 100,000 tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One record of the bus, not parsed yet."""

    position: int
    """Increases in the order in which this reader returned the records, and is known to it alone:
    the bus itself may have several orders, one for each partition."""
    payload: bytes
    where: str = ""
    """Where the record is, for people: `seq 12`, or `topic[partition]@offset`."""


class BusReader(Protocol):
    """The operations that ingest needs of a bus."""

    def epoch(self) -> int:
        """Return a number that changes when this reader gets records of which another one had the
        earlier ones: what is remembered must then be read from the store again.

        `read` returns nothing at the call in which the number changes. Raises: BusError.
        """

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        """Return up to `limit` records after the last commit, in order; none when it is empty.

        limit_bytes: of payloads; the first record is returned however large it is.
        Reading again without a commit returns the same records. Raises: BusError.
        """

    def commit(self, position: int) -> None:
        """Declare the records up to and including `position` stored: the bus may drop them.

        Raises: BusError.
        """

    def lag(self) -> int:
        """Return the number of records that no reader has committed. Raises: BusError."""

    def put_aside(self, envelope: Envelope, reason: str) -> None:
        """Keep a record that cannot be stored where operators of the bus look for it.

        The store keeps it too, so a failure is only logged.
        """

    def close(self) -> None:
        """Close the bus; uncommitted records stay."""


# The state of the bus as ingest sees it: a condition.

log = structlog.get_logger()
KIND = "bus"
INTERVAL_S = 10.0
"""Seconds between two reports; one asks Kafka for the offsets of every partition."""


class BusReport:
    """Writes the condition. For one thread."""

    def __init__(self, bus: BusReader, database: Database) -> None:
        self._bus, self._database = bus, database
        self._due = 0.0

    def report(self, now: float) -> None:
        """Write the state if it is due. Raises: BusError or StoreError."""
        if now >= self._due:
            self._due = now + INTERVAL_S
            lag = self._bus.lag()
            waiting = counted(lag, "record waits", "records wait")
            self._write(
                Condition(
                    kind=KIND, code="bus_read", message=f"{waiting} on the bus", data={"lag": lag}
                ),
                now,
            )

    def failed(self, error: BusError, now: float) -> None:
        """Write why the bus cannot be reached, as far as the store can be."""
        self._due = 0.0  # the next success is told at once
        try:
            self._write(
                Condition(
                    kind=KIND,
                    state="act",
                    code="bus_away",
                    message=f"ingest cannot read the bus: {error}",
                    to_do="start the brokers or make the file readable; records wait, and are "
                    "not lost",
                ),
                now,
            )
        except StoreError as second:
            log.warning("bus_state_not_stored", why=str(second))

    def _write(self, one: Condition, now: float) -> None:
        with self._database.write() as session:
            write(session, one, now=now)


POLL_MS = 100
"""How long one read waits for records. Ingest pauses by itself when there are none."""
JOIN_S = 5.0
"""How long `epoch` waits to be given partitions. The caller tries again."""
SESSION_TIMEOUT_MS = 6_000
"""The brokers give the partitions of a silent process to others after so long. Brokers accept no
less (group.min.session.timeout.ms); the library's default is 45 s."""
HEARTBEAT_MS = 1_500
"""A quarter of the session's timeout, so that three may be lost."""
MAX_POLL_INTERVAL_MS = 60_000
"""A process that does not read for so long loses its partitions, and a process that joins waits for
those that hang for so long. The longest work between two reads, to remember the sessions, takes ten
seconds. The library's default is 5 minutes."""
FETCH_BYTES = 16 * 2**20
PARTITION_FETCH_BYTES = 4 * 2**20
"""What the library holds of records that were not read yet, compressed. A larger batch comes
alone."""
DEAD_LETTER_PAUSE_S = 60.0
"""After a dead letter that could not be sent. Each try may take `REQUEST_S`, twice; a batch of them
would last longer than `MAX_POLL_INTERVAL_MS`, and the brokers would take the partitions away."""
REQUEST_S = 5.0
"""How long a commit or a question about offsets may take."""
CLOSE_S = 1.0
"""To leave the group. Nothing waits to be sent then, and brokers that are away must not hold the
end of the process."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A record that was read and not committed."""

    envelope: Envelope
    partition: int
    offset: int
    key: bytes | None


class KafkaBus:
    """The `BusReader` for Kafka. One thread at a time."""

    def __init__(self, place: KafkaUrl, kafka: Kafka) -> None:
        self._place, self._kafka = place, kafka
        self._consumer: Any = None  # kafka-python has no types
        self._producer: Any = None
        self._held: deque[_Held] = deque()
        self._position = 0
        self._epoch = 0
        self._dead_letters_at = 0.0
        """Monotonic seconds: when the topic of dead letters is tried again."""
        self._owned: frozenset[int] = frozenset()
        self._gained = False
        """Set by the library's thread: partitions came that this process did not have."""

    # -- the contract

    def epoch(self) -> int:
        consumer = self._connected()
        try:
            if not self._owned and not self._held:
                self._take(consumer.poll(timeout_ms=int(JOIN_S * 1_000), max_records=1))
        except KafkaError as error:
            raise self._lost(error) from error
        return self._epoch

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        consumer = self._connected()
        try:
            missing = limit - len(self._held)
            if missing > 0:
                wait_ms = 0 if self._held else POLL_MS
                self._take(consumer.poll(timeout_ms=wait_ms, max_records=missing))
            else:
                self._stay(consumer)
        except KafkaError as error:
            raise self._lost(error) from error
        return self._front(limit, limit_bytes)

    def commit(self, position: int) -> None:
        offsets: dict[Any, Any] = {}
        done = [one for one in self._held if one.envelope.position <= position]
        for one in done:  # in order, so the last of each partition counts
            where = TopicPartition(self._place.topic, one.partition)
            offsets[where] = OffsetAndMetadata(one.offset + 1, "", -1)
        if not done:
            return
        try:
            self._connected().commit(offsets, timeout_ms=int(REQUEST_S * 1_000))
        except CommitFailedError as error:
            # Another process has these partitions now, and gets the records again: repeated.
            log.warning("commit_refused", records=len(done), why=str(error)[:200])
            self._held.clear()
            self._owned = frozenset()
            return
        except KafkaError as error:
            raise self._away(error) from error
        for _ in done:
            self._held.popleft()

    def lag(self) -> int:
        consumer = self._connected()
        timeout_ms = int(REQUEST_S * 1_000)
        try:
            numbers = consumer.partitions_for_topic(self._place.topic)
            places = [TopicPartition(self._place.topic, number) for number in numbers]
            ends = consumer.end_offsets(places, timeout_ms=timeout_ms)
            starts = consumer.beginning_offsets(places, timeout_ms=timeout_ms)
            lag = 0
            for one in places:
                committed = consumer.committed(one, timeout_ms=timeout_ms)
                lag += ends[one] - max(starts[one], committed or 0)
        except KafkaError as error:
            raise self._away(error) from error
        return lag

    def put_aside(self, envelope: Envelope, reason: str) -> None:
        if time.monotonic() < self._dead_letters_at:
            log.warning("dead_letter_not_sent", where=envelope.where, why="the topic is away")
            return
        held = next((one for one in self._held if one.envelope is envelope), None)
        headers = [
            ("reason", without(self._kafka, reason).encode("utf-8", "replace")),
            ("where", envelope.where.encode()),
            ("set-aside-by", b"ingest"),
        ]
        try:
            self._dead_letters().send(
                self._place.dead_letters,
                key=None if held is None else held.key,
                value=envelope.payload,
                headers=headers,
            ).get(timeout=REQUEST_S)
        except KafkaError as error:
            self._dead_letters_at = time.monotonic() + DEAD_LETTER_PAUSE_S
            why = describe(error, self._place, self._kafka)
            log.warning("dead_letter_not_sent", where=envelope.where, why=why)

    def close(self) -> None:
        consumer, self._consumer = self._consumer, None
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close(timeout=CLOSE_S)
        if consumer is not None:
            consumer.close(autocommit=False, timeout_ms=int(CLOSE_S * 1_000))

    # -- inside

    def _connected(self) -> Any:  # Any: the consumer
        if self._consumer is not None:
            return self._consumer
        try:
            consumer = open_client(
                KafkaConsumer,
                {
                    **connection_config(self._place, self._kafka, "ingest"),
                    "group_id": f"{self._place.topic}.ingest",
                    "enable_auto_commit": False,
                    "auto_offset_reset": "earliest",  # a new group begins with what is there
                    "session_timeout_ms": SESSION_TIMEOUT_MS,
                    "heartbeat_interval_ms": HEARTBEAT_MS,
                    "max_poll_interval_ms": MAX_POLL_INTERVAL_MS,
                    "fetch_max_bytes": FETCH_BYTES,
                    "max_partition_fetch_bytes": PARTITION_FETCH_BYTES,
                    # In Python checksums take 0.7 ms an exchange, more than all the rest of
                    # reading it; the brokers check them when a record arrives, whoever reads it.
                    "check_crcs": find_spec("crc32c") is not None,
                    "allow_auto_create_topics": False,
                    "metrics_enabled": False,
                },
            )
            consumer.subscribe([self._place.topic], listener=_Listener(self._assigned))
        except KafkaError as error:
            raise self._away(error) from error
        self._consumer = consumer
        return consumer

    def _assigned(self, partitions: frozenset[int]) -> None:
        """Called by the library's thread while this one waits in `poll`."""
        if partitions - self._owned:
            self._gained = True
        self._owned = partitions
        log.info("partitions_assigned", partitions=sorted(partitions))

    def _take(self, found: dict[Any, list[Any]]) -> None:
        """Keep what the library returned, unless the caller must look at `epoch` first."""
        if self._gained:
            self._gained = False
            self._epoch += 1
            self._held.clear()
            self._return(found)
            return
        for where, records in found.items():
            for record in records:
                self._position += 1
                envelope = Envelope(
                    position=self._position,
                    payload=record.value or b"",
                    where=f"{where.topic}[{where.partition}]@{record.offset}",
                )
                self._held.append(_Held(envelope, where.partition, record.offset, record.key))

    def _return(self, found: dict[Any, list[Any]]) -> None:
        """Have the library return these records again."""
        for where, records in found.items():
            self._consumer.seek(where, records[0].offset)

    def _stay(self, consumer: Any) -> None:
        """Stay in the group while the records in hand cannot be stored."""
        paused: Iterable[Any] = consumer.assignment()
        consumer.pause(*paused)
        try:
            self._return(consumer.poll(timeout_ms=0, max_records=1))
        finally:
            consumer.resume(*(one for one in paused if one in consumer.assignment()))
        if self._gained:
            self._take({})

    def _front(self, limit: int, limit_bytes: int) -> Sequence[Envelope]:
        front: list[Envelope] = []
        size = 0
        for one in self._held:
            size += len(one.envelope.payload)
            if len(front) >= limit or (front and size > limit_bytes):
                break
            front.append(one.envelope)
        return front

    def _dead_letters(self) -> Any:  # Any: a producer
        if self._producer is None:
            self._producer = open_client(
                KafkaProducer,
                {
                    **connection_config(self._place, self._kafka, "ingest"),
                    "acks": "all",
                    "enable_idempotence": True,
                    "delivery_timeout_ms": REQUEST_TIMEOUT_MS,
                    "max_block_ms": int(REQUEST_S * 1_000),
                    "max_request_size": MAX_MESSAGE_BYTES,
                    "allow_auto_create_topics": False,
                    "metrics_enabled": False,
                },
            )
        return self._producer

    def _lost(self, error: Exception) -> BusError:
        """Give the connection up: the library raises from `poll` what it cannot mend."""
        self._held.clear()
        self._owned = frozenset()
        try:
            self.close()
        except Exception as closing:  # noqa: BLE001 - what is given up may fail as it likes
            log.info("consumer_not_closed", why=type(closing).__name__)
        return self._away(error)

    def _away(self, error: Exception) -> BusError:
        return BusError(describe(error, self._place, self._kafka))


# The embedded bus, and the choice of the bus by `bus.url`.


class OutboxBus:
    """The embedded bus: the proxy's outbox file, with one reader at a time."""

    def __init__(self, reader: OutboxReader) -> None:
        self._reader = reader

    def epoch(self) -> int:
        return 0  # the outbox has one reader

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        try:
            # Committed records are deleted, so reading starts at the front of the file.
            rows = self._reader.read(0, limit, limit_bytes)
        except OutboxError as error:
            raise BusError(str(error)) from error
        return [
            Envelope(position=row.seq, payload=row.payload, where=f"seq {row.seq}") for row in rows
        ]

    def commit(self, position: int) -> None:
        try:
            self._reader.delete_through(position)
        except OutboxError as error:
            raise BusError(str(error)) from error

    def lag(self) -> int:
        try:
            return self._reader.count()
        except OutboxError as error:
            raise BusError(str(error)) from error

    def put_aside(self, envelope: Envelope, reason: str) -> None:
        """Nothing: the store's table has the record, and the outbox no other readers."""

    def close(self) -> None:
        self._reader.close()


def open_bus(url: str, kafka: Kafka | None = None) -> BusReader:
    """Open the bus that `bus.url` names; a bus that is away is noticed when it is read.

    kafka: the section of that name; None: its defaults.
    Raises: SettingsError when the URL names no bus.
    """
    try:
        place = read_bus_url(url)
    except ValueError as error:
        raise SettingsError(f"bus.url: {error}") from error
    if isinstance(place, OutboxUrl):
        return OutboxBus(OutboxReader(Path(place.path)))
    return KafkaBus(place, kafka or Kafka())


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # the library has no types
    """Reports all partitions of this process after each change."""

    def __init__(self, assigned: Callable[[frozenset[int]], None]) -> None:
        self._assigned = assigned

    def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        """Nothing: the batch in hand was committed, or comes again to whoever has it next."""

    def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        self._assigned(frozenset(one.partition for one in assigned))
