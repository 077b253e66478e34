"""Kafka as the bus of ingest: a consumer group, with offsets committed once the store has them.

What was read and not committed is kept here and given again, as the `BusReader` contract wants.
The brokers give each partition to one process of the group. When a partition comes from another
process, `epoch` changes: what that one stored is then in the store and not in this one's memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import structlog

from ingest.errors import BusError
from ingest.intake.reader import BATCH_BYTES, Envelope
from sidecar.forwarding.client import (
    REQUEST_TIMEOUT_MS,
    connection_config,
    describe,
    open_client,
    without,
)
from sidecar.settings import Kafka, KafkaUrl

log = structlog.get_logger()
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
        from kafka.errors import KafkaError

        consumer = self._connected()
        try:
            if not self._owned and not self._held:
                self._take(consumer.poll(timeout_ms=int(JOIN_S * 1_000), max_records=1))
        except KafkaError as error:
            raise self._lost(error) from error
        return self._epoch

    def read(self, limit: int, limit_bytes: int = BATCH_BYTES) -> Sequence[Envelope]:
        from kafka.errors import KafkaError

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
        from kafka import TopicPartition
        from kafka.errors import CommitFailedError, KafkaError
        from kafka.structs import OffsetAndMetadata

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
        from kafka import TopicPartition
        from kafka.errors import KafkaError

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
        from kafka.errors import KafkaError

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
        if self._consumer is None:
            self._consumer = self._connect()
        return self._consumer

    def _connect(self) -> Any:  # Any: as above
        from kafka import KafkaConsumer
        from kafka.errors import KafkaError

        from ingest.intake.rebalance import listener

        try:
            consumer = open_client(
                KafkaConsumer,
                {
                    **connection_config(self._place, self._kafka, "ingest"),
                    "group_id": self._kafka.group or f"{self._place.topic}.ingest",
                    "enable_auto_commit": False,
                    "auto_offset_reset": "earliest",  # a new group begins with what is there
                    "session_timeout_ms": SESSION_TIMEOUT_MS,
                    "heartbeat_interval_ms": HEARTBEAT_MS,
                    "max_poll_interval_ms": MAX_POLL_INTERVAL_MS,
                    "fetch_max_bytes": FETCH_BYTES,
                    "max_partition_fetch_bytes": PARTITION_FETCH_BYTES,
                    "check_crcs": _has_fast_crc(),
                    "allow_auto_create_topics": False,
                    "metrics_enabled": False,
                },
            )
            consumer.subscribe([self._place.topic], listener=listener(self._assigned))
        except KafkaError as error:
            raise self._away(error) from error
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
            from kafka import KafkaProducer

            self._producer = open_client(
                KafkaProducer,
                {
                    **connection_config(self._place, self._kafka, "ingest"),
                    "acks": "all",
                    "enable_idempotence": True,
                    "delivery_timeout_ms": REQUEST_TIMEOUT_MS,
                    "max_block_ms": int(REQUEST_S * 1_000),
                    "max_request_size": self._kafka.max_message_bytes,
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


def _has_fast_crc() -> bool:
    """Return True if checksums take little time. In Python they take 0.7 ms an exchange, more than
    all the rest of reading it; the brokers check them when a record arrives, whoever reads it."""
    return find_spec("crc32c") is not None
