"""Digests of deleted groups, forgotten names, and the mark of adapters that learned from them

Revision ID: 0015_retention
Revises: 0014_funnel
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015_retention"
down_revision = "0014_funnel"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "group_digest",
        sa.Column("group_id", sa.String(64), nullable=False),
        sa.Column(
            "group_seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False
        ),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("exchange_id", sa.String(64), nullable=False),
        sa.Column("session_digest", sa.String(64), nullable=False),
        sa.Column("user_digest", sa.String(64), nullable=False),
        sa.Column("content_digest", sa.String(64), nullable=False),
        sa.Column("adapter", sa.String(255), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.Column("judge_model", sa.String(255)),
        sa.Column("rubric_hash", sa.String(64)),
        sa.Column("deleted_at", sa.Float(), nullable=False),
        sa.Column("forgotten", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("group_id", name="pk_group_digest"),
    )
    op.create_index("ix_group_digest_run", "group_digest", ["run_id", "group_seq"])
    op.create_index("ix_group_digest_exchange", "group_digest", ["exchange_id"])
    op.create_index("ix_group_digest_session", "group_digest", ["session_digest"])
    named = sa.text("user_digest <> ''")
    op.create_index(
        "ix_group_digest_user",
        "group_digest",
        ["user_digest"],
        sqlite_where=named,
        postgresql_where=named,
    )
    op.create_table(
        "forgotten",
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("until", sa.Float()),
        sa.PrimaryKeyConstraint("kind", "digest", name="pk_forgotten"),
    )
    op.add_column("adapter_version", sa.Column("forgotten_at", sa.Float()))
    op.create_index("ix_gate_comparison_exchange", "gate_comparison", ["exchange_id"])
    shown = sa.text("by_id IS NOT NULL")
    op.create_index("ix_signal_by", "signal", ["by_id"], sqlite_where=shown, postgresql_where=shown)
    store = op.get_bind()
    if store.dialect.name == "sqlite" and store.scalar(sa.text("SELECT 1 FROM exchange")) is None:
        # From its beginning every writer overwrites what it deletes (`sidecar.store.traces`).
        op.execute(
            "INSERT INTO flag (name, value, updated_at) VALUES ('overwrites_deleted', '1', 0)"
        )


def downgrade() -> None:
    op.drop_index("ix_signal_by", "signal")
    op.drop_index("ix_gate_comparison_exchange", "gate_comparison")
    op.drop_column("adapter_version", "forgotten_at")
    op.drop_table("forgotten")
    op.drop_table("group_digest")
