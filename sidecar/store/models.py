"""The store's tables as row classes, by domain: the one place that states each column."""

from __future__ import annotations

import sqlite3
from typing import Any, ClassVar

from sqlalchemy import (
    CheckConstraint,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sidecar.store.tables import (
    API_KEY,
    BREAKER_TRIP,
    COUNTER,
    METADATA,
    ROUTING_TABLE,
    TABLE_TAKEN,
    WIDE,
    JsonArray,
    JsonObject,
)

# The base of every row class.


class Base(DeclarativeBase):
    """A row; its table belongs to the store's metadata."""

    metadata = METADATA
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        dict[str, Any]: JsonObject,
        list[Any]: JsonArray,
        bytes: LargeBinary,
        float: Float,
    }


def partial_index(name: str, *columns: str, where: str) -> Index:
    """An index of the rows for which `where` holds: the others cost it nothing.

    SQLite takes it only for a query whose WHERE states the condition in the same words, so queries
    use the same constant. `x IS NOT NULL` is implied by any comparison of x.

    The migrations' `env.py` states the condition for PostgreSQL too. Here that would make each
    process import SQLAlchemy's dialect of PostgreSQL, also an offline rollback.
    """
    return Index(name, *columns, sqlite_where=text(where))


# Tables of captured traffic: exchanges, their choices, and records that could not be stored.

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
IN_TASK = "task <> ''"
READY = "over_at IS NOT NULL AND group_id IS NULL AND excluded IS NULL"
"""Sessions that may become members of a group (`TaskMemberRow`)."""
OVER = "over_at IS NOT NULL AND key_kind <> 'rehearsal'"
"""Finished sessions that are no rehearsals (`TaskMemberRow`)."""
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
        partial_index("ix_exchange_task", "task", "seq", where=IN_TASK),
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
    """How its place was found (`ingest.sessions.messages.How`); empty: it has none."""
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
    key_id: Mapped[str] = mapped_column(String(64), default="", server_default="")
    address_hash: Mapped[str] = mapped_column(String(64), default="", server_default="")
    task: Mapped[str] = mapped_column(String(64), default="", server_default="")
    origin: Mapped[str] = mapped_column(String(16), default="user", server_default="user")
    turn_id: Mapped[str] = mapped_column(String(64), default="", server_default="")
    """The same for a request and its retries; empty: a turn of its own."""
    retry_count: Mapped[int] = mapped_column(default=0, server_default="0")
    request_bytes: Mapped[int] = mapped_column(WIDE, default=0, server_default="0")
    reply_bytes: Mapped[int] = mapped_column(WIDE, default=0, server_default="0")
    fallback_from: Mapped[str] = mapped_column(String(255), default="", server_default="")
    """The adapter that vLLM did not know; another one answered in its place."""
    selection: Mapped[str] = mapped_column(String(64), default="new")
    """new -> chosen, or the reason it was not (held_out, untrainable, session_cap, rate, …)."""
    prompt_key: Mapped[str | None] = mapped_column(String(32))
    """Shared by exchanges whose answers are draws of one distribution
    (`ingest.grouping.same_prompt`); null: it shares none."""
    task_group_id: Mapped[str | None] = mapped_column(String(64))
    """The group of whole sessions that was drawn with it; null: none."""


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


# Tables of control: who acts, what is still loaded and why, what must not come back, and the
# replies of changes by key.


class LeaseRow(Base):
    """Who acts, of several processes on one store: the holder lets `beat` grow."""

    __tablename__ = "lease"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    """Id of the holder's `state_dir`; empty: given back."""
    beat: Mapped[int]
    taken_at: Mapped[float]
    told: Mapped[str] = mapped_column(String(255))
    """The holder in words: machine and process."""


class UnwantedAdapterRow(Base):
    """An adapter that a vLLM has loaded and that nothing wants: it goes after a grace."""

    __tablename__ = "unwanted_adapter"
    replica: Mapped[str] = mapped_column(String(255), primary_key=True)
    """SHA-256 (hex) of the replica's base URL, which may hold a password."""
    adapter: Mapped[str] = mapped_column(String(255), primary_key=True)
    since: Mapped[float]


