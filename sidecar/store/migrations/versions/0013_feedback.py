"""What clients tell of answers, and what the traffic tells of them

Revision ID: 0013_feedback
Revises: 0012_indexes
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from sidecar.store.tables import WIDE

revision = "0013_feedback"
down_revision = "0012_indexes"
branch_labels = None
depends_on = None

PARTIAL = (
    ("exchange", "trace", "trace_id", "trace_id <> ''"),
    ("feedback", "exchange", "exchange_id", "exchange_id IS NOT NULL"),
    ("feedback", "session", "session_id", "session_id IS NOT NULL"),
)
"""Table, name, column and condition of each partial index."""


def upgrade() -> None:
    op.create_table(
        "feedback",
        sa.Column("seq", WIDE, autoincrement=True, nullable=False),
        sa.Column("feedback_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("target_kind", sa.String(16), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("source", sa.String(255), nullable=False),
        sa.Column("received_at", sa.Float(), nullable=False),
        sa.Column("stored_at", sa.Float(), nullable=False),
        sa.Column("score", sa.Float(), nullable=True),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("reward", sa.Float(), nullable=True),
        sa.Column("cost", sa.Float(), nullable=True),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("comment", sa.Text(), nullable=False),
        sa.Column("exchange_id", sa.String(64), nullable=True),
        sa.Column("session_id", sa.String(255), nullable=True),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint("feedback_id", name=op.f("uq_feedback_feedback_id")),
    )
    op.create_table(
        "signal",
        sa.Column("exchange_id", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("session_id", sa.String(255), nullable=False),
        sa.Column("by_id", sa.String(64), nullable=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("exchange_id", "kind", name=op.f("pk_signal")),
    )
    op.create_index("ix_feedback_target", "feedback", ["target"])
    op.create_index("ix_signal_session", "signal", ["session_id"])
    for table, name, column, where in PARTIAL:
        op.create_index(
            f"ix_{table}_{name}",
            table,
            [column],
            sqlite_where=sa.text(where),
            postgresql_where=sa.text(where),
        )


def downgrade() -> None:
    op.drop_index("ix_exchange_trace", "exchange")
    op.drop_table("signal")
    op.drop_table("feedback")
