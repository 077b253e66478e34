"""Send records to Kafka and wait until the brokers have them: the edge, and its real side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from sidecar.errors import ForwardingError
from sidecar.forwarding.client import connection_config, describe, open_client, without
from sidecar.forwarding.topics import ensure_topics
from sidecar.settings import Kafka, KafkaUrl

log = structlog.get_logger()
DELIVERY_S = 30.0
"""The producer tries a batch again for so long by itself, and the brokers drop what they have
already. It outlasts the restart of a broker. After it the records are sent by a new producer, and
some may be on the topic twice."""
MAX_BLOCK_MS = 10_000
"""How long `send` waits to learn the topic's partitions."""
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
        "compression_type": None if kafka.compression == "none" else kafka.compression,
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
