"""Tables of what was deleted: digests of groups that adapters learned from, and names that were
forgotten. Neither holds content."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base, partial_index
from sidecar.store.tables import WIDE


class GroupDigestRow(Base):
    """A group that a training run had and whose content is deleted: what a lineage still needs."""

    __tablename__ = "group_digest"
    __table_args__ = (
        Index("ix_group_digest_run", "run_id", "group_seq"),
        Index("ix_group_digest_exchange", "exchange_id"),
        Index("ix_group_digest_session", "session_digest"),
        partial_index("ix_group_digest_user", "user_digest", where="user_digest <> ''"),
    )
    group_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    group_seq: Mapped[int] = mapped_column(WIDE)
    """`seq` as in `answer_group`: the order of choosing."""
    run_id: Mapped[str] = mapped_column(String(64))
    exchange_id: Mapped[str] = mapped_column(String(64))
    session_digest: Mapped[str] = mapped_column(String(64))
    user_digest: Mapped[str] = mapped_column(String(64))
    """"": the request named no user."""
    content_digest: Mapped[str] = mapped_column(String(64))
    """Digest of the prompt and the answers; "": they could not be read."""
    adapter: Mapped[str] = mapped_column(String(255))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    scores: Mapped[list[Any]]
    rewards: Mapped[list[Any] | None]
    """What was learned from; null: the scores."""
    judge_model: Mapped[str | None] = mapped_column(String(255))
    rubric_hash: Mapped[str | None] = mapped_column(String(64))
    deleted_at: Mapped[float]
    forgotten: Mapped[bool]
    """True: `sidecar forget` deleted it. False: retention did."""


class ForgottenRow(Base):
    """A name whose records are dropped when they arrive."""

    __tablename__ = "forgotten"
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    """user | session | session_key | exchange | source | told"""
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Digest of kind and name; the name itself is not stored."""
    at: Mapped[float]
    until: Mapped[float | None]
    """Records of requests that arrived later are taken again; null: none is."""
