"""The store's tables. One place for columns: the migrations are made from here (`alembic check`).

The data dictionary (`docs/data-dictionary.md`) says what each column means; comments here only say
what a name cannot. Times are unix seconds (float). Bodies are zlib-compressed JSON (`body`
columns), token arrays are packed (`sidecar.store.arrays`). No foreign-key cascades: records are
kept or forgotten on purpose, never as a side effect.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

NAMING = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JSON,
        list[Any]: JSON,
        bytes: LargeBinary,
        float: Float,
    }


class ExchangeRow(Base):
    """One captured exchange."""

    __tablename__ = "exchange"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    exchange_id: Mapped[str] = mapped_column(String(64), unique=True)
    stored_at: Mapped[float]
    started_at: Mapped[float] = mapped_column(index=True)
    surface: Mapped[str] = mapped_column(String(16))
    public_model: Mapped[str] = mapped_column(String(255))
    adapter: Mapped[str] = mapped_column(String(255), index=True)
    arm: Mapped[str] = mapped_column(String(16))
    propensity: Mapped[float]
    replica: Mapped[str] = mapped_column(String(255))
    session_key: Mapped[str] = mapped_column(String(255), index=True)
    held_out: Mapped[bool]
    request_body: Mapped[bytes]
    prompt_token_ids: Mapped[bytes]
    sampling: Mapped[dict[str, Any]]
    timings: Mapped[dict[str, Any]]
    stream: Mapped[bool]
    status: Mapped[int]
    outcome: Mapped[str] = mapped_column(String(16))
    untrainable_reason: Mapped[str | None] = mapped_column(String(64))
    completion_tokens: Mapped[int | None]
    returned_index: Mapped[int] = mapped_column(default=0, server_default="0")
    trace_id: Mapped[str] = mapped_column(String(64))
    project: Mapped[str] = mapped_column(String(64))
    user: Mapped[str] = mapped_column(String(255))
    key_id: Mapped[str] = mapped_column(String(64), default="")
    turn_id: Mapped[str] = mapped_column(String(64), default="", index=True)
    """The same for a request and its retries; empty: a turn of its own."""
    retry_count: Mapped[int] = mapped_column(default=0)
    request_bytes: Mapped[int] = mapped_column(default=0)
    reply_bytes: Mapped[int] = mapped_column(default=0)
    fallback_from: Mapped[str] = mapped_column(String(255), default="", index=True)
    """The adapter that vLLM did not know, when another answered in its place."""
    selection: Mapped[str] = mapped_column(String(64), default="new", index=True)
    """new -> chosen, or the reason it was not (held_out, untrainable, session_cap, rate, …)."""


class DeadLetterRow(Base):
    """A bus record that could not be read or stored, kept whole for whoever looks into it."""

    __tablename__ = "dead_letter"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float]
    reason: Mapped[str] = mapped_column(Text)
    payload: Mapped[bytes]
    """As it came, not compressed: nothing is known of it."""


class ChoiceRow(Base):
    """One answer of an exchange."""

    __tablename__ = "choice"
    exchange_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("exchange.exchange_id"), primary_key=True
    )
    index: Mapped[int] = mapped_column(primary_key=True)
    message_body: Mapped[bytes]
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    token_ids: Mapped[bytes]
    logprobs: Mapped[bytes]


class GroupRow(Base):
    """One chosen prompt and the life of its group.

    status: sampling -> sampled -> scored -> claimed -> trained;
    or set_aside / dropped with a reason.
    """

    __tablename__ = "answer_group"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    group_id: Mapped[str] = mapped_column(String(64), unique=True)
    exchange_id: Mapped[str] = mapped_column(
        String(64), ForeignKey("exchange.exchange_id"), unique=True
    )
    session_key: Mapped[str] = mapped_column(String(255), index=True)
    adapter: Mapped[str] = mapped_column(String(255))
    status: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(Text)
    sampling_attempts: Mapped[int] = mapped_column(default=0)
    """Rounds of sampling that ended with candidates missing."""
    attempts: Mapped[int] = mapped_column(default=0)
    """Judge attempts that answered rubbish."""
    judge_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    """Attempts without a usable answer that were the group's own fault."""
    judge_failures: Mapped[str | None] = mapped_column(Text)
    """Failed attempts by reason, as JSON; those of which nobody knows whose fault it was too."""
    judging_since: Mapped[float | None]
    """A worker is asking the judge; left behind by a worker that died."""
    detail: Mapped[str | None] = mapped_column(Text)
    """The judge's last error, what a training run met, or the reason in words; 500 characters,
    without keys."""
    lease_until: Mapped[float] = mapped_column(default=0.0)
    """Until then one worker has it; a dead worker's lease runs out."""
    created_at: Mapped[float]
    scored_at: Mapped[float | None]
    judge_model: Mapped[str | None] = mapped_column(String(255))
    rubric_hash: Mapped[str | None] = mapped_column(String(64))
    run_id: Mapped[str | None] = mapped_column(String(64), index=True)
    learn_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    """Runs that failed because of it, or that may have."""


