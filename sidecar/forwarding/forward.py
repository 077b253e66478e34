"""Move records from the outbox to Kafka, in order, each until it is acknowledged.

A record leaves the outbox only when all in-sync replicas have it, or when it has been set aside
because the topic can never hold it. So nothing is lost when this process, the brokers or the
machine die, and a record may come twice; the store takes it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import structlog

from sidecar.capture.outbox import OutboxReader, OutboxRow
from sidecar.errors import ForwardingError
from sidecar.feedback.record import decode_feedback, is_feedback
from sidecar.forwarding.dead_letters import DeadLetters
from sidecar.forwarding.report import Tally
from sidecar.forwarding.sender import Failure, Record, Sender
from sidecar.records import decode_exchange
from sidecar.store.keyring import BUS, NO_KEYS, Keyring

log = structlog.get_logger()
ROWS = 500
BYTES = 4 * 2**20
"""Records and payload bytes in one round; a single record may be larger."""
PartitionBy = Literal["caller", "session"]


class Forwarder:
    """`step` it until it returns 0."""

    def __init__(
        self,
        outbox: OutboxReader,
        open_sender: Callable[[], Sender],
        dead_letters: DeadLetters,
        tally: Tally,
        *,
        partition_by: PartitionBy,
        keyring: Keyring = NO_KEYS,
    ) -> None:
        """open_sender: connects; raises ForwardingError when the brokers are away.
        keyring: reads encrypted records, to choose their partition; they stay encrypted."""
        self._keyring = keyring
        self._outbox = outbox
        self._open_sender = open_sender
        self._dead_letters = dead_letters
        self._tally = tally
        self._partition_by = partition_by
        self._sender: Sender | None = None
        self._done: set[str] = set()
        """Exchanges that are on the topic, behind one in the outbox that is not."""

    def step(self) -> int:
        """Forward one round of records.

        Returns: how many left the outbox; 0 when it is empty.
        Raises: OutboxError, or ForwardingError when a record could not be sent. Those before it
        have left the outbox, and those behind it are not sent again by this process.
        """
        rows = self._outbox.read(0, ROWS, BYTES)
        if not rows:
            return 0
        self._done &= {row.exchange_id for row in rows}
        failure = self._send([row for row in rows if row.exchange_id not in self._done])
        gone = 0
        for row in rows:
            if row.exchange_id not in self._done:
                break
            gone += 1
        if gone:
            self._outbox.delete_through(rows[gone - 1].seq)
            self._done -= {row.exchange_id for row in rows[:gone]}
        if failure is not None:
            self.close()  # its state is not known, and a new one asks for the brokers anew
            raise ForwardingError(failure.reason, failure.message)
        return gone

    def expire(self, now: float) -> None:
        """Delete what was set aside too long ago, a little at a time. now: Unix seconds."""
        self._tally.expired(self._dead_letters.expire(now))

    def _send(self, rows: list[OutboxRow]) -> Failure | None:
        """Send rows. Returns: why one failed that is to be sent again."""
        if not rows:
            return None
        if self._sender is None:
            self._sender = self._open_sender()
        outcomes = self._sender.send([self._record(row) for row in rows])
        again: Failure | None = None
        for row, failure in zip(rows, outcomes, strict=True):
            if failure is None:
                self._tally.forwarded(1)
            elif failure.final:
                self._set_aside(self._sender, row, failure)
            else:
                again = again or failure
                continue
            self._done.add(row.exchange_id)
        return again

    def _set_aside(self, sender: Sender, row: OutboxRow, failure: Failure) -> None:
        kept = self._dead_letters.keep(row, failure.message)
        self._tally.set_aside(failure.reason if kept else "lost")
        log.error(
            "record_set_aside",
            exchange_id=row.exchange_id,
            bytes=len(row.payload),
            reason=failure.message,
        )
        sender.announce(row.exchange_id, failure.message, len(row.payload))

    def _record(self, row: OutboxRow) -> Record:
        key = partition_key(row.payload, self._partition_by, self._keyring)
        key = key or row.exchange_id.encode()
        return Record(key=key, value=row.payload, exchange_id=row.exchange_id)

    def close(self) -> None:
        """Close the connection; the next step opens one."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def partition_key(payload: bytes, by: PartitionBy, keyring: Keyring = NO_KEYS) -> bytes | None:
    """Return the key of a record; None when it cannot be read: ingest puts it aside. Pure.

    The session tree never joins exchanges of two projects, API keys or users, so records keyed by
    the three keep every session in one partition, whatever changes in the conversation. Feedback
    may come before its exchange, so its partition does not matter; its target keeps it in order.
    """
    try:
        payload = keyring.open(payload, BUS)
        if is_feedback(payload):
            feedback = decode_feedback(payload)
            return "\0".join((feedback.project, feedback.target)).encode()
        exchange = decode_exchange(payload)
    except (msgspec.MsgspecError, ValueError):
        return None
    if by == "session":
        text = exchange.session_key
    else:
        text = "\0".join((exchange.project, exchange.key_id, exchange.user))
    return text.encode()
