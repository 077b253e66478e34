"""The bus as ingest needs it: read a batch, store it, then commit its position.

Delivery is at least once: records that were read but not committed are read again. The store makes
the effect exactly once, because the exchange id is its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
