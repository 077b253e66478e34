"""Tables of groups: the answers to one prompt, their scores, and what the judge was asked."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text, false
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base, partial_index
from sidecar.store.tables import WIDE


class GroupRow(Base):
    """One chosen prompt and the life of its group.

    status: sampling -> sampled -> scored -> claimed -> trained;
    or set_aside / dropped with a reason.
    """

    __tablename__ = "answer_group"
    __table_args__ = (
        Index("ix_answer_group_session", "session_id", "created_at"),
        Index("ix_answer_group_status", "status", "seq"),
        partial_index(
            "ix_answer_group_project", "project", "created_at", where="project IS NOT NULL"
        ),
        partial_index(
            "ix_answer_group_near_key", "near_key", "created_at", where="near_key IS NOT NULL"
        ),
        partial_index(
            "ix_answer_group_opening_key", "opening_key", "seq", where="opening_key IS NOT NULL"
        ),
        partial_index("ix_answer_group_run", "run_id", where="run_id IS NOT NULL"),
        partial_index("ix_answer_group_reason", "reason", "seq", where="reason IS NOT NULL"),
        partial_index("ix_answer_group_scored_at", "scored_at", where="scored_at IS NOT NULL"),
    )
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    group_id: Mapped[str] = mapped_column(String(64), unique=True)
    exchange_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("exchange.exchange_id"), unique=True
    )
    session_key: Mapped[str] = mapped_column(String(255))
    session_id: Mapped[str] = mapped_column(String(255), default="", server_default="")
    adapter: Mapped[str] = mapped_column(String(255))
    masked_by: Mapped[str | None] = mapped_column(String(64))
    """What forbade tokens while the answers were sampled, or may have; null: nothing did."""
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    sampling_attempts: Mapped[int] = mapped_column(default=0)
    """Rounds of sampling that ended with candidates missing."""
    attempts: Mapped[int] = mapped_column(default=0)
    """Judge replies that were refused."""
    judge_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    """Attempts without a usable answer that were the group's own fault."""
    judge_failures: Mapped[str | None] = mapped_column(Text)
    """Failed attempts by reason, as JSON; also those whose fault is unknown."""
    judging_since: Mapped[float | None]
    """Set while a worker asks the judge; a worker that died leaves it set."""
    detail: Mapped[str | None] = mapped_column(Text)
    """The judge's last error, what a training run met, or the reason in words; 500 characters,
    without keys."""
    lease_until: Mapped[float] = mapped_column(default=0.0)
    """Until then one worker holds the group; the lease of a dead worker expires."""
    created_at: Mapped[float]
    scored_at: Mapped[float | None]
    judge_model: Mapped[str | None] = mapped_column(String(255))
    rubric_hash: Mapped[str | None] = mapped_column(String(64))
    disagreement: Mapped[float | None]
    """Mean over the answers of how far the judge's passes differ; null after a single pass."""
    flipped_pairs: Mapped[float | None]
    """Share of the pairs of answers that two passes put in opposite order."""
    passes: Mapped[int | None]
    """Passes of the judge that the scores are the mean over; null: not known."""
    reward_rule: Mapped[str | None] = mapped_column(Text)
    """JSON: how the answers' rewards were made; null: they are the judge's scores."""
    run_id: Mapped[str | None] = mapped_column(String(64))
    learn_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    """Runs that failed, or may have failed, because of this group."""
    project: Mapped[str | None] = mapped_column(String(64))
    near_key: Mapped[str | None] = mapped_column(String(32))
    """Shared by near-identical prompts (`ingest.grouping.features`)."""
    opening_key: Mapped[str | None] = mapped_column(String(32))
    """Shared by steps with the same system prompt and tools."""
    propensity: Mapped[float | None]
    """Probability with which its exchange was drawn, 0..1."""
    chosen_because: Mapped[str | None] = mapped_column(Text)
    """JSON: `reason`, and the `features` that the probability was made of."""


