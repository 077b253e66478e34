"""Follow the API keys in the store: a thread polls them, the relay reads an attribute.

A new or revoked key takes effect at the next poll. While the store is away the last keys stay;
until a first poll succeeds `ring` is None, and no caller can be authenticated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import structlog
from sqlalchemy import Connection, func, select

from sidecar.access.keys import ApiKey, KeyRing
from sidecar.errors import InvalidKeyError
from sidecar.metrics.proxy import Metrics
from sidecar.routing.table import GENERATIONS
from sidecar.store.codec import REPLACEMENT
from sidecar.store.tables import API_KEY

log = structlog.get_logger()
FULL_READ_S = 10.0
"""Longest time between two reads of all keys. In between, only the newest generation is read. A
store that was replaced by another one of the same generation is noticed after this long."""
_NEWEST = select(func.max(API_KEY.c.generation)).where(API_KEY.c.generation < GENERATIONS)
"""Without damaged rows: a text and a huge number would be the newest generation for good, and a
revoked key would be noticed `FULL_READ_S` later. SQLite sorts text behind every number."""


class KeySource:
    """`ring` holds the keys that the relay obeys. A `StoreReader`: `RoutingSource` polls it."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.ring: KeyRing | None = None
        self._metrics = metrics
        self._clock = clock
        self._generation: int | None = None
        self._read_at = 0.0
        self._away = False

    def read(self, connection: Connection) -> None:
        """Poll once. Raises: SQLAlchemyError, also while the store has no such table yet."""
        generation = connection.execute(_NEWEST).scalar_one()
        now = self._clock()
        known = self.ring is not None and generation == self._generation
        if known and now - self._read_at < FULL_READ_S:
            self._recover()
            return
        keys = []
        for row in connection.execute(select(API_KEY)):
            try:
                keys.append(read_key(row._asdict()))
            except (InvalidKeyError, msgspec.ValidationError) as error:
                self._metrics.api_key_failures.labels("unreadable").inc()
                log.warning("api_key_unreadable", key_id=row.key_id, why=str(error))
        self._generation, self._read_at = generation, now
        self._recover()
        found = KeyRing(keys)
        if found != self.ring:  # else the same object stays: the relay keeps what it made of it
            self.ring = found
            self._metrics.api_keys.set(found.usable)
            log.info("api_keys_changed", keys=len(found), usable=found.usable)

    def store_away(self, why: str) -> None:
        """Count a poll that failed; the last keys stay."""
        self._metrics.api_key_failures.labels("store_away").inc()
        if not self._away:  # several polls a second: log it once
            log.warning("api_keys_kept", why=why, seen=self.ring is not None)
        self._away = True

    def _recover(self) -> None:
        if self._away:
            log.info("api_keys_readable_again")
        self._away = False


def read_key(row: Mapping[str, Any]) -> ApiKey:  # Any: a Core table does not type its rows
    """Read a key from its columns.

    Raises: InvalidKeyError, msgspec.ValidationError; neither tells the hash.
    """
    # str: SQLAlchemy's own kind of str names the columns, and msgspec takes only plain ones.
    columns = {str(name): value for name, value in row.items()}
    if any(isinstance(value, str) and REPLACEMENT in value for value in columns.values()):
        raise InvalidKeyError("a text of its row holds bytes that are not UTF-8")
    scopes = columns["scopes"]
    values = {
        **columns,
        "scopes": scopes.split() if isinstance(scopes, str) else scopes,
        "revoked": columns["revoked_at"] is not None,
    }
    # Checked, not trusted: SQLite also keeps text in a number column.
    return msgspec.convert(values, ApiKey)
