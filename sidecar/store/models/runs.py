"""Tables of training runs and of their optimiser steps."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base


class RunRow(Base):
    """One training run. status: running -> finished | failed | skipped; or held at once."""

    __tablename__ = "training_run"
    __table_args__ = (
        Index("ix_training_run_started_at", "model", "started_at", "run_id"),
        Index("ix_training_run_ended_at", "model", "ended_at", "started_at"),
        Index("ix_training_run_status", "status", "model"),
    )
    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(255))
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[float]
    heartbeat_at: Mapped[float]
    ended_at: Mapped[float | None]
    parent: Mapped[str] = mapped_column(String(255))
    """Adapter name that it started from, or "base"."""
    settings: Mapped[dict[str, Any]]
    counts: Mapped[dict[str, Any]]
    """Groups by outcome: used, and dropped by reason."""
    metrics: Mapped[list[Any]]
    """One object per optimiser step."""
    adapter: Mapped[str | None] = mapped_column(String(255))
    place: Mapped[str | None] = mapped_column(String(64))
    """The group that it computes now; "": none; null: its trainer does not say."""
    held: Mapped[dict[str, Any] | None]
    """Why the reward watch held the run: `findings`, and how often it was asked (`checks`)."""
    holder: Mapped[dict[str, Any] | None]
    """The process that has the lease (`learner.resume.holder.Holder`); null: not known."""
    deaths: Mapped[list[Any] | None]
    """One object for each time that it was killed and resumed (`learner.resume.rule.Death`)."""
    progress: Mapped[dict[str, Any] | None]
    """Where it is, or was when it ended (`learner.progress.estimate.Progress`), and `at`."""


class RunStepRow(Base):
    """One optimiser step of a run, written when it is done."""

    __tablename__ = "run_step"
    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """From 1."""
    at: Mapped[float]
    body: Mapped[dict[str, Any]]
    """`learner.records.StepMetrics`."""