class AliasEventRow(Base):
    """Append-only: every move of an alias, chained by hashes."""

    __tablename__ = "alias_event"
    __table_args__ = (Index("ix_alias_event_model", "model", "alias", "seq"),)
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    at: Mapped[float]
    model: Mapped[str] = mapped_column(String(255))
    alias: Mapped[str] = mapped_column(String(32))
    before: Mapped[str | None] = mapped_column(String(255))
    after: Mapped[str | None] = mapped_column(String(255))
    """Adapter name or "base"; null: the alias points nowhere."""
    generation: Mapped[int] = mapped_column(WIDE)
    actor: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str] = mapped_column(Text)
    prev_hash: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))


class BannedDigestRow(Base):
    """Adapter files that lost their traffic: no version with them is tried or registered again."""

    __tablename__ = "banned_digest"
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(255))
    """The version that lost it."""
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(String(128))
    reason: Mapped[str] = mapped_column(Text)


# Tables of what was deleted: digests of groups that adapters learned from, and names that were
# forgotten. Neither holds content.


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


# Tables of what clients tell of answers, and of what the traffic itself tells of them.


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
    done: Mapped[bool | None]
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


class TaskGroupRow(Base):
    """Finished sessions of one task, whose rewards are compared.

    status: waiting (for the judge) -> scored -> claimed -> trained; or set_aside / dropped with a
    reason.
    """

    __tablename__ = "task_group"
    __table_args__ = (
        Index("ix_task_group_status", "status", "seq"),
        partial_index("ix_task_group_run", "run_id", where="run_id IS NOT NULL"),
    )
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    group_id: Mapped[str] = mapped_column(String(64), unique=True)
    """`tg_` and 26 characters."""
    project: Mapped[str] = mapped_column(String(64))
    key_kind: Mapped[str] = mapped_column(String(16))
    """What its sessions have in common: header | prompt | template | rehearsal."""
    key: Mapped[str] = mapped_column(String(64))
    adapter: Mapped[str] = mapped_column(String(255))
    """The one version that sampled all answers."""
    status: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(Text)
    detail: Mapped[str | None] = mapped_column(Text)
    """Details of the reason; 500 characters."""
    created_at: Mapped[float]
    scored_at: Mapped[float | None]
    judge_attempts: Mapped[int] = mapped_column(default=0, server_default="0")
    judge_model: Mapped[str | None] = mapped_column(String(255))
    rubric_hash: Mapped[str | None] = mapped_column(String(64))
    """Who scored; both null where outcomes alone are the rewards."""
    run_id: Mapped[str | None] = mapped_column(String(64))
    learn_attempts: Mapped[int] = mapped_column(default=0, server_default="0")


class TaskMemberRow(Base):
    """A session that has a task key: enrolled with its first exchange, member of one group at
    most."""

    __tablename__ = "task_member"
    __table_args__ = (
        partial_index("ix_task_member_ready", "key", "adapter", "over_at", where=READY),
        partial_index("ix_task_member_group", "group_id", where="group_id IS NOT NULL"),
        partial_index("ix_task_member_project", "project", "over_at", where=OVER),
    )
    session_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    project: Mapped[str] = mapped_column(String(64))
    key_kind: Mapped[str] = mapped_column(String(16))
    key: Mapped[str] = mapped_column(String(64))
    adapter: Mapped[str] = mapped_column(String(255))
    caller: Mapped[str] = mapped_column(String(255))
    """`user:` and its user, else `key:` and its key, else `address:` and the hash of its address;
    empty: not known."""
    began_at: Mapped[float]
    over_at: Mapped[float | None]
    """When it was over, and known to have what its reward is made of; null: it goes on, or nobody
    told yet how it ended. Turns that began later are no part of it."""
    reopened: Mapped[bool] = mapped_column(default=False, server_default=false())
    """A turn came after it was over; that happens once."""
    excluded: Mapped[str | None] = mapped_column(String(32))
    """Why it becomes a member of no group; null: nothing speaks against it."""
    group_id: Mapped[str | None] = mapped_column(String(64))
    place: Mapped[int | None]
    """Its index in the group."""
    reward: Mapped[float | None]
    """0..1; null: not scored yet."""
    source: Mapped[str | None] = mapped_column(String(16))
    """What the reward rests on: outcome | ruler | mixed."""
    exchange_ids: Mapped[list[Any] | None]
    """The exchanges that it had when the group was drawn; later ones do not count."""


