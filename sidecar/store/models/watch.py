"""Tables of the reward watch: traits of the newest served answers, and sums for each adapter."""

from __future__ import annotations

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base
from sidecar.store.tables import WIDE


class WatchedAnswerRow(Base):
    """What one served answer is, without its content. Of each adapter the newest ones are kept."""

    __tablename__ = "watched_answer"
    __table_args__ = (Index("ix_watched_answer_adapter", "model", "adapter", "seq"),)
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    """`seq` of its exchange."""
    exchange_id: Mapped[str] = mapped_column(String(64), unique=True)
    model: Mapped[str] = mapped_column(String(255))
    adapter: Mapped[str] = mapped_column(String(255))
    session_id: Mapped[str] = mapped_column(String(255))
    tokens: Mapped[int | None]
    """Completion tokens; null: not known."""
    refusal: Mapped[bool]
    clarifying: Mapped[bool]
    invalid_call: Mapped[bool]
    repetition: Mapped[bool]
    empty: Mapped[bool]
    cut: Mapped[bool]


class AdapterProfileRow(Base):
    """Sums over the answers of one adapter, without content: they stay when the answers go."""

    __tablename__ = "adapter_profile"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(255), primary_key=True)
    at: Mapped[float]
    body: Mapped[str] = mapped_column(Text)
    """JSON of `ingest.reward_watch.profile.Profile`."""
