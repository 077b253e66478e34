"""Follow the API keys in the store: a thread looks, the relay reads an attribute.

A key that was made or revoked counts from the next look on. When the store is away the last keys
stay; before the first look that succeeds `ring` is None, and nobody can be judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
from sqlalchemy import Connection, Row, column, func, select, table

from sidecar.access.keys import ApiKey, KeyRing
from sidecar.errors import InvalidKeyError
from sidecar.metrics.proxy import Metrics

log = structlog.get_logger()
_KEYS = table(
    "api_key",
    column("key_id"),
    column("project"),
    column("name"),
    column("secret_hash"),
    column("scopes"),
    column("expires_at"),
    column("requests_per_minute"),
    column("tokens_per_day"),
    column("best_of_max"),
    column("revoked_at"),
    column("generation"),
)
FULL_READ_S = 10.0
"""Between changes only the newest generation is read. A store that was replaced by another one of
the same generation is noticed after this long."""


class KeySource:
    """`ring` is what the relay obeys. A `StoreReader`, read by the thread that follows routing."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.ring: KeyRing | None = None
        self._metrics = metrics
        self._clock = clock
        self._generation: int | None = None
        self._read_at = 0.0
        self._away = False

    def read(self, connection: Connection) -> None:
        """One look. Raises: SQLAlchemyError, also while the store has no such table yet."""
        generation = connection.execute(select(func.max(_KEYS.c.generation))).scalar_one()
        now = self._clock()
        known = self.ring is not None and generation == self._generation
        if known and now - self._read_at < FULL_READ_S:
            self._recover()
            return
        keys = []
        for row in connection.execute(select(_KEYS)):
            try:
                keys.append(_key(row))
            except (InvalidKeyError, AttributeError, TypeError) as error:
                self._metrics.api_key_failures.labels("unreadable").inc()
                log.warning("api_key_unreadable", key_id=row.key_id, why=str(error))
        self._generation, self._read_at = generation, now
        self._recover()
        self._take(KeyRing(keys))

    def store_away(self, why: str) -> None:
        """A look that failed: the last keys stay."""
        self._metrics.api_key_failures.labels("store_away").inc()
        if not self._away:  # polled five times a second: say it once
            log.warning("api_keys_kept", why=why, seen=self.ring is not None)
        self._away = True

    def _take(self, found: KeyRing) -> None:
        if found == self.ring:
            return  # the same object stays: the relay keeps what it made of it
        self.ring = found
        self._metrics.api_keys.set(found.usable)
        log.info("api_keys_changed", keys=len(found), usable=found.usable)

    def _recover(self) -> None:
        if self._away:
            log.info("api_keys_readable_again")
        self._away = False


def _key(row: Row[Any]) -> ApiKey:  # Any: the query is written without the models
    return ApiKey(
        key_id=row.key_id,
        project=row.project,
        name=row.name,
        secret_hash=row.secret_hash,
        scopes=frozenset(row.scopes.split()),
        expires_at=row.expires_at,
        requests_per_minute=row.requests_per_minute,
        tokens_per_day=row.tokens_per_day,
        best_of_max=row.best_of_max,
        revoked=row.revoked_at is not None,
    )
