"""Rows of the tables that a proxy reads or writes.

`sidecar.store.tables` states their columns; an annotation here gives the attribute its type.
"""

from __future__ import annotations

from sqlalchemy.orm import Mapped

from sidecar.store.models.base import Base
from sidecar.store.tables import API_KEY, BREAKER_TRIP, ROUTING_TABLE, TABLE_TAKEN


class RoutingRow(Base):
    """The routing table that every proxy polls."""

    __table__ = ROUTING_TABLE
    model: Mapped[str]
    generation: Mapped[int]
    body: Mapped[str]
    updated_at: Mapped[float]


class BreakerTripRow(Base):
    """A canary that the breaker of a proxy took out."""

    __table__ = BREAKER_TRIP
    model: Mapped[str]
    canary: Mapped[str]
    salt: Mapped[str]
    at: Mapped[float]
    reason: Mapped[str]


class TableTakenRow(Base):
    """When a process of a proxy took its newest routing table."""

    __table__ = TABLE_TAKEN
    proxy: Mapped[str]
    model: Mapped[str]
    generation: Mapped[int]
    taken_at: Mapped[float]


class ApiKeyRow(Base):
    """One key of the data plane."""

    __table__ = API_KEY
    key_id: Mapped[str]
    project: Mapped[str]
    name: Mapped[str]
    secret_hash: Mapped[str]
    scopes: Mapped[str]
    expires_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_day: Mapped[int | None]
    best_of_max: Mapped[int]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    generation: Mapped[int]
