"""Tables of control alone: the replies of changes by key."""

from __future__ import annotations

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base


class IdempotentReplyRow(Base):
    """A change of the admin API that was asked with an `Idempotency-Key`, and its reply."""

    __tablename__ = "idempotent_reply"
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
