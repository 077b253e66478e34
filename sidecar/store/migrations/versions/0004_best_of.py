"""Scores of best-of-N requests, and which answer their clients got

Revision ID: 0004_best_of
Revises: 0003_turns
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_best_of"
down_revision = "0003_turns"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "best_of_score",
        sa.Column("exchange_id", sa.String(length=64), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("answers_digest", sa.String(length=64), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.Column("explanations", sa.JSON(), nullable=False),
        sa.Column("judge_model", sa.String(length=255), nullable=False),
        sa.Column("rubric_hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("exchange_id", name=op.f("pk_best_of_score")),
    )
    op.create_index(op.f("ix_best_of_score_at"), "best_of_score", ["at"], unique=False)
    with op.batch_alter_table("exchange", schema=None) as batch_op:
        batch_op.add_column(
            sa.Column("returned_index", sa.Integer(), server_default="0", nullable=False)
        )


def downgrade() -> None:
    with op.batch_alter_table("exchange", schema=None) as batch_op:
        batch_op.drop_column("returned_index")
    op.drop_index(op.f("ix_best_of_score_at"), table_name="best_of_score")
    op.drop_table("best_of_score")
