"""Tables of captured traffic: exchanges, their choices, and records that could not be stored."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index, String, Text, false
from sqlalchemy.orm import Mapped, mapped_column

from sidecar.store.models.base import Base, partial_index
from sidecar.store.tables import WIDE

# Conditions of partial indexes, which queries state in these words (`sqlalchemy.text`).
UNDECIDED = "selection IN ('new', 'backlog')"
"""Exchanges that selection still decides."""
IN_TURN = "turn_id <> ''"
COUNTED = (
    "fallback_from = '' AND (outcome IN ('upstream_error', 'cut') OR (outcome = 'ok' AND "
    "(status < 400 OR status = 404 OR status >= 500)))"
)
"""Exchanges that count for the arm that answered. A request that vLLM refused as a client error
does not, except that vLLM did not know the adapter (404)."""
IN_TRACE = "trace_id <> ''"
NAMED_OTHERWISE = "substr(session_key, 1, 1) = 'h' AND session_key <> session_id"
"""Exchanges that stand in another session than the one that their client's header named."""
TAKEN_OVER = "fallback_from <> ''"
"""Exchanges that another adapter was asked to answer in place of the routed one, which failed."""
EXAMINED = (
    "held_out AND selection = 'held_out' AND outcome = 'ok' AND status = 200 AND surface = 'chat'"
)
"""Exchanges whose prompts the gate may ask again: sampling fresh answers and judging them need the
messages of a chat request (`ingest.grouping.selection.CHOSEN_SURFACES`). One that is not decided
yet may still prove to belong to a session that is trained on."""


class ExchangeRow(Base):
    """One captured exchange.

    Each index costs every insert, so each has queries that need it: tests/rooms/test_query_plans.py
    checks both.
    """

    __tablename__ = "exchange"
    __table_args__ = (
        Index("ix_exchange_session", "session_id", "held_out"),
        partial_index("ix_exchange_turn", "turn_id", where=IN_TURN),
        partial_index("ix_exchange_trace", "trace_id", where=IN_TRACE),
        partial_index("ix_exchange_named_otherwise", "session_key", where=NAMED_OTHERWISE),
        partial_index("ix_exchange_undecided", "selection", "seq", where=UNDECIDED),
        partial_index(
            "ix_exchange_counted", "public_model", "adapter", "arm", "seq", where=COUNTED
        ),
        partial_index("ix_exchange_taken_over", "fallback_from", "seq", where=TAKEN_OVER),
        partial_index("ix_exchange_base_id", "base_id", where="base_id IS NOT NULL"),
        partial_index(
            "ix_exchange_prompt", "prompt_key", "selection", "seq", where="prompt_key IS NOT NULL"
        ),
        partial_index("ix_exchange_examined", "public_model", "seq", "session_id", where=EXAMINED),
    )
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    exchange_id: Mapped[str] = mapped_column(String(64), unique=True)
    stored_at: Mapped[float]
    started_at: Mapped[float]
    surface: Mapped[str] = mapped_column(String(16))
    public_model: Mapped[str] = mapped_column(String(255))
    adapter: Mapped[str] = mapped_column(String(255))
    arm: Mapped[str] = mapped_column(String(16))
    propensity: Mapped[float]
    replica: Mapped[str] = mapped_column(String(255))
    session_key: Mapped[str] = mapped_column(String(255))
    session_id: Mapped[str] = mapped_column(String(255), default="", server_default="")
    """The session that its content belongs to; in older rows, `session_key`."""
    parent_id: Mapped[str | None] = mapped_column(String(64))
    """The exchange that this one continues."""
    base_id: Mapped[str | None] = mapped_column(String(64))
    """The exchange that request and prompt ids are stored as a difference from (`contents`)."""
    turn: Mapped[int] = mapped_column(default=0, server_default="0")
    branch: Mapped[int] = mapped_column(default=0, server_default="0")
    segment: Mapped[int] = mapped_column(default=0, server_default="0")
    placed_by: Mapped[str] = mapped_column(String(16), default="", server_default="")
    """How its place was found (`ingest.sessions.records.How`); empty: it has none."""
    held_out: Mapped[bool]
    shares_opening: Mapped[bool] = mapped_column(default=False, server_default=false())
    """It begins its session as sessions on the other side of held-out begin."""
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
    address_hash: Mapped[str] = mapped_column(String(64), default="", server_default="")
    turn_id: Mapped[str] = mapped_column(String(64), default="")
    """The same for a request and its retries; empty: a turn of its own."""
    retry_count: Mapped[int] = mapped_column(default=0)
    request_bytes: Mapped[int] = mapped_column(WIDE, default=0)
    reply_bytes: Mapped[int] = mapped_column(WIDE, default=0)
    fallback_from: Mapped[str] = mapped_column(String(255), default="")
    """The adapter that vLLM did not know; another one answered in its place."""
    selection: Mapped[str] = mapped_column(String(64), default="new")
    """new -> chosen, or the reason it was not (held_out, untrainable, session_cap, rate, …)."""
    prompt_key: Mapped[str | None] = mapped_column(String(32))
    """Shared by exchanges whose answers are draws of one distribution
    (`ingest.grouping.same_prompt`); null: it shares none."""


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


class DeadLetterRow(Base):
    """A bus record that could not be read or stored, kept whole for examination."""

    __tablename__ = "dead_letter"
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    at: Mapped[float]
    reason: Mapped[str] = mapped_column(Text)
    payload: Mapped[bytes]
    """The record as it came, not compressed."""
    digest: Mapped[str | None] = mapped_column(String(64), index=True, unique=True)
    """Digest of the record and of its place on the bus: one that comes again is not kept twice."""