class AnswerRow(Base):
    """One answer of a group, served or sampled."""

    __tablename__ = "answer"
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
    explanation: Mapped[str | None] = mapped_column(Text)


class JudgeCallRow(Base):
    """Every judge call, good or bad: what was asked in which order, what came back."""

    __tablename__ = "judge_call"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    group_id: Mapped[str] = mapped_column(String(64), index=True)
    """A group's id, or a gate comparison's."""
    at: Mapped[float]
    judge_model: Mapped[str] = mapped_column(String(255))
    rubric_hash: Mapped[str] = mapped_column(String(64))
    order_seed: Mapped[int]
    ok: Mapped[bool]
    error: Mapped[str | None] = mapped_column(Text)
    reply: Mapped[str] = mapped_column(Text)
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    cost_usd: Mapped[float | None]
    seconds: Mapped[float]


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


class RunRow(Base):
    """One training run. status: running -> finished | failed | skipped."""

    __tablename__ = "training_run"
    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(255), index=True)
    status: Mapped[str] = mapped_column(String(16), index=True)
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


class AdapterRow(Base):
    """One immutable adapter version. state: registered -> gating -> ramping -> champion -> retired;
    or rejected, rolled_back."""

    __tablename__ = "adapter_version"
    __table_args__ = (UniqueConstraint("model", "version"),)
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    """vLLM name `<model>--v<version>-<digest12>`; never used twice."""
    model: Mapped[str] = mapped_column(String(255))
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64), index=True)
    path: Mapped[str] = mapped_column(Text)
    """Absolute path of the PEFT folder, as vLLM sees it."""
    parent: Mapped[str] = mapped_column(String(255))
    run_id: Mapped[str | None] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[float]


class AliasRow(Base):
    """Where a name points now: champion, previous."""

    __tablename__ = "alias"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    alias: Mapped[str] = mapped_column(String(32), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(255))
    generation: Mapped[int]


class AuditRow(Base):
    """Append-only: every change of an alias, a canary or the learner's state, by whom and why."""

    __tablename__ = "audit"
    seq: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(String(128))
    source: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """The address that the request came from; empty: no request asked for the change."""
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
    canary_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(255), index=True)
    candidate: Mapped[str] = mapped_column(String(255), unique=True)
    champion: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(16), index=True)
    paused: Mapped[bool] = mapped_column(default=False)
    reason: Mapped[str | None] = mapped_column(Text)
    step: Mapped[int] = mapped_column(default=0)
    salt: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]
    step_started_at: Mapped[float]
    ended_at: Mapped[float | None]
    evidence: Mapped[dict[str, Any]]
    """The probe, the gate's summary, each step's counts: what the decision rests on."""
    generation: Mapped[int] = mapped_column(default=1)


class GateComparisonRow(Base):
    """One held-out prompt of a gate: fresh answers of both arms in one blind group, judged."""

    __tablename__ = "gate_comparison"
    __table_args__ = (Index("ix_gate_comparison_canary", "canary_id"),)
    comparison_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    canary_id: Mapped[str] = mapped_column(String(64), ForeignKey("canary.canary_id"))
    exchange_id: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))
    """scored | set_aside"""
    difference: Mapped[float | None]
    """mean score of the candidate's answers minus mean score of the champion's, -1..1"""
    answers: Mapped[list[Any]]
    """Objects {arm, adapter, content, tool_calls, finish_reason, short, score, explanation}."""


class RoutingRow(Base):
    """The routing table that every proxy polls. Body: `sidecar.routing.table.encode_table`."""

    __tablename__ = "routing_table"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    generation: Mapped[int]
    body: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]


class BreakerTripRow(Base):
    """A canary that the breaker of a proxy took out. Written by
    `sidecar.routing.breaker_report`."""

    __tablename__ = "breaker_trip"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    canary: Mapped[str] = mapped_column(String(255), primary_key=True)
    salt: Mapped[str] = mapped_column(String(64), primary_key=True)
    at: Mapped[float]
    reason: Mapped[str] = mapped_column(Text)


class CounterRow(Base):
    """Durable counts of where records went: (stage, reason) -> count."""

    __tablename__ = "counter"
    stage: Mapped[str] = mapped_column(String(32), primary_key=True)
    reason: Mapped[str] = mapped_column(String(64), primary_key=True)
    count: Mapped[int]


class FlagRow(Base):
    """Operator's switches that survive restarts: learner_paused, learner_run_requested, …"""

    __tablename__ = "flag"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]


class ApiKeyRow(Base):
    """One key of the data plane. The key itself is nowhere; proxies poll this table."""

    __tablename__ = "api_key"
    key_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    project: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(String(128))
    secret_hash: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[str] = mapped_column(String(64))
    """Names with a blank between them."""
    expires_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)
    best_of_max: Mapped[int]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    generation: Mapped[int] = mapped_column(index=True)
    """Grows by one with each change of any key, so that proxies need to read only the largest."""
