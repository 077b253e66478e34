"""Tables of what clients tell of answers, and of what the traffic itself tells of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base, partial_index
from sidecar.store.tables import WIDE


class FeedbackRow(Base):
    """One piece of feedback, or one outcome."""

    __tablename__ = "feedback"
    __table_args__ = (
        Index("ix_feedback_target", "target"),
        partial_index("ix_feedback_exchange", "exchange_id", where="exchange_id IS NOT NULL"),
        partial_index("ix_feedback_session", "session_id", where="session_id IS NOT NULL"),
    )
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    feedback_id: Mapped[str] = mapped_column(String(64), unique=True)
    kind: Mapped[str] = mapped_column(String(16))
    target_kind: Mapped[str] = mapped_column(String(16))
    target: Mapped[str] = mapped_column(String(255))
    project: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(255))
    received_at: Mapped[float]
    stored_at: Mapped[float]
    score: Mapped[float | None]
    success: Mapped[bool | None]
    reward: Mapped[float | None]
    cost: Mapped[float | None]
    label: Mapped[str] = mapped_column(String(64))
    comment: Mapped[str] = mapped_column(Text)
    exchange_id: Mapped[str | None] = mapped_column(String(64))
    """The exchange by which its target was found; null: no record of the target has come."""
    session_id: Mapped[str | None] = mapped_column(String(255))


class SignalRow(Base):
    """What the traffic tells of one answer: at most one row of each kind."""

    __tablename__ = "signal"
    __table_args__ = (
        Index("ix_signal_session", "session_id"),
        partial_index("ix_signal_by", "by_id", where="by_id IS NOT NULL"),
    )
    exchange_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    session_id: Mapped[str] = mapped_column(String(255))
    by_id: Mapped[str | None] = mapped_column(String(64))
    """The exchange that shows it; null: that none came shows it."""
    at: Mapped[float]
    evidence: Mapped[dict[str, Any]]