class RehearsalRow(Base):
    """One attempt of the team's runner at a recorded task."""

    __tablename__ = "rehearsal"
    __table_args__ = (Index("ix_rehearsal_task", "task"),)
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    session_id: Mapped[str] = mapped_column(String(255), unique=True)
    task: Mapped[str] = mapped_column(String(64))
    """The exchange that the task begins with; also the `task` of the attempt's exchanges."""
    project: Mapped[str] = mapped_column(String(64))
    adapter: Mapped[str] = mapped_column(String(255))
    attempt: Mapped[int]
    """Its number in the group, from 0."""
    began_at: Mapped[float]
    ended_at: Mapped[float | None]
    result: Mapped[str] = mapped_column(String(32))
    """playing | ended, or why it counts for nothing."""
    detail: Mapped[str | None] = mapped_column(Text)
    """What the runner failed by; 500 characters."""
    outcome: Mapped[float | None]
    success: Mapped[bool | None]
    tokens: Mapped[int] = mapped_column(default=0, server_default="0")
    """Completion tokens."""


class JudgeCallRow(Base):
    """Every judge call, good or bad: what was asked in which order, what came back."""

    __tablename__ = "judge_call"
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    group_id: Mapped[str] = mapped_column(String(64), index=True)
    """A group's id, or a gate comparison's."""
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


class JudgeNoiseDayRow(Base):
    """Sums over the groups that one judge scored on one day (`ingest.judge_noise.Sums`)."""

    __tablename__ = "judge_noise_day"
    rubric_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    judge_model: Mapped[str] = mapped_column(String(255), primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True)
    """Days since 1970, UTC."""
    groups: Mapped[int]
    freedom: Mapped[int]
    squares: Mapped[float]
    by_position: Mapped[float]
    of_position: Mapped[float]
    flips: Mapped[float]


# Rows of the tables that a proxy reads or writes.


class RoutingRow(Base):
    """The routing table that every proxy polls."""

    __table__ = ROUTING_TABLE
    model: Mapped[str]
    generation: Mapped[int]
    body: Mapped[str]
    updated_at: Mapped[float]


class BreakerTripRow(Base):
    """A canary that the breaker of a proxy took out."""

    __table__ = BREAKER_TRIP
    model: Mapped[str]
    canary: Mapped[str]
    salt: Mapped[str]
    at: Mapped[float]
    reason: Mapped[str]


class TableTakenRow(Base):
    """When a process of a proxy took its newest routing table."""

    __table__ = TABLE_TAKEN
    proxy: Mapped[str]
    model: Mapped[str]
    generation: Mapped[int]
    taken_at: Mapped[float]


class ApiKeyRow(Base):
    """One key of the data plane."""

    __table__ = API_KEY
    key_id: Mapped[str]
    project: Mapped[str]
    name: Mapped[str]
    secret_hash: Mapped[str]
    scopes: Mapped[str]
    expires_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_day: Mapped[int | None]
    best_of_max: Mapped[int]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    generation: Mapped[int]


# Tables of adapter versions: what serves, what is on canary, and who changed it.


class AdapterRow(Base):
    """One immutable adapter version. state: registered -> gating -> ramping -> champion -> retired;
    or rejected, rolled_back."""

    __tablename__ = "adapter_version"
    __table_args__ = (
        UniqueConstraint("model", "version"),
        Index("ix_adapter_version_state", "model", "state", "version"),
    )
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    """vLLM name `<model>--v<version>-<digest12>`; never used twice."""
    model: Mapped[str] = mapped_column(String(255))
    version: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64), index=True)
    path: Mapped[str] = mapped_column(Text)
    """Absolute path of the PEFT folder, as vLLM sees it."""
    parent: Mapped[str] = mapped_column(String(255))
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
    model: Mapped[str] = mapped_column(String(255), primary_key=True)
    alias: Mapped[str] = mapped_column(String(32), primary_key=True)
    adapter: Mapped[str] = mapped_column(String(255))
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
    canary_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    model: Mapped[str] = mapped_column(String(255))
    candidate: Mapped[str] = mapped_column(String(255))
    """Adapter name. One that ended without a verdict may be tried again, in a canary of its own."""
    champion: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(16))
    paused: Mapped[bool] = mapped_column(default=False)
    reason: Mapped[str | None] = mapped_column(Text)
    step: Mapped[int] = mapped_column(default=0)
    salt: Mapped[str] = mapped_column(String(64))
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


