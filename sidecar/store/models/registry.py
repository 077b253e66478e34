"""Tables of adapter versions: what serves, what is on canary, and who changed it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base, ReadableText
from sidecar.store.tables import WIDE


class AdapterRow(Base):
    """One immutable adapter version. state: registered -> gating -> ramping -> champion -> retired;
    or rejected, rolled_back."""

    __tablename__ = "adapter_version"
    __table_args__ = (
        UniqueConstraint("model", "version"),
        Index("ix_adapter_version_state", "model", "state", "version"),
    )
    name: Mapped[str] = mapped_column(ReadableText(255), primary_key=True)
    """vLLM name `<model>--v<version>-<digest12>`; never used twice."""
    model: Mapped[str] = mapped_column(String(255))
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(ReadableText(64), index=True)
    path: Mapped[str] = mapped_column(Text)
    """Absolute path of the PEFT folder, as vLLM sees it."""
    parent: Mapped[str] = mapped_column(ReadableText(255))
    run_id: Mapped[str | None] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]
    forgotten_at: Mapped[float | None]
    """When content was forgotten that it, or an adapter that it continues, had learned from."""
    removed_at: Mapped[float | None]
    """When retention removed the folder; null: it is there."""


class AliasRow(Base):
    """Where a name points now: champion, previous, canary, anchor."""

    __tablename__ = "alias"
    model: Mapped[str] = mapped_column(ReadableText(255), primary_key=True)
    alias: Mapped[str] = mapped_column(ReadableText(32), primary_key=True)
    adapter: Mapped[str] = mapped_column(ReadableText(255))
    generation: Mapped[int] = mapped_column(WIDE)


class AuditRow(Base):
    """Append-only: every change of an alias, a canary or the learner's state, by whom and why."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_subject", "subject", "seq"),)
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(String(128))
    source: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """The address that the request came from; empty: no request asked for the change."""
    request_id: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """`x-request-id` of that request's reply; empty: no request asked for the change."""
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(255))
    before: Mapped[dict[str, Any]]
    after: Mapped[dict[str, Any]]
    reason: Mapped[str] = mapped_column(Text)


class CanaryRow(Base):
    """One candidate's canary.

    state: loading -> gating -> ramping -> promoted | rolled_back | inconclusive; paused is a flag.
    Decisions latch: an ended canary never changes.
    """

    __tablename__ = "canary"
    __table_args__ = (
        Index("ix_canary_candidate", "candidate", "created_at"),
        Index("ix_canary_created_at", "model", "created_at", "canary_id"),
        Index("ix_canary_state", "model", "state", "created_at"),
    )
    canary_id: Mapped[str] = mapped_column(ReadableText(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(255))
    candidate: Mapped[str] = mapped_column(ReadableText(255))
    """Adapter name. One that ended without a verdict may be tried again, in a canary of its own."""
    champion: Mapped[str] = mapped_column(ReadableText(255))
    state: Mapped[str] = mapped_column(String(16))
    paused: Mapped[bool] = mapped_column(default=False)
    reason: Mapped[str | None] = mapped_column(Text)
    step: Mapped[int] = mapped_column(default=0)
    salt: Mapped[str] = mapped_column(ReadableText(64))
    created_at: Mapped[float]
    step_started_at: Mapped[float]
    ended_at: Mapped[float | None]
    evidence: Mapped[dict[str, Any]]
    """The probe, the gate's summary, each step's counts: what the decision rests on."""
    generation: Mapped[int] = mapped_column(WIDE, default=1)


class GateComparisonRow(Base):
    """One held-out prompt of a gate: fresh answers of both arms in one blind group, judged."""

    __tablename__ = "gate_comparison"
    __table_args__ = (
        Index("ix_gate_comparison_canary", "canary_id"),
        Index("ix_gate_comparison_exchange", "exchange_id"),
    )
    comparison_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    canary_id: Mapped[str] = mapped_column(String(64), ForeignKey("canary.canary_id"))
    exchange_id: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))
    """scored | set_aside"""
    difference: Mapped[float | None]
    """mean score of the candidate's answers minus mean score of the champion's, -1..1"""
    answers: Mapped[list[Any]]
    """Objects {arm, adapter, content, tool_calls, finish_reason, short, score, disagreement,
    explanation}."""
    judge_model: Mapped[str | None] = mapped_column(String(255))
    rubric_hash: Mapped[str | None] = mapped_column(String(64))
    """Who judged; both null when nobody was asked."""
    disagreement: Mapped[float | None]
    """Mean over the answers of how far the judge's passes differ; null after a single pass."""
    flipped_pairs: Mapped[float | None]
    """Share of the pairs of answers that two passes put in opposite order."""
    place: Mapped[int | None]
    """Its number in the order in which the canary's prompts were drawn, from 1; null in older
    rows."""
    anchor_difference: Mapped[float | None]
    """As `difference`, to the anchor; null also when the champion is the anchor."""
    fault: Mapped[str | None] = mapped_column(String(16))
    """Whose answers kept the judge from scoring it: candidate, champion or unknown."""
    flaws: Mapped[dict[str, Any] | None]
    """Kind of flaw -> the candidate's share of such answers minus the champion's."""
