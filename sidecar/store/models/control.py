"""Tables of control: who acts, what is still loaded and why, what must not come back, and the
replies of changes by key."""

from __future__ import annotations

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base
from sidecar.store.tables import WIDE


class IdempotentReplyRow(Base):
    """A change of the admin API that was asked with an `Idempotency-Key`, and its reply."""

    __tablename__ = "idempotent_reply"
    __table_args__ = (Index("ix_idempotent_reply_at", "at"),)
    actor: Mapped[str] = mapped_column(String(128), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    """SHA-256 (hex) of method, path, query and body."""
    at: Mapped[float]
    """When it was asked."""
    status: Mapped[int | None]
    """HTTP status of the reply; null while the change is made."""
    etag: Mapped[str] = mapped_column(String(255), default="", server_default="")
    body: Mapped[str] = mapped_column(Text, default="", server_default="")


class LeaseRow(Base):
    """Who acts, of several processes on one store: the holder lets `beat` grow."""

    __tablename__ = "lease"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    """Id of the holder's `state_dir`; empty: given back."""
    beat: Mapped[int]
    taken_at: Mapped[float]
    told: Mapped[str] = mapped_column(String(255))
    """The holder in words: machine and process."""


class UnwantedAdapterRow(Base):
    """An adapter that a vLLM has loaded and that nothing wants: it goes after a grace."""

    __tablename__ = "unwanted_adapter"
    replica: Mapped[str] = mapped_column(String(255), primary_key=True)
    """SHA-256 (hex) of the replica's base URL, which may hold a password."""
    adapter: Mapped[str] = mapped_column(String(255), primary_key=True)
    since: Mapped[float]


class AliasEventRow(Base):
    """Append-only: every move of an alias, chained by hashes."""

    __tablename__ = "alias_event"
    __table_args__ = (Index("ix_alias_event_model", "model", "alias", "seq"),)
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    at: Mapped[float]
    model: Mapped[str] = mapped_column(String(255))
    alias: Mapped[str] = mapped_column(String(32))
    before: Mapped[str | None] = mapped_column(String(255))
    after: Mapped[str | None] = mapped_column(String(255))
    """Adapter name or "base"; null: the alias points nowhere."""
    generation: Mapped[int] = mapped_column(WIDE)
    actor: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str] = mapped_column(Text)
    prev_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))


class BannedDigestRow(Base):
    """Adapter files that lost their traffic: no version with them is tried or registered again."""

    __tablename__ = "banned_digest"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(255))
    """The version that lost it."""
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str] = mapped_column(Text)