# Tables of training runs and of their optimiser steps.


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
    """The process that has the lease (`learner.resume.Holder`); null: not known."""
    deaths: Mapped[list[Any] | None]
    """One object for each time that it was killed and resumed (`learner.resume.Death`)."""
    progress: Mapped[dict[str, Any] | None]
    """Where it is, or was when it ended (`learner.progress.watch.Progress`), and `at`."""
    signal: Mapped[float | None]
    """z of its sessions: whether their rewards say more than chance (`learner.grpo.chance`); null:
    it had none, or too few to tell."""


class RunStepRow(Base):
    """One optimiser step of a run, written when it is done."""

    __tablename__ = "run_step"
    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """From 1."""
    at: Mapped[float]
    body: Mapped[dict[str, Any]]
    """`learner.records.StepMetrics`."""


# Durable counts, the operator's switches, and the next time of the learner's schedule.


class CounterRow(Base):
    """Durable counts of where records went: (stage, reason) -> count."""

    __table__ = COUNTER
    stage: Mapped[str]
    reason: Mapped[str]
    count: Mapped[int]


class FlagRow(Base):
    """Operator's switches, and places and marks of processes, that survive restarts."""

    __tablename__ = "flag"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)
    updated_at: Mapped[float]


class ConditionRow(Base):
    """The state of one part of the system, as the process that observes it last wrote it
    (`sidecar.conditions`)."""

    __tablename__ = "condition"
    line: Mapped[str] = mapped_column(String(255), primary_key=True)
    """Name of the line of adapters; empty: of all."""
    kind: Mapped[str] = mapped_column(String(128), primary_key=True)
    state: Mapped[str] = mapped_column(String(8))
    code: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    to_do: Mapped[str] = mapped_column(Text)
    since: Mapped[float]
    until: Mapped[float | None]
    at: Mapped[float]
    data: Mapped[dict[str, Any]]


class QuarantineRow(Base):
    """A damaged row that was taken out of use (`sidecar.store.quarantine`)."""

    __tablename__ = "quarantine"
    seq: Mapped[int] = mapped_column(WIDE, primary_key=True, autoincrement=True)
    at: Mapped[float]
    table_name: Mapped[str] = mapped_column(String(64))
    key: Mapped[str] = mapped_column(String(255))
    """Its primary key."""
    reason: Mapped[str] = mapped_column(String(16))
    """What it does not hold: text | integer | real | blob | json; content: a body is damaged."""
    detail: Mapped[str] = mapped_column(Text)
    row: Mapped[str | None] = mapped_column(Text)
    """The row as it was found, where it holds nothing that users said or did."""


class ScheduleJobRow(Base):
    """When the learner's schedule comes round next: one row for each model."""

    __tablename__ = "schedule_job"
    id: Mapped[str] = mapped_column(String(255), primary_key=True)
    """Public model name."""
    next_run_time: Mapped[float]
    job_state: Mapped[str] = mapped_column(Text)


# Tables of the reward watch: traits of the newest served answers, and sums for each adapter.


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
    """JSON of `ingest.reward_watch.traits.Profile`."""


# SQLite keeps the types of a new store; one of before keeps its tables.

for _table in METADATA.tables.values():
    _table.dialect_options["sqlite"]["strict"] = sqlite3.sqlite_version_info >= (3, 37)
    for _column in _table.columns:
        if isinstance(_column.type, JsonObject | JsonArray):
            _name = f'"{_column.name}"'  # an older SQLite finds that NULL is no JSON
            _is_json = f"{_name} IS NULL OR json_valid({_name})"
            _check = CheckConstraint(_is_json, name=f"{_column.name}_json")
            _table.append_constraint(_check.ddl_if(dialect="sqlite"))