class AnswerRow(Base):
    """One answer of a group, served or sampled."""

    __tablename__ = "answer"
    __table_args__ = (
        partial_index("ix_answer_exchange", "exchange_id", where="exchange_id IS NOT NULL"),
    )
    group_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("answer_group.group_id"), primary_key=True
    )
    index: Mapped[int] = mapped_column(primary_key=True)
    origin: Mapped[str] = mapped_column(String(16))
    message_body: Mapped[bytes]
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    token_ids: Mapped[bytes]
    logprobs: Mapped[bytes]
    temperature: Mapped[float]
    untrainable_reason: Mapped[str | None] = mapped_column(String(64))
    score: Mapped[float | None]
    disagreement: Mapped[float | None]
    """Mean absolute difference between two passes' scores."""
    explanation: Mapped[str | None] = mapped_column(Text)
    independent_reward: Mapped[float | None]
    """Weighted mean of the verifiers' scores."""
    reward: Mapped[float | None]
    """What is learned from; null: the score."""
    checks: Mapped[str | None] = mapped_column(Text)
    """JSON list: what each verifier found; encrypted with a key."""
    exchange_id: Mapped[str | None] = mapped_column(String(64))
    """The exchange of the same prompt that it was served in; null: the group's own."""


class JudgeCallRow(Base):
    """Every judge call, good or bad: what was asked in which order, what came back."""

    __tablename__ = "judge_call"
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    group_id: Mapped[str] = mapped_column(String(64), index=True)
    """A group's id, or a gate comparison's."""
    again: Mapped[bool] = mapped_column(default=False, server_default=false())
    """The group has its scores, and is scored again to measure the judge's noise."""
    at: Mapped[float]
    judge_model: Mapped[str] = mapped_column(String(255))
    rubric_hash: Mapped[str] = mapped_column(String(64))
    order_seed: Mapped[int] = mapped_column(WIDE)
    ok: Mapped[bool]
    error: Mapped[str | None] = mapped_column(Text)
    reply: Mapped[str] = mapped_column(Text)
    prompt_tokens: Mapped[int | None] = mapped_column(WIDE)
    completion_tokens: Mapped[int | None] = mapped_column(WIDE)
    cost_usd: Mapped[float | None]
    seconds: Mapped[float]
    cached: Mapped[bool] = mapped_column(default=False, server_default=false())
    """A kept reply: nobody was asked, and its tokens and cost are 0."""


class JudgeReplyRow(Base):
    """A judge's reply that is kept, so that the same question is paid for once."""

    __tablename__ = "judge_reply"
    __table_args__ = (
        Index("ix_judge_reply_exchange", "exchange_id"),
        Index("ix_judge_reply_written", "written_bytes"),
        Index("ix_judge_reply_at", "at"),
    )
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    """Keyed digest of all that the reply depends on."""
    exchange_id: Mapped[str] = mapped_column(String(64))
    """Whose content it is about; empty: a group of a calibration. Not a foreign key: it is deleted
    with the exchange, in the same transaction."""
    at: Mapped[float]
    written_bytes: Mapped[int] = mapped_column(WIDE)
    """Bytes of all replies that were kept before it. So those that begin less than a limit before
    the newest one's end are together under the limit."""
    size_bytes: Mapped[int] = mapped_column(WIDE)
    """About what it takes."""
    reply: Mapped[str] = mapped_column(Text)


class BestOfScoreRow(Base):
    """Scores given while a user waited, until the exchange that they belong to is stored."""

    __tablename__ = "best_of_score"
    exchange_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Not a foreign key: the scores come first."""
    at: Mapped[float] = mapped_column(index=True)
    answers_digest: Mapped[str] = mapped_column(String(64))
    scores: Mapped[list[Any]]
    explanations: Mapped[list[Any]]
    judge_model: Mapped[str] = mapped_column(String(255))
    rubric_hash: Mapped[str] = mapped_column(String(64))
