"""Tables of the judge's noise: groups that are scored twice, and what each window of them says."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base, partial_index


class RescoringRow(Base):
    """A group that was chosen to be scored again. `window_number` is null until that is done."""

    __tablename__ = "rescoring"
    __table_args__ = (
        partial_index("ix_rescoring_due", "due_at", where="window_number IS NULL"),
        partial_index(
            "ix_rescoring_window",
            "rubric_hash",
            "judge_model",
            "passes",
            "window_number",
            where="window_number IS NOT NULL",
        ),
    )
    group_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Not a foreign key: it goes with the group, in the transaction that deletes both."""
    chosen_at: Mapped[float]
    due_at: Mapped[float]
    """When it may be claimed; a worker that claims it puts this off by its lease."""
    attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    judge_model: Mapped[str] = mapped_column(String(255))
    rubric_hash: Mapped[str] = mapped_column(String(64))
    passes: Mapped[int]
    first: Mapped[list[Any]]
    """For each pass, [index of the answer, score] in the order shown."""
    again: Mapped[list[Any] | None]
    at: Mapped[float | None]
    window_number: Mapped[int | None]


class JudgeNoiseRow(Base):
    """What one window of groups that were scored twice says of a judge."""

    __tablename__ = "judge_noise"
    __table_args__ = (Index("ix_judge_noise_at", "rubric_hash", "judge_model", "at"),)
    rubric_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    judge_model: Mapped[str] = mapped_column(String(255), primary_key=True)
    passes: Mapped[int] = mapped_column(primary_key=True)
    window_number: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    whole: Mapped[bool]
    """It has all its groups, and does not change any more."""
    reference: Mapped[bool]
    """Later windows are compared with the newest of these."""
    groups: Mapped[int]
    answers: Mapped[int]
    sd: Mapped[float]
    sd_error: Mapped[float]
    sd_low: Mapped[float]
    sd_high: Mapped[float]
    pass_sd: Mapped[float]
    slope: Mapped[float]
    slope_error: Mapped[float]
    slope_low: Mapped[float]
    slope_high: Mapped[float]
    first_minus_last: Mapped[float]
    first_minus_last_error: Mapped[float]
    first_minus_last_low: Mapped[float]
    first_minus_last_high: Mapped[float]
    shift: Mapped[float]
    shift_error: Mapped[float]
    shift_low: Mapped[float]
    shift_high: Mapped[float]
    flips: Mapped[float]
    flips_error: Mapped[float]
    flips_low: Mapped[float]
    flips_high: Mapped[float]
    drift: Mapped[str | None] = mapped_column(Text)
    """What changed, in words; null: nothing did, or it is not whole yet."""
