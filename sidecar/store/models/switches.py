"""Durable counts, the operator's switches, and the next time of the learner's schedule."""

from __future__ import annotations

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base
from sidecar.store.tables import COUNTER


class CounterRow(Base):
    """Durable counts of where records went: (stage, reason) -> count."""

    __table__ = COUNTER
    stage: Mapped[str]
    reason: Mapped[str]
    count: Mapped[int]


class FlagRow(Base):
    """Operator's switches that survive restarts: learner_paused, learner_run_requested, …"""

    __tablename__ = "flag"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]


class ScheduleJobRow(Base):
    """When the learner's schedule comes round next: one row for each model.

    The table of APScheduler's job store (`learner.schedule.job_store`), which names the columns.
    """

    __tablename__ = "schedule_job"
    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    """Public model name."""
    next_run_time: Mapped[float]
    job_state: Mapped[str] = mapped_column(Text)
