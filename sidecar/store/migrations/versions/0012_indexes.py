"""Indexes that the queries need at a million exchanges, in place of those that none needs

Revision ID: 0012_indexes
Revises: 0011_base
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012_indexes"
down_revision = "0011_base"
branch_labels = None
depends_on = None

BEFORE = (
    ("exchange", "adapter"),
    ("exchange", "fallback_from"),
    ("exchange", "selection"),
    ("exchange", "session_id"),
    ("exchange", "session_key"),
    ("exchange", "started_at"),
    ("exchange", "turn_id"),
    ("answer_group", "run_id"),
    ("answer_group", "session_id"),
    ("answer_group", "session_key"),
    ("answer_group", "status"),
    ("adapter_version", "state"),
    ("canary", "model"),
    ("canary", "state"),
    ("training_run", "model"),
    ("training_run", "status"),
)
"""Table and column of each index that goes."""
COUNTED = (
    "fallback_from = '' AND (outcome IN ('upstream_error', 'cut') OR (outcome = 'ok' AND "
    "(status < 400 OR status = 404 OR status >= 500)))"
)
AFTER: tuple[tuple[str, str, tuple[str, ...], str | None], ...] = (
    ("exchange", "session", ("session_id", "held_out"), None),
    ("exchange", "turn", ("turn_id",), "turn_id <> ''"),
    ("exchange", "undecided", ("selection", "seq"), "selection IN ('new', 'backlog')"),
    ("exchange", "counted", ("public_model", "adapter", "arm", "seq"), COUNTED),
    (
        "exchange",
        "taken_over",
        ("fallback_from", "seq"),
        "fallback_from <> '' AND outcome <> 'upstream_error'",
    ),
    (
        "exchange",
        "examined",
        ("public_model", "seq", "session_id"),
        "held_out AND selection = 'held_out' AND outcome = 'ok' AND status = 200 AND "
        "surface = 'chat'",
    ),
    ("answer_group", "session", ("session_id", "created_at"), None),
    ("answer_group", "status", ("status", "seq"), None),
    ("answer_group", "run", ("run_id",), "run_id IS NOT NULL"),
    ("answer_group", "reason", ("reason", "seq"), "reason IS NOT NULL"),
    ("answer_group", "scored_at", ("scored_at",), "scored_at IS NOT NULL"),
    ("audit", "subject", ("subject", "seq"), None),
    ("adapter_version", "state", ("model", "state", "version"), None),
    ("canary", "created_at", ("model", "created_at", "canary_id"), None),
    ("canary", "state", ("model", "state", "created_at"), None),
    ("training_run", "started_at", ("model", "started_at", "run_id"), None),
    ("training_run", "ended_at", ("model", "ended_at", "started_at"), None),
    ("training_run", "status", ("status", "model"), None),
)
"""Table, name, columns and condition of each index that comes."""


def upgrade() -> None:
    for table, column in BEFORE:
        op.drop_index(f"ix_{table}_{column}", table)
    for table, name, columns, where in AFTER:
        condition = sa.text(where) if where is not None else None
        op.create_index(
            f"ix_{table}_{name}",
            table,
            list(columns),
            sqlite_where=condition,
            postgresql_where=condition,
        )


def downgrade() -> None:
    for table, name, _, _ in AFTER:
        op.drop_index(f"ix_{table}_{name}", table)
    for table, column in BEFORE:
        op.create_index(f"ix_{table}_{column}", table, [column])
