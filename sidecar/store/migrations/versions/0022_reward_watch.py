"""Traits of served answers, sums for each adapter, and runs that the reward watch held

Revision ID: 0022_reward_watch
Revises: 0021_judge_noise
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022_reward_watch"
down_revision = "0021_judge_noise"
branch_labels = None
depends_on = None

WIDE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "watched_answer",
        sa.Column("seq", WIDE, primary_key=True, autoincrement=True),
        sa.Column("exchange_id", sa.String(64), nullable=False, unique=True),
        sa.Column("model", sa.String(255), nullable=False),
        sa.Column("adapter", sa.String(255), nullable=False),
        sa.Column("session_id", sa.String(255), nullable=False),
        sa.Column("tokens", sa.Integer()),
        sa.Column("refusal", sa.Boolean(), nullable=False),
        sa.Column("clarifying", sa.Boolean(), nullable=False),
        sa.Column("invalid_call", sa.Boolean(), nullable=False),
        sa.Column("repetition", sa.Boolean(), nullable=False),
        sa.Column("empty", sa.Boolean(), nullable=False),
        sa.Column("cut", sa.Boolean(), nullable=False),
    )
    op.create_index("ix_watched_answer_adapter", "watched_answer", ["model", "adapter", "seq"])
    op.create_table(
        "adapter_profile",
        sa.Column("model", sa.String(255), primary_key=True),
        sa.Column("adapter", sa.String(255), primary_key=True),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
    )
    op.add_column("training_run", sa.Column("held", sa.JSON()))


def downgrade() -> None:
    op.drop_column("training_run", "held")
    op.drop_table("adapter_profile")
    op.drop_table("watched_answer")
